"""Custom autograd functions, which TorchScript of newer torch does not compile any more.

TorchScript calls ``MyFunction.apply`` through Python, and knows such a call by a method that is
written in Python. From torch 2.14 on this one is written in C++, and refused. TorchScript also
looks at the function's class, and fails at the properties that it has from torch 2.15 on. So while
something is compiled, there is a method in Python that calls torch's own, and the properties are
marked as of no use to TorchScript; what was compiled keeps that method.

Private names used here, in torch 2.14 and 2.15: the class attribute ``__jit_unused_properties__``,
which TorchScript looks for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.autograd import Function

__all__ = ["custom_functions_compiled"]

_UNUSED = "__jit_unused_properties__"

_own_apply = vars(Function)["apply"]


def apply(function: type[Function], /, *args: object, **kwargs: object) -> object:
    """Call ``function.apply`` as torch has it."""
    call = _own_apply.__get__(None, function)
    return call(*args, **kwargs)


apply.__annotations__.clear()  # which TorchScript reads, where it finds any

_APPLY = apply.__name__


@contextmanager
def custom_functions_compiled() -> Iterator[None]:
    """Have TorchScript compile calls of custom functions; for one thread at a time."""
    if isinstance(vars(Function)[_APPLY], classmethod):
        yield  # in older torch, and inside another such block
        return
    properties = [name for name in dir(Function) if isinstance(getattr(Function, name), property)]
    setattr(Function, _UNUSED, properties)
    setattr(Function, _APPLY, classmethod(apply))
    try:
        yield
    finally:
        setattr(Function, _APPLY, _own_apply)
        delattr(Function, _UNUSED)
