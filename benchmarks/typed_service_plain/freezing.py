"""From a trained model to a file that needs no Python."""

from __future__ import annotations

from pathlib import Path

import torch
from typed_service.config import Config
from typed_service.texts import triples

from typed_service_plain.model import Classifier


def freeze(model: Classifier, config: Config) -> torch.jit.ScriptModule:
    """Freeze a model, after the recipe that torch publishes."""
    two = triples(["two", "texts"], config)
    with torch.no_grad(), torch.autocast("cpu", dtype=config.dtype, cache_enabled=False):
        traced = torch.jit.trace(model, two)
        return torch.jit.freeze(traced)


def write(model: Classifier, config: Config, path: Path) -> None:
    """Freeze a model and write it to a file."""
    torch.jit.save(freeze(model, config), path)
