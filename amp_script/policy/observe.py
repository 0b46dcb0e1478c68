"""What the installed torch's autocast does to an operator, found out by watching it.

Every operator is run on fake tensors of a device (no such device is needed) in a number of
situations: regions of two dtypes, arguments of one dtype and of several. In each, what autocast did
is compared with what every kind of rule would have done, carried out by hand with autocast off. A
rule *explains* an operator if it did the same in all situations: the same casts of the same
arguments, the same calls below, the same result dtypes, the same errors.

Fake tensors never require gradients here: a fake CUDA tensor that does ends the process in some
CPU-only builds of torch.

Private names of torch, in 2.6 to 2.15: ``torch._subclasses.FakeTensorMode``,
``torch.utils._python_dispatch.TorchDispatchMode``, ``torch.utils._pytree``,
``torch._C._IncludeDispatchKeyGuard`` and ``torch._C._dispatch_key_parse``.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..dtypes import dtype_name
from ..errors import UnknownPolicyError
from ..jit_state import shield
from .arguments import BY_NAME, Fixed, Floating, arguments_for
from .dispatcher import autocast_key, listed_operators
from .kinds import Policy, Rule, optional_dtype_arguments
from .reference import call, call_by_rule, with_defaults
from .registry import find

_REGION_DTYPES = (torch.bfloat16, torch.float16)

_ARGUMENT_DTYPES: Sequence[tuple[torch.dtype, ...]] = (
    (torch.float32,),
    (torch.bfloat16,),
    (torch.float16,),
    (torch.float64,),
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.float16),
    (torch.float16, torch.float64),
    (torch.float8_e4m3fn, torch.float32),
    (torch.complex64, torch.float32),
)
"""Dtypes of an operator's floating-point arguments, dealt out to them in turn."""

_GIVEN_DTYPES = (None, torch.float64, torch.bfloat16)
"""What the caller gives for a dtype argument, where the operator has one."""


@dataclass(frozen=True)
class Situation:
    """One way to call an operator: the region's dtype, the arguments' and the dtype asked for."""

    region_dtype: torch.dtype
    argument_dtypes: tuple[torch.dtype, ...]
    given_dtype: torch.dtype | None

    def __str__(self) -> str:
        """Write the dtypes without torch's prefix."""
        dealt = ", ".join(map(dtype_name, self.argument_dtypes))
        asked = f", dtype={dtype_name(self.given_dtype)}" if self.given_dtype else ""
        return f"{dtype_name(self.region_dtype)} region, ({dealt}){asked}"


@dataclass(frozen=True)
class Observation:
    """What was seen of one operator on one device type.

    Attributes:
        operator: qualified name with overload.
        device_type: device type of the region and of the fake tensors.
        expected: the rule on record, or None where none is.
        explaining: every rule that explains the operator.
        ran: whether the operator ran to its end in some situation; where it did not, its arguments
            were not valid and the observation proves less.
        difference: the first situation in which the rule on record did something else than
            autocast, with both; empty where there is none.
    """

    operator: str
    device_type: str
    expected: Rule | None
    explaining: tuple[Rule, ...]
    ran: bool
    difference: str

    @property
    def agrees(self) -> bool:
        """Whether the rule on record explains the operator, and no other rule does."""
        return self.explaining == (self.expected,)

    def __str__(self) -> str:
        """Say what to record, or that nothing is to be done."""
        if self.agrees:
            return f"{self.device_type}: {self.operator}: {self.expected}"
        recorded = str(self.expected or "no rule")
        seen = " or ".join(map(str, self.explaining)) or "something else"
        return "\n".join(
            [
                f"{self.device_type}: {self.operator}: {recorded} on record, {seen} seen",
                *([f"  {self.difference}"] if self.difference else []),
            ]
        )


@dataclass(frozen=True)
class PolicyReport:
    """What was seen of the operators that the dispatcher lists.

    Attributes:
        torch_version: version of the torch that was observed.
        observations: one for each device type and operator, in that order.
    """

    torch_version: str
    observations: tuple[Observation, ...]

    @property
    def disagreements(self) -> tuple[Observation, ...]:
        """The observations that the rules on record do not account for."""
        return tuple(seen for seen in self.observations if not seen.agrees)

    def __str__(self) -> str:
        """Count, then say of each disagreement what to record."""
        counted = f"torch {self.torch_version}: {len(self.observations)} operators observed"
        if not self.disagreements:
            return f"{counted}, every one follows the rule on record"
        lines = [f"{counted}, {len(self.disagreements)} differ from the record:"]
        return "\n".join([*lines, *map(str, self.disagreements)])


def observe(
    device_types: Iterable[str], operators: Callable[[str], Sequence[str]] = listed_operators
) -> PolicyReport:
    """Watch the installed torch's autocast on every operator that its dispatcher lists.

    Takes about 3 seconds a device type. The caller's autocast state is not changed. Left out are
    overloads that no call from a schema can reach (:data:`amp_script.policy.arguments.BY_NAME`).

    Args:
        device_types: such as ``("cpu", "cuda")``; no such device is needed.
        operators: the operators to watch on a device type; all that are listed for it.

    Raises:
        ArgumentError: a device type has no autocast in this torch.
    """
    return PolicyReport(
        torch.__version__,
        tuple(
            observe_operator(device_type, operator)
            for device_type in device_types
            for operator in operators(device_type)
            if operator not in BY_NAME
        ),
    )


def observe_operator(device_type: str, operator: str) -> Observation:
    """Watch one operator, named with its overload, in every situation."""
    name, _, overload_name = operator.partition(".")
    overload = _overload(name, overload_name)
    expected = _on_record(device_type, name, overload_name)
    candidates = list(_candidates(overload, expected))
    difference = ""
    ran = False
    with FakeTensorMode(), shield(), _quiet_log():
        for situation in _situations(overload):
            arguments = _fake_arguments(overload._schema, situation, device_type)
            seen = _under_autocast(overload, arguments, device_type, situation.region_dtype)
            ran = ran or not seen.error
            for rule in list(candidates):
                done = _by_hand(rule, overload, arguments, device_type, situation.region_dtype)
                if _explains(rule, seen, done):
                    continue
                candidates.remove(rule)
                if rule == expected:
                    difference = f"{situation}: by the rule {done}; under autocast {seen}"
    return Observation(operator, device_type, expected, tuple(candidates), ran, difference)


def _on_record(device_type: str, name: str, overload_name: str) -> Rule | None:
    try:
        return find(device_type, name, overload_name)
    except UnknownPolicyError:
        return None


def _overload(name: str, overload_name: str) -> torch._ops.OpOverload:
    namespace, _, local_name = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), local_name)
    overload: torch._ops.OpOverload = getattr(packet, overload_name or "default")
    return overload


def _candidates(overload: torch._ops.OpOverload, expected: Rule | None) -> Iterator[Rule]:
    if expected is not None:
        yield expected
    for rule in _possible_rules(overload):
        if expected is None or (rule.policy, rule.dtype) != (expected.policy, expected.dtype):
            yield rule


def _possible_rules(overload: torch._ops.OpOverload) -> Iterator[Rule]:
    yield Rule(Policy.LOWER)
    yield Rule(Policy.FLOAT32)
    if optional_dtype_arguments(overload._schema):
        yield Rule(Policy.FLOAT32_OPTIONAL_DTYPE)
    for name in _overloads_with_appended_dtype(overload):
        yield Rule(Policy.FLOAT32_APPENDED_DTYPE, overload=name)
    yield Rule(Policy.PROMOTE)
    yield Rule(Policy.REFUSED, message="refused")
    for dtype in (torch.float16, torch.bfloat16):
        yield Rule(Policy.CAST_INPUTS, dtype=dtype)


def _overloads_with_appended_dtype(overload: torch._ops.OpOverload) -> Iterator[str]:
    packet = overload.overloadpacket
    plain = [argument.name for argument in overload._schema.arguments]
    for name in packet.overloads():
        arguments = getattr(packet, name)._schema.arguments
        if [a.name for a in arguments[:-1]] == plain and arguments[-1].name == "dtype":
            yield name


# Situations and arguments -------------------------------------------------------------------------


def _situations(overload: torch._ops.OpOverload) -> Iterator[Situation]:
    has_dtype = bool(optional_dtype_arguments(overload._schema))
    for region_dtype in _REGION_DTYPES:
        for dealt in _ARGUMENT_DTYPES:
            for given in _GIVEN_DTYPES if has_dtype else (None,):
                yield Situation(region_dtype, dealt, given)


def _fake_arguments(
    schema: torch.FunctionSchema, situation: Situation, device_type: str
) -> list[object]:
    dealt = itertools.cycle(situation.argument_dtypes)

    def make(value: object) -> object:
        if isinstance(value, list):
            return [make(item) for item in value]
        if isinstance(value, Floating):
            return torch.empty(value.shape, dtype=next(dealt), device=device_type)
        if isinstance(value, Fixed):
            return torch.empty(value.shape, dtype=value.dtype, device=device_type)
        return value

    arguments = with_defaults(schema, [make(value) for value in arguments_for(schema)])
    for position in optional_dtype_arguments(schema):
        arguments[position] = situation.given_dtype
    return arguments


@contextlib.contextmanager
def _quiet_log() -> Iterator[None]:
    """Keep this thread's refusals of arguments, which are expected here, out of torch's log."""
    thread = threading.get_ident()
    logger = logging.getLogger("torch._subclasses.fake_tensor")

    def is_from_elsewhere(record: logging.LogRecord) -> bool:
        return record.thread != thread

    logger.addFilter(is_from_elsewhere)
    try:
        yield
    finally:
        logger.removeFilter(is_from_elsewhere)


# Watching -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Seen:
    """What happened in one call: which arguments were cast, what was called, and the outcome."""

    casts: tuple[tuple[int, torch.dtype], ...]
    calls: tuple[str, ...]
    results: tuple[torch.dtype, ...]
    error: str

    def __str__(self) -> str:
        cast = ", ".join(f"argument {i} to {dtype_name(dtype)}" for i, dtype in self.casts)
        results = ", ".join(map(dtype_name, self.results))
        outcome = f"raises {self.error}" if self.error else f"gives ({results})"
        return f"[{cast or 'no casts'}; {outcome}]"


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped hook of torch's
    """Notes the casts of given tensors, and every other operator with the dtypes it is given."""

    def __init__(self, arguments: Sequence[object]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        tensors = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]
        self._position = {id(tensor): position for position, tensor in enumerate(tensors)}
        self.casts: list[tuple[int, torch.dtype]] = []
        self.calls: list[str] = []

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        keywords = kwargs or {}
        dtype = keywords.get("dtype")
        if func is torch.ops.aten._to_copy.default and isinstance(dtype, torch.dtype):
            position = self._position.get(id(args[0]))
            if position is not None:
                self.casts.append((position, dtype))
                return func(*args, **keywords)
        if func.namespace != "prim":  # questions such as a fake tensor's device
            given = map(_dtype_of, tree_leaves((args, keywords)))
            dtypes = (dtype_name(dtype) for dtype in given if dtype is not None)
            self.calls.append(" ".join([str(func), *dtypes]))
        return func(*args, **keywords)


def _watch(call: Callable[[], object], arguments: Sequence[object]) -> _Seen:
    watch = _Watch(arguments)
    results: tuple[torch.dtype, ...] = ()
    error = ""
    with watch:
        # An operator may refuse its arguments in any way; what was cast before counts.
        try:
            leaves = tree_leaves(call())
            results = tuple(leaf.dtype for leaf in leaves if isinstance(leaf, torch.Tensor))
        except Exception as exception:
            error = f"{type(exception).__name__}: {exception}".partition("\n")[0]
    return _Seen(tuple(sorted(watch.casts, key=str)), tuple(watch.calls), results, error)


def _under_autocast(
    overload: torch._ops.OpOverload,
    arguments: Sequence[object],
    device_type: str,
    region_dtype: torch.dtype,
) -> _Seen:
    key = torch._C._dispatch_key_parse(autocast_key(device_type))
    before = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    torch.set_autocast_enabled(device_type, True)
    torch.set_autocast_dtype(device_type, region_dtype)
    try:
        # Fake tensors of some devices lack the key that real ones have.
        with torch._C._IncludeDispatchKeyGuard(key):
            return _watch(lambda: call(overload, arguments), arguments)
    finally:
        torch.set_autocast_enabled(device_type, before[0])
        torch.set_autocast_dtype(device_type, before[1])


def _by_hand(
    rule: Rule,
    overload: torch._ops.OpOverload,
    arguments: Sequence[object],
    device_type: str,
    region_dtype: torch.dtype,
) -> _Seen:
    if rule.policy is Policy.REFUSED:  # by hand it would run: autocast alone refuses it
        return _watch(lambda: call(overload, arguments), arguments)
    return _watch(
        lambda: call_by_rule(rule, overload, arguments, device_type, region_dtype), arguments
    )


def _explains(rule: Rule, seen: _Seen, done: _Seen) -> bool:
    if rule.policy is Policy.REFUSED:
        refused = seen.error.startswith("RuntimeError") and not seen.casts and not seen.calls
        return refused and seen.error != done.error
    return seen == done


def _dtype_of(value: object) -> torch.dtype | None:
    if isinstance(value, torch.Tensor):
        return value.dtype
    return value if isinstance(value, torch.dtype) else None
