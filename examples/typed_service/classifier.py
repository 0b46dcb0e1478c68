"""Types of the TorchScript module Classifier, written by amp-script."""

from __future__ import annotations

import torch
from torch import Tensor


class Classifier(torch.jit.ScriptModule):
    """TorchScript module Classifier, frozen in bfloat16 for cpu."""

    def forward(self, triples: Tensor) -> Tensor:
        """Run the model.

        Args:
            triples: int64 of shape (any, 256), on cpu.
        """
        raise NotImplementedError

    def __call__(self, triples: Tensor) -> Tensor:
        raise NotImplementedError
