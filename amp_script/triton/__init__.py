"""Model repositories for Triton Inference Server, written from frozen programs.

Triton's PyTorch backend runs a program as libtorch does, without Python and without amp-script.
What it takes, from ``src/pt/model_instance_state.cc`` and ``src/libtorch_utils.cc`` of
https://github.com/triton-inference-server/pytorch_backend:

- ``forward`` takes tensors, or one dictionary of tensors. Inputs go by the names of its arguments,
  or by the dictionary's keys.
- ``forward`` returns a tensor or a tuple of tensors, none of them without dimensions. Outputs go by
  their place, which the number behind the two underscores of ``name__0`` tells.
- No tensor at the border is in bfloat16.

A program with other arguments or another result gets a ``forward`` around it that takes and returns
tensors one by one.
"""

from .border import Port
from .repository import require_name, write_repository

__all__ = ["Port", "require_name", "write_repository"]
