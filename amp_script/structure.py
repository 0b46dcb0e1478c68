"""Nested inputs and outputs: taken apart to tensors, rebuilt, and written as TorchScript.

Tracing knows tensors; programs take and return tuples, dictionaries and objects. A value is taken
apart into its tensors and a :class:`Structure`, the tree that says where each tensor was. From the
structure of a call and of its result comes the TorchScript source of a ``forward`` that has the
program's own argument names, takes the nested inputs apart, calls the traced tensors-to-tensors
method and builds the result.

TorchScript's dictionaries and lists hold values of one type. A dictionary of several types is
returned as a named tuple whose type name begins with :data:`MAPPING_PREFIX`; :func:`from_script`
turns it into a dictionary for callers in Python. Objects such as a dataclass or the model outputs
of ``transformers`` become dictionaries.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import keyword
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import GenericAlias
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import torch
from torch import nn

from amp_script.errors import InputError, StructureError, TracingError

__all__ = [
    "MAPPING_PREFIX",
    "Constant",
    "Container",
    "Number",
    "Structure",
    "TensorLeaf",
    "containers",
    "described",
    "first_difference",
    "flatten",
    "forward_source",
    "from_script",
    "leaves",
    "map_tensors",
    "named_leaves",
    "reconcile",
    "tensors_in",
    "to_script",
    "unflatten",
]

MAPPING_PREFIX: Final = "MappingOf"
"""Begins the type name of each named tuple that stands for a dictionary."""

Kind = Literal["tuple", "namedtuple", "list", "mapping"]
Key: TypeAlias = "str | int"


@dataclass(frozen=True)
class TensorLeaf:
    """A tensor's place.

    Attributes:
        path: such as ``"batch['ids']"`` or ``"output[0]"``.
    """

    path: str


@dataclass(frozen=True)
class Constant:
    """A value that is no tensor, and that a trace holds fast.

    Attributes:
        path: the value's place.
        value: None, or an int, float, bool or str, or of a class derived from one, such as an
            enumeration's.
    """

    path: str
    value: object

    @property
    def plain(self) -> Any:
        """The value as TorchScript has it: None, or of one of these very types."""
        return _plain(self.value)


def _plain(value: object) -> object:
    """A number or string without the class that it may have of its own; all else as it is."""
    # Of the base class: an enumeration makes something else of its text.
    match value:
        case bool():
            return value
        case int():
            return int.__int__(value)
        case float():
            return float.__float__(value)
        case str():
            return str.__str__(value)
    return value


@dataclass(frozen=True)
class Number:
    """A Python number of eager mode that is a tensor while tracing, such as a returned size.

    Attributes:
        path: the number's place.
        kind: int, float or bool.
    """

    path: str
    kind: type


@dataclass(frozen=True)
class Container:
    """A tuple, list, mapping or object with its parts in order.

    Attributes:
        path: the container's place.
        kind: what it is in TorchScript, before any change that TorchScript's types force.
        type: the Python type.
        name: its name.
        keys: names or numbers of the parts.
        parts: structures of the parts.
        rebuild: makes a container like the example from new parts.
    """

    path: str
    kind: Kind
    type: type = field(compare=False, repr=False)
    name: str
    keys: tuple[Key, ...]
    parts: tuple[Structure, ...]
    rebuild: Callable[[Sequence[object]], object] = field(compare=False, repr=False)


JitType: TypeAlias = Any
"""A ``torch._C.JitType`` of some kind, whose methods torch's stubs lack."""

Structure: TypeAlias = "TensorLeaf | Number | Constant | Container"


def flatten(value: object, path: str) -> tuple[list[torch.Tensor], Structure]:
    """Take a value apart.

    Args:
        value: a tensor, None, a number, bool or string, or a tuple, list, mapping, named tuple,
            dataclass or ``transformers`` model output of such values.
        path: the value's name, with which the paths inside it begin.

    Returns:
        The tensors in order, and the structure that they were in.

    Raises:
        StructureError: a part is something else, contains itself or is nested too deep; the error
            names its path and type.
    """
    return _flatten(value, path, ())


def _flatten(
    value: object, path: str, around: tuple[object, ...]
) -> tuple[list[torch.Tensor], Structure]:
    if isinstance(value, torch.Tensor):
        return [value], TensorLeaf(path)
    if value is None or isinstance(value, (bool, int, float, str)):
        return [], Constant(path, value)
    opened = _open(value, path, around)
    if opened is None:
        raise StructureError(path, type(value), _wrong_key(value))
    tensors: list[torch.Tensor] = []
    parts: list[Structure] = []
    for inside, item in opened.named_parts(path):
        found, structure = _flatten(item, inside, (*around, value))
        tensors += found
        parts.append(structure)
    kind = type(value)
    container = Container(
        path, opened.kind, kind, kind.__name__, opened.keys, tuple(parts), opened.rebuild
    )
    return tensors, container


def _wrong_key(value: object) -> str:
    """What is wrong with a mapping that is no structure; nothing with what is none."""
    if not isinstance(value, Mapping):
        return ""
    key = next(key for key in value if not isinstance(key, str))
    return f"its key {key!r:.40} is a {type(key).__name__}: expected keys that are strings"


def unflatten(structure: Structure, tensors: Iterator[object]) -> object:
    """Put a value like the example together, taking the tensors in order from ``tensors``.

    Raises:
        StructureError: there is an object of which no copy with other tensors can be made.
    """
    if isinstance(structure, (TensorLeaf, Number)):
        return next(tensors)
    if isinstance(structure, Constant):
        return structure.value
    return structure.rebuild([unflatten(part, tensors) for part in structure.parts])


def leaves(structure: Structure) -> Iterator[TensorLeaf | Number | Constant]:
    """All that is no container, in the order of :func:`flatten`."""
    if isinstance(structure, Container):
        for part in structure.parts:
            yield from leaves(part)
    else:
        yield structure


def containers(structure: Structure) -> Iterator[Container]:
    """A structure and all inside it that are containers, the outer ones first."""
    if isinstance(structure, Container):
        yield structure
        for part in structure.parts:
            yield from containers(part)


def named_leaves(name: str, value: object) -> list[tuple[str, object]]:
    """A value's tensors and constants, each with its path, constants as TorchScript has them."""
    tensors, structure = flatten(value, name)
    remaining = iter(tensors)
    return [
        (leaf.path, leaf.plain if isinstance(leaf, Constant) else next(remaining))
        for leaf in leaves(structure)
    ]


def tensors_in(value: object, path: str) -> list[tuple[str, torch.Tensor]]:
    """The tensors of any value with their paths; what no structure can have in it holds none.

    Raises:
        StructureError: a part is nested too deep.
    """
    return _tensors_in(value, path, ())


def _tensors_in(
    value: object, path: str, around: tuple[object, ...]
) -> list[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        return [(path, value)]
    if _is_one_of(value, around):
        return []
    opened = _open(value, path, around, any_keys=True)
    parts = [] if opened is None else opened.named_parts(path)
    return [
        found for inside, item in parts for found in _tensors_in(item, inside, (*around, value))
    ]


def map_tensors(value: object, change: Callable[[torch.Tensor], torch.Tensor], path: str) -> object:
    """A value with its tensors changed; what holds none that changes is the same object still.

    Args:
        value: any value; only what a structure can have in it is looked into.
        change: given a tensor, returns the one in its place.
        path: the value's name.

    Raises:
        StructureError: a part contains itself, is nested too deep, or is an object of which no copy
            with other tensors can be made.
    """
    return _map_tensors(value, change, path, ())


def _map_tensors(
    value: object,
    change: Callable[[torch.Tensor], torch.Tensor],
    path: str,
    around: tuple[object, ...],
) -> object:
    if isinstance(value, torch.Tensor):
        return change(value)
    opened = _open(value, path, around, any_keys=True)
    if opened is None:
        return value
    parts = [
        _map_tensors(item, change, inside, (*around, value))
        for inside, item in opened.named_parts(path)
    ]
    kept = all(new is old for new, old in zip(parts, opened.values, strict=True))
    return value if kept else opened.rebuild(parts)


def reconcile(eager: Structure, traced: Structure) -> Structure:
    """The structure of a traced result, numbers of the eager result being numbers again.

    Raises:
        TracingError: the two differ otherwise.
    """
    if isinstance(eager, Constant) and isinstance(traced, TensorLeaf):
        if isinstance(eager.value, (int, float)):
            return Number(traced.path, type(eager.plain))
    elif isinstance(eager, Container) and isinstance(traced, Container):
        if (eager.kind, eager.keys) == (traced.kind, traced.keys):
            parts = tuple(map(reconcile, eager.parts, traced.parts))
            return dataclasses.replace(traced, parts=parts)
    elif eager == traced:
        return traced
    raise TracingError(
        f"{traced.path} is {described(eager)} in eager mode and {described(traced)} while "
        "tracing; return the same in both, without a branch on torch.jit.is_tracing()"
    )


def first_difference(one: Structure, other: Structure) -> tuple[Structure, Structure] | None:
    """The first parts that are not alike, the outermost that say so; None if all are."""
    match one, other:
        case Container(), Container():
            if (one.kind, one.name, one.keys) == (other.kind, other.name, other.keys):
                pairs = map(first_difference, one.parts, other.parts)
                return next(filter(None, pairs), None)
        case Constant(), Constant():
            # A NaN equals nothing, and True a 1.
            if repr(one.plain) == repr(other.plain):
                return None
        case TensorLeaf(), TensorLeaf():
            return None
    return one, other


def described(structure: Structure) -> str:
    """What a structure is, in an error."""
    if isinstance(structure, Container):
        return f"a {structure.name} with {_listed(structure.keys)}"
    return repr(structure.value) if isinstance(structure, Constant) else "a tensor"


def _listed(keys: Iterable[object]) -> str:
    return ", ".join(map(repr, keys)) or "nothing"


def to_script(value: object, argument: JitType, path: str) -> object:
    """Turn mappings and objects into what a frozen program's argument takes.

    Args:
        value: as the model takes it. What does not fit stays as it is, for TorchScript to refuse.
        argument: the argument's TorchScript type.
        path: the argument's name.

    Raises:
        InputError: a mapping has other keys, or a tuple another length; names them.
    """
    kind = argument.kind()
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, Mapping)):
        value = {item.name: getattr(value, item.name) for item in dataclasses.fields(value)}
    if kind == "DictType" and isinstance(value, Mapping):
        inner = argument.getValueType()
        return {key: to_script(part, inner, f"{path}[{key!r}]") for key, part in value.items()}
    if kind == "ListType" and isinstance(value, list):
        inner = argument.getElementType()
        return [to_script(part, inner, f"{path}[{i}]") for i, part in enumerate(value)]
    if kind == "TupleType":
        types = argument.elements()
        if isinstance(value, Mapping) and (names := _names_of(argument)):
            given = {_plain(key): part for key, part in value.items()}
            if given.keys() != set(names):
                raise InputError(f"{path}: expected keys {_listed(names)}, given {_listed(given)}")
            paths = [f"{path}[{name!r}]" for name in names]
            return tuple(map(to_script, (given[name] for name in names), types, paths))
        if isinstance(value, (tuple, list)):
            if len(value) != len(types):
                raise InputError(f"{path}: expected {len(types)} entries, given {len(value)}")
            paths = [f"{path}[{index}]" for index in range(len(types))]
            return tuple(map(to_script, value, types, paths))
    return value


def _names_of(argument: JitType) -> list[str]:
    """Field names of a named tuple's type, which only its text tells; none for a tuple's."""
    kind, _, text = argument.str().partition("(")
    names: list[str] = []
    if not kind:
        return names
    for inner in argument.elements():
        name, _, text = text.partition(" : ")
        names.append(name)
        text = text[len(inner.str()) :].removeprefix(", ")
    return names


def from_script(value: object) -> object:
    """Turn the named tuples that stand for dictionaries into dictionaries, at any depth."""
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, tuple):
        parts = [from_script(part) for part in value]
        fields: tuple[str, ...] | None = getattr(value, "_fields", None)
        if fields is None:
            return tuple(parts)
        if type(value).__name__.startswith(MAPPING_PREFIX):
            return dict(zip(fields, parts, strict=True))
        named: Any = type(value)
        return named(*parts)
    if isinstance(value, list):
        return [from_script(part) for part in value]
    if isinstance(value, dict):
        return {key: from_script(part) for key, part in value.items()}
    return value


# --- one rule a kind of container, asked in this order --------------------------------------------


class _Opened(NamedTuple):
    kind: Kind
    keys: tuple[Key, ...]
    values: Sequence[object]
    rebuild: Callable[[Sequence[object]], object]

    def named_parts(self, path: str) -> list[tuple[str, object]]:
        """The parts with their paths, this container's being ``path``."""
        form = "{}.{}" if self.kind == "namedtuple" else "{}[{!r}]"
        names = (form.format(path, key) for key in self.keys)
        return list(zip(names, self.values, strict=True))


class _Rule(NamedTuple):
    matches: Callable[[object], bool]
    open: Callable[[object], _Opened | None]


def _open(
    value: object, path: str, around: tuple[object, ...], *, any_keys: bool = False
) -> _Opened | None:
    """Take a container apart, one level; None if it is none.

    Args:
        value: any value.
        path: its name.
        around: the containers that it is in.
        any_keys: whether a mapping may have keys that are no strings.

    Raises:
        StructureError: it contains itself, or is nested too deep.
    """
    opened = next((rule.open(value) for rule in _RULES if rule.matches(value)), None)
    if opened is None and any_keys and isinstance(value, Mapping):
        opened = _open_any_mapping(value)
    if opened is None:
        return None
    if _is_one_of(value, around):
        raise StructureError(path, type(value), "it contains itself, which no program can take")
    if len(around) == _DEEPEST:
        raise StructureError(path, type(value), f"it is nested more than {_DEEPEST} levels deep")
    return opened._replace(rebuild=partial(_rebuilt, path, type(value), opened.rebuild))


_DEEPEST: Final = 100
"""How many containers may be around one: fewer than Python and TorchScript can call into each other
for."""


def _is_one_of(value: object, containers: tuple[object, ...]) -> bool:
    return any(value is container for container in containers)


def _rebuilt(
    path: str,
    kind: type,
    rebuild: Callable[[Sequence[object]], object],
    parts: Sequence[object],
) -> object:
    try:
        return rebuild(parts)
    except Exception as error:  # of a class of the user's
        raise StructureError(
            path,
            kind,
            f"no copy of it with other tensors can be made ({type(error).__name__}: {error}); "
            "pass a dict, list, tuple or dataclass",
        ) from error


def _open_named_tuple(value: object) -> _Opened | None:
    assert isinstance(value, tuple)
    names = _field_names(value)
    return _Opened("namedtuple", names, value, getattr(type(value), "_make", type(value)))


def _field_names(value: object) -> tuple[str, ...]:
    """Field names of a named tuple, or of what ``torch.max`` and the like return; else none."""
    names: tuple[str, ...] = getattr(value, "_fields", ()) or getattr(value, "__match_args__", ())
    return names


def _open_tuple(value: object) -> _Opened | None:
    assert isinstance(value, tuple)
    return _Opened("tuple", tuple(range(len(value))), value, type(value))


def _open_list(value: object) -> _Opened | None:
    assert isinstance(value, list)

    def rebuild(parts: Sequence[object]) -> object:
        changed = copy.copy(value)
        changed[:] = parts
        return changed

    return _Opened("list", tuple(range(len(value))), value, rebuild)


def _open_mapping(value: object) -> _Opened | None:
    assert isinstance(value, Mapping)
    return _open_any_mapping(value) if all(isinstance(key, str) for key in value) else None


def _open_any_mapping(value: Mapping[Any, object]) -> _Opened:
    keys = tuple(value)
    values = [value[key] for key in keys]
    names: tuple[Any, ...] = tuple(map(_plain, keys))

    def rebuild(parts: Sequence[object]) -> object:
        changed = _copy_of_mapping(value, values)
        for key, part in zip(keys, parts, strict=True):
            changed[key] = part
        return changed

    return _Opened("mapping", names, values, rebuild)


def _copy_of_mapping(value: Mapping[Any, object], items: Sequence[object]) -> Any:
    """A copy whose items can be set without those of the original."""
    if isinstance(value, dict) or hasattr(value, "__copy__"):
        return copy.copy(value)
    # Only its class knows in which attribute it keeps the items.
    held = getattr(value, "__dict__", {}).values()
    shared = [*items, *(one for one in held if isinstance(one, (torch.Tensor, nn.Module)))]
    return copy.deepcopy(value, {id(one): one for one in shared})


def _open_dataclass(value: object) -> _Opened | None:
    assert dataclasses.is_dataclass(value)
    keys = tuple(item.name for item in dataclasses.fields(value))

    def rebuild(parts: Sequence[object]) -> object:
        changed = copy.copy(value)
        for key, part in zip(keys, parts, strict=True):
            object.__setattr__(changed, key, part)
        return changed

    return _Opened("mapping", keys, [getattr(value, key) for key in keys], rebuild)


_RULES: Final = (
    _Rule(lambda v: isinstance(v, tuple) and bool(_field_names(v)), _open_named_tuple),
    _Rule(lambda v: isinstance(v, tuple), _open_tuple),
    _Rule(lambda v: isinstance(v, list), _open_list),
    _Rule(lambda v: isinstance(v, Mapping), _open_mapping),
    _Rule(lambda v: dataclasses.is_dataclass(v) and not isinstance(v, type), _open_dataclass),
)


# --- TorchScript source ---------------------------------------------------------------------------


class Forward(NamedTuple):
    """A generated method.

    Attributes:
        source: TorchScript source text of ``forward``.
        names: what the names in the source stand for.
    """

    source: str
    names: dict[str, object]


def forward_source(
    parameters: Mapping[str, Structure],
    result: Structure,
    traced: Sequence[str],
    input_casts: Sequence[torch.dtype | None],
    output_casts: Sequence[torch.dtype | None],
) -> Forward:
    """Write ``forward``: take the inputs apart, call the traced method, build the result.

    A value that is no tensor keeps its place in the signature, with the example's value as default
    where no tensor follows, and another value at call time is an error, because the trace holds the
    example's.

    Args:
        parameters: structure of each argument, by name and in order.
        result: structure of the result.
        traced: name of the method that takes and returns flat tensors; if two, the second is
            called where gradients are enabled.
        input_casts: for each input tensor the dtype it is cast to before the call, or None.
        output_casts: for each output tensor the dtype it is cast to after the call, or None.
    """
    return _Writer().write(parameters, result, traced, input_casts, output_casts)


class _Writer:
    def __init__(self) -> None:
        self.types: dict[str, Any] = {}
        self.known: dict[int, _Type] = {}
        self.lines: list[str] = []
        self.flat: list[str] = []

    def write(
        self,
        parameters: Mapping[str, Structure],
        result: Structure,
        traced: Sequence[str],
        input_casts: Sequence[torch.dtype | None],
        output_casts: Sequence[torch.dtype | None],
    ) -> Forward:
        signature = self.signature(parameters)
        for name, structure in parameters.items():
            self.unpack(structure, name)
        arguments = ", ".join(map(_cast, self.flat, input_casts))
        calls = [f"outputs_ = self.{name}({arguments})" for name in traced]
        if len(calls) == 1:
            self.lines += calls
        else:
            without_grad, with_grad = calls
            self.lines += ["if torch.is_grad_enabled():", f"    {with_grad}"]
            self.lines += ["else:", f"    {without_grad}"]
        count = len(output_casts)
        outputs = map(_cast, (f"outputs_[{index}]" for index in range(count)), output_casts)
        self.lines.append(f"return {self.pack(result, outputs)}")
        body = "".join(f"    {line}\n" for line in self.lines)
        return Forward(f"def forward(self, {signature}):\n{body}", {**_NAMES, **self.types})

    def signature(self, parameters: Mapping[str, Structure]) -> str:
        written: list[str] = []
        may_default = True
        for name, structure in reversed(list(parameters.items())):
            text = f"{name}: {self.type_of(structure).text}"
            may_default = may_default and isinstance(structure, Constant)
            if name in _TAKEN or not _is_identifier(name):
                raise TracingError(
                    f"a program's argument cannot be called {name!r}; give it another name in the "
                    "model, or wrap the model in a function"
                )
            if may_default and isinstance(structure, Constant):
                text += f" = {_literal(structure)}"
            written.append(text)
        return ", ".join(reversed(written))

    def unpack(self, structure: Structure, expression: str) -> None:
        if isinstance(structure, (TensorLeaf, Number)):
            self.flat.append(expression)
        elif isinstance(structure, Constant):
            differs = "is not None" if structure.plain is None else f"!= {_literal(structure)}"
            if structure.plain != structure.plain:
                # A NaN equals nothing, and TorchScript takes any value to equal itself.
                expression, differs = f"str({expression})", "!= 'nan'"
            message = f"{structure.path} was {structure.value!r} when the program was traced"
            self.refuse_if(f"{expression} {differs}", message)
        else:
            kind = self.kind_of(structure)
            if kind in ("list", "mapping"):
                message = f"{structure.path} had {len(structure.keys)} entries when traced"
                # An argument may be called `len`.
                length = f"torch.ops.aten.len({expression})"
                self.refuse_if(f"{length} != {len(structure.keys)}", message)
            keys = _keys_of(structure) if kind == "mapping" else range(len(structure.keys))
            for key, part in zip(keys, structure.parts, strict=True):
                self.unpack(part, f"{expression}[{key}]")

    def refuse_if(self, condition: str, message: str) -> None:
        self.lines += [f"if {condition}:", f"    raise ValueError({_quoted(message)})"]

    def pack(self, structure: Structure, outputs: Iterator[str]) -> str:
        if isinstance(structure, TensorLeaf):
            return next(outputs)
        if isinstance(structure, Number):
            return f"{structure.kind.__name__}({next(outputs)})"
        if isinstance(structure, Constant):
            return _literal(structure)
        parts = [self.pack(part, outputs) for part in structure.parts]
        kind = self.kind_of(structure)
        if kind in ("list", "mapping") and not parts:
            empty = "[]" if kind == "list" else "{}"
            return f"torch.jit.annotate({self.type_of(structure).text}, {empty})"
        if kind == "list":
            return f"[{', '.join(parts)}]"
        if kind == "mapping":
            items = zip(_keys_of(structure), parts, strict=True)
            return "{" + ", ".join(f"{key}: {part}" for key, part in items) + "}"
        if kind == "tuple":
            return "(" + "".join(f"{part}, " for part in parts) + ")"
        return f"{self.named_type(structure).text}({', '.join(parts)})"

    def kind_of(self, structure: Container) -> Kind:
        """What TorchScript's types make of a container: their lists and mappings hold one type."""
        if structure.kind not in ("list", "mapping"):
            return structure.kind
        if len({self.type_of(part).text for part in structure.parts}) <= 1:
            return structure.kind
        return "tuple" if structure.kind == "list" else "namedtuple"

    def type_of(self, structure: Structure) -> _Type:
        """The type, which is made up once: those around it ask for it many times."""
        found = self.known.get(id(structure))
        if found is None:
            found = self.known[id(structure)] = self.new_type_of(structure)
        return found

    def new_type_of(self, structure: Structure) -> _Type:
        if isinstance(structure, TensorLeaf):
            return _Type("Tensor", torch.Tensor)
        if isinstance(structure, Number):
            return _Type(structure.kind.__name__, structure.kind)
        if isinstance(structure, Constant):
            if structure.plain is None:
                return _Type("Optional[Tensor]", torch.Tensor | None)
            return _Type(type(structure.plain).__name__, type(structure.plain))
        kind = self.kind_of(structure)
        if kind == "namedtuple":
            return self.named_type(structure)
        parts = [self.type_of(part) for part in structure.parts]
        if not parts and kind != "tuple":
            parts = [_Type("Tensor", torch.Tensor)]
        if kind == "list":
            return _Type(f"List[{parts[0].text}]", GenericAlias(list, parts[0].python))
        if kind == "mapping":
            text = f"Dict[str, {parts[0].text}]"
            return _Type(text, GenericAlias(dict, (str, parts[0].python)))
        text = ", ".join(part.text for part in parts) or "()"
        return _Type(f"Tuple[{text}]", GenericAlias(tuple, tuple(part.python for part in parts)))

    def named_type(self, structure: Container) -> _Type:
        for key in map(str, structure.keys):
            if not _is_identifier(key) or key.startswith("_"):
                raise StructureError(
                    structure.path,
                    structure.type,
                    f"TorchScript takes no field called {key!r}, and a mapping whose values differ "
                    "in type has its keys for fields; expected an ASCII identifier that does not "
                    "begin with an underscore",
                )
        fields = [
            (str(key), self.type_of(part))
            for key, part in zip(structure.keys, structure.parts, strict=True)
        ]
        text = repr([(key, part.text) for key, part in fields])
        prefix = MAPPING_PREFIX if structure.kind == "mapping" else ""
        name = f"{prefix}{structure.name}_{hashlib.sha256(text.encode()).hexdigest()[:8]}"
        if name not in self.types:
            annotated = [(key, part.python) for key, part in fields]
            # The fields are data, which the type checker's NamedTuple is not made for.
            self.types[name] = NamedTuple(name, annotated)
        return _Type(name, self.types[name])


class _Type(NamedTuple):
    """A type as TorchScript source and as the Python object that TorchScript reads fields from."""

    text: str
    python: object


_NAMES: Final[Mapping[str, object]] = {"torch": torch, "ValueError": ValueError, "float": float}

_TAKEN: Final = frozenset(
    {
        "self",
        "outputs_",
        *_NAMES,
        # What TorchScript calls by name in a file or, for a condition, itself.
        *("annotate", "bool", "int", "isinstance", "print", "range", "str"),
        # What TorchScript gives another name in a file.
        *("CONSTANTS", "_", "__torch__", "aten", "attribute", "fork", "getattr", "inf", "infj"),
        *("nan", "nanj", "ops", "unchecked_cast", "uninitialized"),
    }
)
"""Names that an argument would hide, or not keep."""


def _is_identifier(name: str) -> bool:
    """Whether TorchScript reads a name as one; that it takes letters of ASCII alone is its own."""
    words = ("Ellipsis", "NoneType")
    return (
        name.isascii() and name.isidentifier() and not keyword.iskeyword(name) and name not in words
    )


def _literal(constant: Constant) -> str:
    value = constant.plain
    if isinstance(value, str):
        return _quoted(value, constant.path)
    if isinstance(value, float) and not math.isfinite(value):
        return f"float({str(value)!r})"
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        raise StructureError(constant.path, int, "expected one of at most 64 bits")
    return repr(value)


def _keys_of(mapping: Container) -> list[str]:
    """The keys of a mapping, written."""
    return [_quoted(str(key), f"{mapping.path}[{key!r}]") for key in mapping.keys]


def _quoted(text: str, path: str = "") -> str:
    """Text as TorchScript reads it: it knows bytes in octal, and neither \\x nor \\u.

    Args:
        text: any text.
        path: the place of what the text is.

    Raises:
        StructureError: a character in it is one that TorchScript does not read back from a file.
    """
    wrong = next((c for c in text if c == "\r" or "\ud800" <= c <= "\udfff"), None)
    if wrong is not None:
        reason = f"TorchScript cannot write {wrong!r} into a file and read it again; leave it out"
        raise StructureError(path, str, reason)
    readable = {*range(32, 127)} - {*b'"\\'}
    return '"' + "".join(chr(b) if b in readable else f"\\{b:03o}" for b in text.encode()) + '"'


def _cast(expression: str, dtype: torch.dtype | None) -> str:
    return expression if dtype is None else f"{expression}.to({dtype})"
