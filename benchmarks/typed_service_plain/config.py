"""What can be set about the service."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

DTYPES: Final = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Config:
    """Settings of the service.

    Attributes:
        languages: names of the languages, in the order of the model's outputs.
        buckets: number of rows in the table of character triples.
        width: size of an embedding.
        dtype: dtype of the regions and of the stored weights.
        longest: number of triples of a text that count.
    """

    languages: tuple[str, ...] = ("English", "French", "German")
    buckets: int = 4096
    width: int = 32
    dtype: torch.dtype = torch.bfloat16
    longest: int = 256

    @classmethod
    def read(cls, path: Path) -> Config:
        """Read a JSON file that has some of the settings.

        Raises:
            ValueError: a setting has a value that is none.
        """
        settings: dict[str, object] = json.loads(path.read_text())
        dtype = settings.get("dtype", "bfloat16")
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise ValueError(f"{path}: dtype {dtype!r}: expected {' or '.join(DTYPES)}")
        width = settings.get("width", cls.width)
        if not isinstance(width, int):
            raise ValueError(f"{path}: width {width!r}: expected an integer")
        return cls(width=width, dtype=DTYPES[dtype])
