"""Whether a script module is what a stub class says it is.

``load(path, like=Encoder)`` gives a module the type ``Encoder`` without a cast: every method,
attribute and property that the class declares is compared with the program, up to what torch's own
class has. What the class leaves out is not looked at, and it may promise less than the program
holds: fewer trailing parameters, a narrower type to take, a wider one to give. Not compared are
values of defaults, special methods but ``__call__``, and private names without an annotation.
"""

from __future__ import annotations

import enum
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Final, Union, get_args, get_origin, get_type_hints

import torch

from amp_script.errors import ArgumentError, StubMismatchError
from amp_script.stubgen.annotations import Annotation
from amp_script.stubgen.program import (
    Definition,
    Member,
    Method,
    Module,
    Parameter,
    describe,
    literal,
)
from amp_script.typing import TypedScriptModule

__all__ = ["check"]

_ANY: Final = Annotation("Any")
_NONE: Final = Annotation("NoneType")

_CLASSES: Final[Mapping[object, Annotation]] = {
    Any: _ANY,
    None: _NONE,
    bool: Annotation("bool"),
    complex: Annotation("complex"),
    float: Annotation("float"),
    int: Annotation("int"),
    object: _ANY,
    str: Annotation("str"),
    torch.Generator: Annotation("Generator"),
    torch.Stream: Annotation("Stream"),
    torch.Tensor: Annotation("Tensor"),
    torch.device: Annotation("Device"),
    torch.nn.Parameter: Annotation("Tensor"),
    types.NoneType: _NONE,
}
_GENERICS: Final[Mapping[object, str]] = {
    dict: "Dict",
    list: "List",
    torch.futures.Future: "Future",
    tuple: "Tuple",
}


def check(module: torch.jit.ScriptModule, like: type[torch.jit.ScriptModule]) -> None:
    """Compare a script module with a stub class.

    Args:
        module: the module.
        like: a subclass of ``torch.jit.ScriptModule`` or ``TypedScriptModule`` that declares
            methods, attributes and, as attributes of such a class, submodules.

    Raises:
        ArgumentError: ``like`` is no such class, or has annotations that name nothing.
        StubMismatchError: lists everything that the class says and the module is not.
    """
    if not isinstance(like, type) or not issubclass(like, torch.jit.ScriptModule):
        raise ArgumentError(
            "like",
            _text(like),
            "a subclass of torch.jit.ScriptModule or amp_script.typing.TypedScriptModule",
            "Write one with amp-script stubgen, or by hand: "
            "class Net(TypedScriptModule[[Tensor], Tensor]): ...",
        )
    described, definitions = describe(module)
    differences = list(_Comparison(definitions).module(described, like, ""))
    if differences:
        raise StubMismatchError(module.original_name, like.__qualname__, differences)


class _Comparison:
    def __init__(self, definitions: Mapping[str, Definition]) -> None:
        self._definitions = definitions
        self._classes: dict[str, type] = {}

    def module(self, module: Module, like: type, path: str) -> Iterator[str]:
        """What the class says and the module is not, a line each."""
        methods = {method.name: method for method in module.methods}
        for owner in _described_by(like):
            hints = _hints(owner, owner)
            for name, value in vars(owner).items():
                inside = f"{path}{name}"
                receivers = 0 if isinstance(value, staticmethod) else 1
                if isinstance(value, (staticmethod, classmethod)):
                    value = value.__func__
                if inspect.isfunction(value):
                    if not _repeats_forward(name, value, owner):
                        method = methods.get("forward" if name == "__call__" else name)
                        yield from self._method(method, value, receivers, owner, inside)
                elif isinstance(value, property):
                    hint = _hints(value.fget, owner).get("return", Any) if value.fget else Any
                    yield from self._attribute(module, name, hint, owner, inside)
                elif not (name in hints or name.startswith("_") or isinstance(value, type)):
                    yield from self._attribute(module, name, Any, owner, inside)
            for name in inspect.get_annotations(owner):
                yield from self._attribute(module, name, hints[name], owner, f"{path}{name}")
            yield from self._base(methods.get("forward"), owner, path)

    def _method(
        self,
        method: Method | None,
        declared: Callable[..., object],
        receivers: int,
        owner: type,
        path: str,
    ) -> Iterator[str]:
        if method is None:
            yield f"{path}: the program has no such method"
            return
        hints = _hints(declared, owner)
        parameters = list(inspect.signature(declared).parameters.values())[receivers:]
        if [parameter.kind for parameter in parameters] != [_VAR_POSITIONAL, _VAR_KEYWORD]:
            yield from self._parameters(method, parameters, hints, path)
        yield from self._result(method.result, hints.get("return", Any), path)

    def _parameters(
        self,
        method: Method,
        declared: list[inspect.Parameter],
        hints: Mapping[str, object],
        path: str,
    ) -> Iterator[str]:
        for index, (parameter, ours) in enumerate(zip(method.parameters, declared, strict=False)):
            by_position = ours.kind is inspect.Parameter.POSITIONAL_ONLY
            if not by_position and ours.name != parameter.name:
                yield f"{path}: parameter {index + 1} is {parameter.name!r}, not {ours.name!r}"
                continue
            if parameter.keyword_only and ours.kind is not inspect.Parameter.KEYWORD_ONLY:
                yield f"{path}: parameter {ours.name!r} is keyword-only"
            if ours.default is not inspect.Parameter.empty and parameter.default is None:
                yield f"{path}: parameter {ours.name!r} has no default"
            yield from self._taken(parameter, hints.get(ours.name, Any), path)
        missing = [part.name for part in method.parameters[len(declared) :] if part.default is None]
        if missing:
            yield f"{path}: parameter {missing[0]!r} is missing, and has no default"
        for extra in declared[len(method.parameters) :]:
            yield f"{path}: the program has no parameter {extra.name!r}"

    def _base(self, forward: Method | None, owner: type, path: str) -> Iterator[str]:
        """Compare ``TypedScriptModule[[Tensor], Tensor]`` among the bases with forward."""
        for base in getattr(owner, "__orig_bases__", ()):
            if get_origin(base) is TypedScriptModule and len(get_args(base)) == 2:
                parameters, result = get_args(base)
                if forward is None:
                    yield f"{path}forward: the program has no such method"
                    return
                if isinstance(parameters, (tuple, list)):
                    declared = [
                        inspect.Parameter(f"_{index}", inspect.Parameter.POSITIONAL_ONLY)
                        for index, _ in enumerate(parameters)
                    ]
                    hints = {f"_{index}": hint for index, hint in enumerate(parameters)}
                    yield from self._parameters(forward, declared, hints, f"{path}forward")
                yield from self._result(forward.result, result, f"{path}forward")

    def _attribute(
        self, module: Module, name: str, hint: object, owner: type, path: str
    ) -> Iterator[str]:
        children = dict(module.children)
        if name in children:
            if isinstance(hint, type) and issubclass(hint, torch.jit.ScriptModule):
                yield from self.module(children[name], hint, f"{path}.")
            elif hint not in (Any, object, torch.nn.Module):
                yield f"{path}: a submodule, not {_text(hint)}"
            return
        members = {member.name: member for member in _members(module)}
        if name not in members:
            yield f"{path}: the program has no such attribute"
            return
        if get_origin(hint) in (ClassVar, Final):
            (hint,) = get_args(hint)
        held = members[name].annotation
        value = literal(vars(owner)[name]) if name in vars(owner) else None
        if value not in (None, "...", members[name].value):
            yield f"{path}: is {members[name].value or 'no constant'}, not {value}"
        if hint is not Final and held is not None and not self._fits(held, self._of(hint)):
            yield f"{path}: is {self._show(held)}, not {_text(hint)}"

    def _taken(self, parameter: Parameter, hint: object, path: str) -> Iterator[str]:
        if not self._fits(self._of(hint), parameter.annotation):
            shown = self._show(parameter.annotation)
            yield f"{path}: parameter {parameter.name!r} takes {shown}, not {_text(hint)}"

    def _result(self, result: Annotation, hint: object, path: str) -> Iterator[str]:
        if not self._fits(result, self._of(hint)):
            yield f"{path}: gives {self._show(result)}, not {_text(hint)}"

    # --- types ------------------------------------------------------------------------------------

    def _of(self, hint: object) -> Annotation:
        """A Python type as a TorchScript type; a class of the program under its own name."""
        if hint in _CLASSES:
            return _CLASSES[hint]
        origin, args = get_origin(hint), get_args(hint)
        if origin in (Union, types.UnionType):
            return Annotation("Union", tuple(self._of(part) for part in args))
        if origin in _GENERICS:
            return Annotation(_GENERICS[origin], tuple(self._of(part) for part in args))
        if isinstance(hint, type):
            self._classes[hint.__qualname__] = hint
            return Annotation(hint.__qualname__)
        return Annotation(repr(hint))

    def _fits(self, narrow: Annotation, wide: Annotation) -> bool:
        if _ANY in (narrow, wide) or narrow == wide:
            return True
        if narrow.name in ("Optional", "Union"):
            return all(self._fits(part, wide) for part in _alternatives(narrow))
        if wide.name in ("Optional", "Union", "number"):
            return any(self._fits(narrow, part) for part in _alternatives(wide))
        if wide.name == narrow.name:
            exactly = narrow.name != "Tuple"
            return len(narrow.args) == len(wide.args) and all(
                self._fits(inner, outer) and (not exactly or self._fits(outer, inner))
                for inner, outer in zip(narrow.args, wide.args, strict=True)
            )
        if (narrow.name, wide.name) in (("int", "float"), ("int", "complex"), ("float", "complex")):
            return True
        return self._same_definition(narrow.name, wide.name)

    def _same_definition(self, one: str, other: str) -> bool:
        for program, ours in ((one, other), (other, one)):
            definition, declared = self._definitions.get(program), self._classes.get(ours)
            if definition is not None and declared is not None:
                return _defines(definition, declared)
        return False

    def _show(self, annotation: Annotation) -> str:
        return annotation.python(lambda name: name.rpartition(".")[2])


_VAR_POSITIONAL: Final = inspect.Parameter.VAR_POSITIONAL
_VAR_KEYWORD: Final = inspect.Parameter.VAR_KEYWORD


def _described_by(like: type) -> Iterator[type]:
    for owner in like.__mro__:
        if owner in (TypedScriptModule, torch.jit.ScriptModule):
            return
        yield owner


def _hints(declared: object, owner: type) -> dict[str, object]:
    """Type hints, with the classes nested in ``owner`` in sight."""
    try:
        return get_type_hints(declared, localns=dict(vars(owner)))
    except NameError as error:
        raise ArgumentError(
            "like", owner.__qualname__, f"a class whose annotations can be read, and {error}"
        ) from error


def _repeats_forward(name: str, value: Callable[..., object], owner: type) -> bool:
    """Whether a method needs no look: special, or a ``__call__`` that says what forward does."""
    if name == "__call__":
        forward = vars(owner).get("forward")
        return inspect.isfunction(forward) and inspect.signature(forward) == inspect.signature(
            value
        )
    return name.startswith("__") and name.endswith("__")


def _members(module: Module) -> Iterator[Member]:
    yield from (*module.constants, *module.parameters, *module.buffers, *module.attributes)


def _alternatives(annotation: Annotation) -> tuple[Annotation, ...]:
    if annotation.name == "Optional":
        return (*annotation.args, _NONE)
    if annotation.name == "number":
        return (Annotation("int"), Annotation("float"), Annotation("complex"))
    return annotation.args


def _defines(definition: Definition, declared: type) -> bool:
    """Whether a class has the names of a type of the program."""
    names = {member.name for member in definition.members}
    if definition.kind == "tuple":
        return getattr(declared, "_fields", None) == tuple(m.name for m in definition.members)
    if definition.kind == "enum":
        return issubclass(declared, enum.Enum) and set(declared.__members__) == names
    offered = names | {method.name for method in definition.methods}
    own = {*vars(declared), *inspect.get_annotations(declared)}
    return all(name in offered for name in own if not name.startswith("_"))


def _text(hint: object) -> str:
    return hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint)
