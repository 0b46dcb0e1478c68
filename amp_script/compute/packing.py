"""Packed weights of convolutions, which are packed anew when a program is called with other sizes.

The best layout of a convolution's weights depends on the height and width of its input, and in
places on the number of threads, but not on the batch (compared for oneDNN's layouts of ResNet's
layers, batches of 1 to 32). Run in a layout for another size they are reordered by a slow routine
on every call, so a packed program takes its weights as inputs and reports the sizes that it saw:

* Sizes that come twice in a row are what the weights are packed for from then on. One weight is
  packed at a time, so that there are never two copies of the model.
* Sizes that differ each time leave the weights plain, which is how fast an upcast program is.
* A single call in between, such as for the last and smaller image, changes nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TypeAlias

import torch

from .constants import PackedWeight, return_free_memory

__all__ = ["Packing"]

Sizes: TypeAlias = "list[list[int]]"
"""Sizes of the convolutions' inputs, one list a convolution."""


class Packing:
    """The weights that a packed graph takes as inputs.

    Args:
        weights: of the convolutions, in the order of the graph's inputs; packed for the number of
            threads that the calling thread uses.
    """

    def __init__(self, weights: Sequence[PackedWeight]) -> None:
        self._weights = weights
        self._lock = threading.Lock()
        self._packed = self._last = _seen([weight.packed_for for weight in weights])

    def inputs(self) -> list[object]:
        """What the graph takes after its own inputs: sizes that the weights fit, and weights."""
        with self._lock:
            threads, _ = self._packed
            fits = threads == torch.get_num_threads()
            sizes = [weight.packed_for if fits else [] for weight in self._weights]
            return [sizes, *(weight.tensor for weight in self._weights)]

    def saw(self, sizes: Sizes) -> None:
        """Take note of the sizes in a call, and pack the weights for them if that will pay."""
        now = _seen(sizes)
        with self._lock:
            before, self._last = self._last, now
            if now == self._packed:
                return
            if now == before:
                for weight, size in zip(self._weights, sizes, strict=True):
                    weight.pack_for(size)
                self._packed = now
            elif before != self._packed and any(self._packed[1]):
                for weight in self._weights:
                    weight.unpack()
                self._packed = _seen([[] for _ in self._weights])
            else:
                return
            return_free_memory()


_Seen: TypeAlias = "tuple[int, Sizes]"


def _seen(sizes: Sequence[Sequence[int]]) -> _Seen:
    """What a layout depends on: the number of threads, and sizes without the batch."""
    return torch.get_num_threads(), [list(size[1:]) for size in sizes]
