"""The frozen module: a ScriptModule that gives the same result wherever it is called.

A frozen graph holds its casts, so nothing around a call may add to them. Every method runs shielded
from the caller's autocast, and ``forward`` checks its inputs against the specs in the metadata,
because a traced graph given another dtype or rank computes something that nobody asked for.

The module has two forms of its program. The *storable* one, in the C++ module ``_c``, is what is
saved, printed, traced through and scripted into other modules. Under a compute plan other than
native, calls run the plan's form, and the storable one lends it its constants: whoever reads ``_c``
gets it whole again.

Private names used here, present in torch 2.6 to 2.15: ``RecursiveScriptModule._reconstruct`` and
``_c``, ``torch._C.ScriptMethod``, ``torch._C.ModuleDict``, ``torch._C._get_tracing_state``,
``torch._C.import_ir_module_from_buffer``.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from os import PathLike
from typing import Any, NoReturn

import torch
from torch.jit._script import RecursiveScriptModule
from torch.overrides import handle_torch_function, has_torch_function
from typing_extensions import Self

from amp_script.compatibility import oldest_libtorch, runs_in_lite_interpreter
from amp_script.compute import Compute, CppModule, Program, bake, choose
from amp_script.disk import require_room, stored_bytes, to_path
from amp_script.dtypes import dtype_name
from amp_script.errors import ArgumentError, InputError, StructureError
from amp_script.jit_state import shield
from amp_script.metadata import EXTRA_FILE, InputSpec, Metadata
from amp_script.structure import (
    Container,
    containers,
    described,
    flatten,
    from_script,
    map_tensors,
    named_leaves,
    tensors_in,
    to_script,
)

__all__ = ["FrozenModule"]

_OWN_NAMES = ("compute", "metadata", "planned", "storable")

_PLAIN_CLASSES = frozenset({torch.Tensor})


@dataclass(frozen=True)
class _Loan:
    """The programs that have a storable program's constants; all modules that hold it share it."""

    programs: list[Program] = field(default_factory=list)
    _unpacked: list[Program] = field(default_factory=list)
    _changing: threading.RLock = field(default_factory=threading.RLock)

    def unpacked(self, packed: Program, cpp_module: CppModule) -> Program:
        """What runs in the place of a packed program where gradients are asked for.

        It holds the weights in float32 a second time, from the first such call on.
        """
        with self._changing:
            if not self._unpacked:
                with self.paused():
                    self._unpacked.append(packed.unpacked(cpp_module))
                self.programs.extend(self._unpacked)
        return self._unpacked[0]

    def end(self) -> None:
        """Have every constant given back for good."""
        with self._changing:
            while self.programs:
                self.programs[-1].give_back()
                self.programs.pop()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The storable program is whole inside the block."""
        with self._changing, ExitStack() as stack:
            for program in self.programs:
                stack.enter_context(program.whole())
            yield


class FrozenModule(RecursiveScriptModule):
    """A frozen TorchScript program and what is known about it.

    Made by ``trace_and_freeze`` and ``load``. It is a real ``torch.jit.ScriptModule``; unlike a
    plain one it ignores the ambient autocast and the JIT pass flag, in every thread and on every
    run, names a wrong input, and refuses conversions that would leave its constants behind.
    """

    @classmethod
    def wrap(
        cls, module: torch.jit.ScriptModule, metadata: Metadata, *, compute: Compute = "native"
    ) -> Self:
        """Take over a frozen ScriptModule.

        Args:
            module: what ``torch.jit.freeze`` returned, such a module loaded from a file, or a
                FrozenModule, which shares its program with the new one. A plain ScriptModule must
                not be used on its own afterwards.
            metadata: what is known about it. Specs in ``metadata.inputs`` are checked on each call
                of ``forward``.
            compute: the plan that calls run.

        Raises:
            ArgumentError: a preserved attribute or method has the name of a member of this class,
                or there is no such plan for the program.
        """
        for name in _OWN_NAMES:
            if module._c.hasattr(name) or module._c._has_method(name):
                raise ArgumentError(
                    "module",
                    f"a program whose preserved attribute {name!r} would hide FrozenModule.{name}",
                    "one with another name for it",
                )
        cpp_module: CppModule = module._c
        loan = module._loan if isinstance(module, FrozenModule) else _Loan()
        program = _program(cpp_module, metadata, compute)
        if program is not None:
            loan.programs.append(program)
        return cls._assemble(cpp_module, metadata, program, loan)

    @classmethod
    def _assemble(
        cls, cpp_module: CppModule, metadata: Metadata, program: Program | None, loan: _Loan
    ) -> Self:
        self = cls.__new__(cls)
        self._reconstruct(cpp_module)
        vars(self).update(_metadata=metadata, _program=program, _loan=loan)
        return self

    @property
    def metadata(self) -> Metadata:
        """What is known about the program, as it is written into a saved file."""
        metadata: Metadata = self.__dict__["_metadata"]
        return metadata

    @property
    def compute(self) -> str:
        """The plan that calls run: ``"native"``, ``"upcast"`` or ``"packed"``."""
        program: Program | None = self.__dict__["_program"]
        return self.metadata.compute if program is None else program.plan.name

    @property
    def planned(self) -> int:
        """How many operators that plan runs in other kernels than the stored program names."""
        program: Program | None = self.__dict__["_program"]
        return 0 if program is None else program.changed

    @contextmanager
    def storable(self) -> Iterator[CppModule]:
        """The program as it is stored, whole inside the block; nothing of it may be kept."""
        with self._loan.paused():
            yield self._cpp

    @property
    def _c(self) -> CppModule:
        """The storable program, whole from now on: whoever asks for it may keep it."""
        loan: _Loan | None = self.__dict__.get("_loan")
        if loan is not None:
            loan.end()
        return self._cpp

    @_c.setter
    def _c(self, cpp_module: CppModule) -> None:
        vars(self)["_cpp"] = cpp_module

    @property
    def _loan(self) -> _Loan:
        loan: _Loan = self.__dict__["_loan"]
        return loan

    @property
    def _cpp(self) -> CppModule:
        """The same without asking for its constants: for attributes and names of methods."""
        return self.__dict__["_cpp"]

    def __getattr__(self, attr: str) -> Any:
        """Return an attribute of the program; methods come guarded."""
        modules = self.__dict__["_modules"]
        if self.__dict__["_initializing"]:
            return super().__getattr__(attr)
        if attr in modules:
            return modules[attr]
        if self._cpp.hasattr(attr):
            return self._cpp.getattr(attr)
        if not self._cpp._has_method(attr):
            return torch.nn.Module.__getattr__(self, attr)
        inputs = self.metadata.inputs if attr == "forward" else ()
        method = _GuardedMethod(self._cpp, attr, inputs, self.__dict__["_program"], self._loan)
        vars(self)[attr] = method
        return method

    def __setattr__(self, attr: str, value: Any) -> None:
        """Set an attribute of the program where it has one, else one of this object.

        Raises:
            AttributeError: no method reads the program's attribute; setting it would do nothing.
            TypeError: a tensor of another dtype or device than the program's.
        """
        if self.__dict__["_initializing"] or attr in self._modules or attr == "_c":
            super().__setattr__(attr, value)
        elif self._cpp.hasattr(attr):
            self._require_settable(attr, value)
            self._cpp.setattr(attr, value)
        else:
            torch.nn.Module.__setattr__(self, attr, value)

    def _require_settable(self, attr: str, value: object) -> None:
        if attr not in _read_attributes(self._cpp):
            raise AttributeError(
                f"the program does not read {attr!r}: its value was held fast when the program was "
                f"made, and setting it to {value!r:.40} would change nothing. Freeze the model "
                "again with the new value"
            )
        before = self._cpp.getattr(attr)
        if isinstance(before, torch.Tensor) and isinstance(value, torch.Tensor):
            wanted = dtype_name(before.dtype), before.device.type
            given = dtype_name(value.dtype), value.device.type
            if given != wanted:
                raise TypeError(
                    f"{attr}: expected a {wanted[0]} tensor on {wanted[1]}, given "
                    f"{given[0]} on {given[1]}"
                )

    def save(self, f: str | PathLike[str], **kwargs: Any) -> None:
        """Write the program with its metadata; ``amp_script.save`` does so atomically.

        Raises:
            OSError: the disk is full, or may not be written to.
            ArgumentError: ``f`` is no path.
        """
        path = to_path(f)
        with self._loan.paused():
            require_room(path.parent, stored_bytes(self._cpp, self._state()))
            self._cpp.save(str(path), _extra_files=self._with_metadata(kwargs))

    def _state(self) -> list[torch.Tensor]:
        """Tensors that are attributes: preserved ones, and those that the program changes."""
        names = _read_attributes(self._cpp)
        values = (
            module.getattr(name)
            for module in _modules_in(self._cpp)
            for name in names
            if module.hasattr(name)
        )
        return [value for value in values if isinstance(value, torch.Tensor)]

    def save_to_buffer(self, **kwargs: Any) -> bytes:
        """Return the bytes that :meth:`save` would write."""
        with self._loan.paused():
            buffer: bytes = self._cpp.save_to_buffer(_extra_files=self._with_metadata(kwargs))
        return buffer

    def baked(self, compute: Compute) -> Self:
        """Return a copy with a plan written into the storable program.

        Args:
            compute: ``"upcast"``; the weights of the copy are in float32.

        Raises:
            ArgumentError: any other plan: a native program needs nothing, a packed one cannot be
                stored, and a plan that is baked in cannot be taken out.
        """
        if self.metadata.compute == compute:
            return self
        if compute != "upcast":
            raise ArgumentError(
                "compute",
                f"{compute!r:.60}, with which a program cannot be stored",
                f"None to store it as it is ({self.metadata.compute!r}), or 'upcast'",
            )
        cpp_module = _imported(self.save_to_buffer())
        bake(cpp_module, self.metadata.inputs, choose(compute, self.metadata.device))
        # What was verified is not what the copy computes.
        metadata = replace(self.metadata, compute=compute, verification=None)
        return self._assemble(cpp_module, metadata, None, _Loan())

    def _with_metadata(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        graphs = [self._cpp._get_method(name).graph for name in self._cpp._method_names()]
        metadata = replace(
            self.metadata,
            oldest_libtorch=oldest_libtorch(graphs),
            lite_interpreter=runs_in_lite_interpreter(graphs),
            torch_version=torch.__version__,
        )
        return {**(kwargs.get("_extra_files") or {}), EXTRA_FILE: metadata.to_json()}

    def __copy__(self) -> Self:
        """Return a module that shares the constants of this one."""
        return self._again(copy.copy(self._cpp))

    def __deepcopy__(self, memo: dict[int, Any] | None) -> Self:
        """Return a module with attributes of its own; constants are immutable and shared."""
        return self._again(copy.deepcopy(self._cpp, memo))

    def _again(self, cpp_module: CppModule) -> Self:
        return self._assemble(cpp_module, self.metadata, self.__dict__["_program"], self._loan)

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
        if device_type != self.metadata.device:
            raise RuntimeError(
                f"a frozen module cannot move from {self.metadata.device!r} to {device_type!r}: "
                "its constants would stay behind. Load its file with "
                f"amp_script.load(path, map_location={device_type!r}), or freeze the model on that "
                "device"
            )
        return self


def _device_and_dtype(*args: Any, **kwargs: Any) -> tuple[torch.device | None, torch.dtype | None]:
    torch_c: Any = torch._C
    device, dtype, _, _ = torch_c._nn._parse_to(*args, **kwargs)
    return device, dtype


def _modules_in(cpp_module: CppModule) -> Iterator[CppModule]:
    """A module and every module inside it, such as a program with another around it."""
    yield cpp_module
    children: Any = torch._C.ModuleDict(cpp_module)
    for _, child in children.items():
        yield from _modules_in(child)


def _read_attributes(cpp_module: CppModule) -> set[str]:
    """Names of the attributes that a program's methods read."""
    graphs = [cpp_module._get_method(name).graph for name in cpp_module._method_names()]
    reads = (node for graph in graphs for node in graph.findAllNodes("prim::GetAttr"))
    return {node.s("name") for node in reads}


def _imported(archive: bytes) -> CppModule:
    torch_c: Any = torch._C
    return torch_c.import_ir_module_from_buffer(torch_c.CompilationUnit(), archive, None, {}, False)


def _program(cpp_module: CppModule, metadata: Metadata, compute: Compute) -> Program | None:
    """The program under the plan; ``None`` where that is the storable one."""
    plan = choose(compute, metadata.device)
    if metadata.compute != "native":
        if compute not in ("auto", metadata.compute):
            raise ArgumentError(
                "compute",
                repr(compute),
                f"'auto' or {metadata.compute!r}, the plan that the program has baked in",
                "Save it with compute=None for a file that serves every plan",
            )
        return None
    if plan.name == "native":
        return None
    program = Program(cpp_module, metadata.inputs, plan)
    return program if program.changed else None


class _GuardedMethod:
    """A script method that checks its inputs and runs shielded; otherwise like the method."""

    def __init__(
        self,
        cpp_module: CppModule,
        name: str,
        inputs: Sequence[InputSpec],
        program: Program | None,
        loan: _Loan,
    ) -> None:
        self._cpp = cpp_module
        self._loan = loan
        self._name = name
        self._program = program
        self._method: torch._C.ScriptMethod[..., Any] = cpp_module._get_method(name)
        self._specs = {spec.name: spec for spec in inputs}
        arguments = self._method.schema.arguments[1:]
        self._types = {argument.name: argument.type for argument in arguments}
        self._names = list(self._types)
        self._plain = self._specs_of_tensors()
        self._defaults = {
            argument.name: argument.default_value
            for argument in arguments
            if argument.has_default_value()
        }

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # A model's weights leave little of Python in the processor's caches, so that what is done
        # here costs some twenty times what it costs in a loop: the usual call does the least.
        if not kwargs and self._are_plain(args):
            arguments: Sequence[object] = args
        else:
            arguments = self._arguments(args, kwargs)
            if subclassed := self._subclassed(arguments):
                return self._call_for(subclassed, args, kwargs)
        with shield():
            if self._program is None or torch._C._get_tracing_state() is not None:
                return from_script(self._storable()(*arguments))
            program = self._program
            if not program.passes_gradients(self._name) and self._needs_gradients(arguments):
                program = self._loan.unpacked(program, self._cpp)
            return from_script(program.run(self._cpp, self._name, arguments))

    def _specs_of_tensors(self) -> list[InputSpec] | None:
        """Specs of the inputs by position if all are tensors, and nothing that holds tensors."""
        specs = [self._specs[name] for name in self._names if name in self._specs]
        kinds = [kind.kind() for kind in self._types.values()]
        return specs if kinds == ["TensorType"] * len(specs) else None

    def _are_plain(self, args: tuple[Any, ...]) -> bool:
        """Whether these are all the inputs, and tensors of torch's own class that fit."""
        specs = self._plain
        return (
            specs is not None
            and len(args) == len(specs)
            and _PLAIN_CLASSES.issuperset(map(type, args))
            and all(map(_fits, specs, args))
        )

    def _arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Sequence[object]:
        """What the program takes, by position; checked."""
        given = self._bind(args, kwargs)
        arguments = [to_script(given[name], kind, name) for name, kind in self._types.items()]
        if self._specs:
            self._check(given)
        return arguments

    def _subclassed(self, arguments: Sequence[object]) -> list[torch.Tensor]:
        """The tensors whose class has a say in what operators on them return."""
        return [
            tensor
            for value in arguments
            for _, tensor in tensors_in(value, self._name)
            if type(tensor) is not torch.Tensor and has_torch_function((tensor,))
        ]

    def _call_for(
        self, subclassed: Sequence[torch.Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Call under the protocol for subclasses of tensors, as torch's own functions do.

        What it does to a result by itself is right for a tensor and for a tuple of tensors alone.
        """
        results: list[Any] = []

        def run(*args: Any, **kwargs: Any) -> Any:
            result = self(*args, **kwargs)
            if isinstance(result, torch.Tensor):
                return result
            results.append(result)
            return tuple(tensor for _, tensor in tensors_in(result, self._name))

        returned = handle_torch_function(run, subclassed, *args, **kwargs)
        if not results:
            return returned
        tensors = iter(returned)
        return map_tensors(results[-1], lambda _: next(tensors), self._name)

    def _needs_gradients(self, arguments: Sequence[object]) -> bool:
        if not torch.is_grad_enabled():
            return False
        passed = (tensor for value in arguments for _, tensor in tensors_in(value, self._name))
        held = (self._cpp.getattr(name) for name in self._read)
        return any(getattr(value, "requires_grad", False) for value in (*passed, *held))

    @cached_property
    def _read(self) -> set[str]:
        return _read_attributes(self._cpp)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storable(), name)

    def _storable(self) -> torch._C.ScriptMethod[..., Any]:
        if self._loan.programs:
            self._loan.end()
        return self._method

    def _bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Every argument by name, defaults included."""
        given = {**dict(zip(self._names, args, strict=False)), **kwargs}
        complete = {**self._defaults, **given}
        if len(given) < len(args) + len(kwargs) or complete.keys() != set(self._names):
            raise self._wrong_count(args, kwargs)
        return complete

    def _check(self, given: Mapping[str, Any]) -> None:
        leaves = {path: leaf for name in given for path, leaf in _leaves(name, given[name])}
        wrong = [
            f"{name}: expected {_expected(spec)}, given {_given_at(name, leaves, given)}"
            for name, spec in self._specs.items()
            if not _fits(spec, leaves.get(name))
        ] or [
            f"{path}: expected nothing, given {_given(leaf)}"
            for path, leaf in leaves.items()
            if isinstance(leaf, torch.Tensor) and path not in self._specs
        ]
        if wrong:
            raise InputError("\n  ".join([f"{self._name}: wrong input", *wrong]))

    def _wrong_count(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> InputError:
        given = [f"{len(args)} by position"] if args else []
        given += [f"{name}=" for name in kwargs]
        unknown = [name for name in kwargs if name not in self._types]
        advice = (
            ". What the example left out when the model was frozen is no input of the program: "
            f"freeze the model with {', '.join(unknown) or 'it'} in the example"
        )
        more = self._name == "forward" and (unknown or len(args) > len(self._names))
        return InputError(
            f"{self._name}: expected {len(self._names)} inputs "
            f"({', '.join(self._names)}), given {', '.join(given) or 'none'}"
            + (advice if more else "")
        )


def _leaves(path: str, value: object) -> list[tuple[str, object]]:
    try:
        return named_leaves(path, value)
    except StructureError:
        return [(path, value)]


def _fits(spec: InputSpec, value: object) -> bool:
    if spec.dtype is None:
        return True
    if not isinstance(value, torch.Tensor) or value.dtype is not spec.dtype:
        return False
    # Asked so, a tensor on the CPU makes no object for the answer.
    place = "cpu" if value.is_cpu else value.device.type
    right_rank = spec.shape is None or value.dim() == len(spec.shape)
    return right_rank and spec.device in (None, place)


def _expected(spec: InputSpec) -> str:
    rank = "" if spec.shape is None else f" of rank {len(spec.shape)}"
    place = "" if spec.device is None else f" on {spec.device}"
    return f"{dtype_name(spec.dtype)} tensor{rank}{place}"


def _given_at(path: str, leaves: Mapping[str, object], given: Mapping[str, object]) -> str:
    """What a call has at a path, in an error."""
    if path in leaves:
        return _given(leaves[path])
    found = (each for name, value in given.items() for each in _containers(name, value))
    return next((described(each) for each in found if each.path == path), "nothing")


def _containers(path: str, value: object) -> list[Container]:
    try:
        return list(containers(flatten(value, path)[1]))
    except StructureError:
        return []


def _given(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return "None" if value is None else f"{type(value).__name__} {value!r:.40}"
    return (
        f"{dtype_name(value.dtype)} tensor of rank {value.dim()} "
        f"(shape {list(value.shape)}) on {value.device.type}"
    )
