"""The frozen module: a ScriptModule that gives the same result wherever it is called.

A frozen graph holds its casts, so nothing around a call may add to them. Every method runs shielded
from the caller's autocast, and ``forward`` checks its inputs against the specs in the metadata,
because a traced graph given another dtype or rank computes something that nobody asked for.

Private names used here, present in torch 2.6 to 2.15: ``RecursiveScriptModule._reconstruct``,
``torch._C.ScriptMethod``.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from typing import Any, NoReturn

import torch
from torch.jit._recursive import wrap_cpp_module
from torch.jit._script import RecursiveScriptModule
from typing_extensions import Self

from amp_script.errors import InputError
from amp_script.jit_state import shield
from amp_script.metadata import EXTRA_FILE, InputSpec, Metadata

__all__ = ["FrozenModule"]

_OWN_NAMES = ("metadata",)


class FrozenModule(RecursiveScriptModule):
    """A frozen TorchScript program and what is known about it.

    Made by ``trace_and_freeze`` and ``load``. It is a real ``torch.jit.ScriptModule``; unlike a
    plain one it ignores the ambient autocast and the JIT pass flag, in every thread and on every
    run, names a wrong input, and refuses conversions that would leave its constants behind.
    """

    _metadata: Metadata

    @classmethod
    def wrap(cls, module: torch.jit.ScriptModule, metadata: Metadata) -> Self:
        """Take over a frozen ScriptModule; the two share their program from then on.

        Args:
            module: what ``torch.jit.freeze`` returned, or such a module loaded from a file.
            metadata: what is known about it. Specs in ``metadata.inputs`` are checked on each call
                of ``forward``.

        Raises:
            ValueError: a preserved attribute or method has the name of a member of this class.
        """
        for name in _OWN_NAMES:
            if module._c.hasattr(name) or module._c._has_method(name):
                raise ValueError(
                    f"preserved attribute {name!r} would hide FrozenModule.{name}; rename it"
                )
        self = cls.__new__(cls)
        self._reconstruct(module._c)
        self.__dict__["_metadata"] = metadata
        return self

    @property
    def metadata(self) -> Metadata:
        """What is known about the program, as it is written into a saved file."""
        return self._metadata

    def __getattr__(self, attr: str) -> Any:
        """Return an attribute of the program; methods come guarded."""
        value = super().__getattr__(attr)
        if isinstance(value, torch._C.ScriptMethod):
            inputs = self._metadata.inputs if attr == "forward" else ()
            value = _GuardedMethod(value, inputs)
            self.__dict__[attr] = value
        return value

    def save(self, f: str | PathLike[str], **kwargs: Any) -> None:
        """Write the program with its metadata; ``amp_script.save`` does so atomically."""
        self._c.save(str(f), _extra_files=self._with_metadata(kwargs))

    def save_to_buffer(self, **kwargs: Any) -> bytes:
        """Return the bytes that :meth:`save` would write."""
        buffer: bytes = self._c.save_to_buffer(_extra_files=self._with_metadata(kwargs))
        return buffer

    def _with_metadata(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        return {**(kwargs.get("_extra_files") or {}), EXTRA_FILE: self._metadata.to_json()}

    def __copy__(self) -> Self:
        """Return a module that shares the constants of this one."""
        return self._again(copy.copy(self._c))

    def __deepcopy__(self, memo: dict[int, Any] | None) -> Self:
        """Return a module with attributes of its own; constants are immutable and shared."""
        return self._again(copy.deepcopy(self._c, memo))

    def _again(self, cpp_module: torch._C.ScriptModule) -> Self:
        module = wrap_cpp_module(cpp_module)  # type: ignore[no-untyped-call]  # torch's own
        return type(self).wrap(module, self._metadata)

    # Conversions: constants of a frozen graph are no parameters, and torch would leave them as they
    # are without a word.

    def half(self) -> NoReturn:
        """Refused: see the error."""
        self._refuse_dtype("half()")

    def bfloat16(self) -> NoReturn:
        """Refused: see the error."""
        self._refuse_dtype("bfloat16()")

    def float(self) -> NoReturn:
        """Refused: see the error."""
        self._refuse_dtype("float()")

    def double(self) -> NoReturn:
        """Refused: see the error."""
        self._refuse_dtype("double()")

    def type(self, dst_type: torch.dtype | str) -> NoReturn:
        """Refused: see the error."""
        self._refuse_dtype(f"type({dst_type})")

    def cuda(self, device: Any = None) -> Self:
        """Refused unless the module was made for CUDA."""
        return self._require_device("cuda")

    def cpu(self) -> Self:
        """Refused unless the module was made for the CPU."""
        return self._require_device("cpu")

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Return self where nothing would change; refuse another device and every dtype."""
        device, dtype = _device_and_dtype(*args, **kwargs)
        if dtype is not None:
            self._refuse_dtype(f"to({dtype})")
        return self if device is None else self._require_device(device.type)

    def _refuse_dtype(self, call: str) -> NoReturn:
        raise RuntimeError(
            f"a frozen module cannot change its dtype: {call} would leave its constants as they "
            "are. Freeze the model again with trace_and_freeze(..., dtype=...); for inputs or "
            "outputs of another dtype, convert them around the call"
        )

    def _require_device(self, device_type: str) -> Self:
        if device_type != self._metadata.device:
            raise RuntimeError(
                f"a frozen module cannot move from {self._metadata.device!r} to {device_type!r}: "
                "its constants would stay behind. Load its file with "
                f"amp_script.load(path, map_location={device_type!r}), or freeze the model on that "
                "device"
            )
        return self


def _device_and_dtype(*args: Any, **kwargs: Any) -> tuple[torch.device | None, torch.dtype | None]:
    device, dtype, _, _ = torch._C._nn._parse_to(*args, **kwargs)
    return device, dtype


class _GuardedMethod:
    """A script method that checks its inputs and runs shielded; otherwise like the method."""

    def __init__(self, method: torch._C.ScriptMethod[..., Any], inputs: Sequence[InputSpec]):
        self._method = method
        self._specs = {spec.name: spec for spec in inputs}
        arguments = method.schema.arguments[1:]
        self._names = [argument.name for argument in arguments]
        self._required = {item.name for item in arguments if not item.has_default_value()}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._specs:
            self._check(args, kwargs)
        with shield():
            return self._method(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._method, name)

    def _check(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        given = dict(zip(self._names, args, strict=False))
        if len(args) > len(self._names) or given.keys() & kwargs.keys():
            raise self._wrong_count(args, kwargs)
        given.update(kwargs)
        if not self._required <= given.keys() <= set(self._names):
            raise self._wrong_count(args, kwargs)
        leaves = {path: leaf for name in given for path, leaf in _leaves(name, given[name])}
        wrong = [
            f"{name}: expected {_expected(spec)}, given {_given(leaves.get(name))}"
            for name, spec in self._specs.items()
            if not _fits(spec, leaves.get(name))
        ]
        if wrong:
            raise InputError("\n  ".join([f"{self._method.name}: wrong input", *wrong]))

    def _wrong_count(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> InputError:
        given = [f"{len(args)} by position"] if args else []
        given += [f"{name}=" for name in kwargs]
        return InputError(
            f"{self._method.name}: expected {len(self._names)} inputs "
            f"({', '.join(self._names)}), given {', '.join(given) or 'none'}"
        )


def _leaves(path: str, value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            yield from _leaves(f"{path}[{index}]", item)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(f"{path}[{key!r}]", item)
    else:
        yield path, value


def _fits(spec: InputSpec, value: object) -> bool:
    if spec.dtype is None:
        return True
    return (
        isinstance(value, torch.Tensor)
        and value.dtype is spec.dtype
        and (spec.shape is None or value.dim() == len(spec.shape))
        and (spec.device is None or value.device.type == spec.device)
    )


def _expected(spec: InputSpec) -> str:
    rank = "" if spec.shape is None else f" of rank {len(spec.shape)}"
    place = "" if spec.device is None else f" on {spec.device}"
    return f"{_dtype_name(spec.dtype)} tensor{rank}{place}"


def _given(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return "nothing" if value is None else f"{type(value).__name__} {value!r:.40}"
    return (
        f"{_dtype_name(value.dtype)} tensor of rank {value.dim()} "
        f"(shape {list(value.shape)}) on {value.device.type}"
    )


def _dtype_name(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")
