"""The service: a frozen file in, answers out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from typed_service.config import Config
from typed_service.texts import triples


class Answer(NamedTuple):
    """A language, and how probable it is."""

    language: str
    probability: float


class Service:
    """Tells languages with a frozen model."""

    def __init__(self, path: Path, config: Config) -> None:
        self._config = config
        self._model = torch.jit.load(path)

    def answer(self, texts: Sequence[str]) -> list[Answer]:
        """Tell the language of each text."""
        scores = self._model(triples(texts, self._config))
        best = scores.exp().max(dim=1)
        return [
            Answer(self._config.languages[int(best.indices[row])], float(best.values[row]))
            for row in range(len(texts))
        ]
