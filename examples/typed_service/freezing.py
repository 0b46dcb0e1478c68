"""From a trained model to a file that needs no Python."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

import amp_script
from amp_script.typing import TypedScriptModule
from typed_service.config import Config
from typed_service.model import Classifier
from typed_service.texts import triples


def freeze(model: Classifier, config: Config) -> TypedScriptModule[[Tensor], Tensor]:
    """Freeze a model to what eager autocast computes, for any number of texts."""
    one, two = triples(["one text"], config), triples(["two", "texts"], config)
    return amp_script.trace_and_freeze(model, two, dtype=config.dtype, check_inputs=[one])


def write(model: Classifier, config: Config, path: Path) -> None:
    """Freeze a model and write it to a file."""
    amp_script.save(freeze(model, config), path)
