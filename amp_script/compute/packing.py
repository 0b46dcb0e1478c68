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
        weights: of the convolutions, in the order of the graph's inputs. Graphs may share them.
    """

    def __init__(self, weights: Sequence[PackedWeight]) -> None:
        self._weights = weights
        self._lock = threading.Lock()
        self._last = self._asked = self._packed()

    def inputs(self) -> list[object]:
        """What the graph takes after its own inputs: sizes that the weights fit, and weights."""
        threads, forms = torch.get_num_threads(), [weight.form for weight in self._weights]
        sizes = [form.sizes if form.threads == threads else [] for form in forms]
        return [sizes, *(form.tensor for form in forms)]

    def saw(self, sizes: Sizes) -> None:
        """Take note of the sizes in a call, and pack the weights for them if that will pay."""
        threads = torch.get_num_threads()
        now = [(threads, size[1:]) for size in sizes]
        with self._lock:
            before, self._last, packed = self._last, now, self._packed()
            if now in (packed, self._asked):
                return
            if now == before:
                for weight, size in zip(self._weights, sizes, strict=True):
                    weight.pack_for(size)
                self._asked = now
            elif before != packed and any(size for _, size in packed):
                for weight in self._weights:
                    weight.unpack()
                self._asked = self._packed()
            else:
                return
        return_free_memory()

    def _packed(self) -> list[tuple[int, list[int]]]:
        """What the layouts suit: the number of threads, and sizes without the batch."""
        return [(weight.form.threads, weight.form.sizes[1:]) for weight in self._weights]
