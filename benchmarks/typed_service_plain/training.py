"""Training, in reduced precision too."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional
from typed_service.config import Config
from typed_service.texts import TEXTS, triples

from typed_service_plain.model import Classifier


def train(config: Config, *, steps: int = 60, seed: int = 0) -> Classifier:
    """Train a classifier on the built-in texts, and return it in evaluation mode."""
    torch.manual_seed(seed)
    model = Classifier(config)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    inputs, targets = examples(config)
    for _ in range(steps):
        optimizer.zero_grad()
        scores: Tensor = model(inputs)
        torch.autograd.backward(functional.nll_loss(scores, targets))
        optimizer.step()
    return model.eval()


def examples(config: Config) -> tuple[Tensor, Tensor]:
    """The built-in texts as inputs and targets."""
    texts = [(text, name) for name in config.languages for text in TEXTS[name]]
    targets = torch.tensor([config.languages.index(name) for _, name in texts])
    return triples([text for text, _ in texts], config), targets
