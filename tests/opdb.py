"""PyTorch's operator database as programs: every operator, eager and in TorchScript, compared.

The database (``torch.testing._internal.common_methods_invocations.op_db``) has about 700 operators
with sample inputs. Each sample becomes a small function, written out as source, whose parameters
are the sample's tensors and whose body is one call with everything else as literals; so the same
text runs in eager mode, is compiled by ``torch.jit.script``, with or without an autocast region
around it, and is traced. A *runner* makes something callable of a sample; :func:`compare` calls it
three times (TorchScript's executor changes its code after the first runs) and says whether dtype,
shape and every bit are eager autocast's.

    for case in cases(torch.float32, shard=(0, 4), samples=2):
        outcome = compare(case, RUNNERS["amp_script.script"], Region("cpu", torch.bfloat16))

Random operators are seeded before every run. Operators whose result is uninitialised memory cannot
be compared.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import linecache
import math
import re
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import count
from typing import Literal

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal import common_utils
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

import amp_script
from amp_script.errors import LoweringError
from amp_script.jit_state import jit_autocast_pass

# The import put wrappers of its own around every call of compiled code.
torch._C.ScriptFunction.__call__ = common_utils.func_call
torch._C.ScriptMethod.__call__ = common_utils.meth_call

Program = Callable[..., object]

RUNS = 3

SEED = 42  # what the database's own wrappers of random operators set

SPLIT_BY_THE_EXECUTOR = frozenset({"addmm"})
"""Operators that TorchScript runs as others, with other bits, without autocast too. A lowered
program keeps its executor from it, so that they are compared."""

NOT_IMITATED = frozenset({"ldexp", "linalg.pinv", "matrix_exp", "mvlgamma", "pinverse"})
"""Operators whose kernels, no composites, call others that autocast handles. A fake tensor computes
a shape and a dtype in place of the kernel, so that it does not show what a device would."""

UNINITIALISED = frozenset(
    {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
)


def _varies(operator: OpInfo, sample: SampleInput) -> bool:
    """Whether eager mode gives other bits from call to call: a driver reads unwritten memory."""
    return operator.name == "linalg.lstsq" and sample.kwargs.get("driver", "gelsy") == "gelsy"


@dataclass(frozen=True)
class Region:
    """The autocast region that a program runs in.

    Attributes:
        device_type: device type of the region, and of the tensors.
        dtype: dtype of the region.
    """

    device_type: str
    dtype: torch.dtype

    @property
    def is_imitated(self) -> bool:
        """Whether tensors on the device are fake, so that dtypes and shapes alone are compared."""
        return self.device_type != "cpu"

    def world(self) -> AbstractContextManager[object]:
        """Where everything of one comparison happens, the making of inputs included."""
        return FakeTensorMode(allow_non_fake_inputs=True) if self.is_imitated else nullcontext()

    @contextmanager
    def entered(self) -> Iterator[None]:
        """The region in eager mode; ``torch.autocast`` would look for the device."""
        before = (
            torch.is_autocast_enabled(self.device_type),
            torch.get_autocast_dtype(self.device_type),
        )
        torch.set_autocast_enabled(self.device_type, True)
        torch.set_autocast_dtype(self.device_type, self.dtype)
        try:
            yield
        finally:
            torch.set_autocast_enabled(self.device_type, before[0])
            torch.set_autocast_dtype(self.device_type, before[1])
            torch.clear_autocast_cache()


# Samples as source --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    """One call of an operator.

    Attributes:
        call: the call in Python, given the tensors alone.
        tensors: the sample's tensors, in the dtype to be tried.
        expression: the call as source over ``t0``, ``t1``, ...; empty where TorchScript has no such
            source, in which case programs call a trace of it.
        unscriptable: why neither can be used; empty where one can.
        varies: whether eager mode gives other bits from call to call.
    """

    call: Program
    tensors: tuple[torch.Tensor, ...]
    expression: str = ""
    unscriptable: str = ""
    varies: bool = False

    def program(self, region: Region | None = None) -> Program:
        """The call as a function that TorchScript compiles, in a region if one is given."""
        if self.expression:
            return _compile(self.expression, len(self.tensors), region)
        traced = torch.jit.trace(self.call, self.inputs(), check_trace=False)
        parameters = ", ".join(f"t{i}" for i in range(len(self.tensors)))
        return _compile(f"traced({parameters})", len(self.tensors), region, traced)

    def cast(self, dtype: torch.dtype) -> Sample:
        """The sample with its float32 tensors in another dtype."""
        tensors = tuple(t.to(dtype) if t.dtype == torch.float32 else t for t in self.tensors)
        return dataclasses.replace(self, tensors=tensors)

    def inputs(self, device_type: str = "cpu") -> tuple[torch.Tensor, ...]:
        """Fresh copies of the tensors, since some operators change what they are given."""
        if device_type != "cpu":
            return tuple(_imitation(tensor, device_type) for tensor in self.tensors)
        return tuple(
            copy.deepcopy(tensor) if tensor.layout == torch.strided else tensor.clone()
            for tensor in self.tensors
        )

    def __str__(self) -> str:
        """The source, as short as it is of use."""
        return self.expression or "its trace"


@dataclass(frozen=True)
class Case:
    """An operator of the database with its samples, or the reason why it has none."""

    operator: str
    variant: str
    samples: tuple[Sample, ...] = ()
    unusable: str = ""

    @property
    def name(self) -> str:
        """Operator and variant as one name."""
        return f"{self.operator}/{self.variant}" if self.variant else self.operator

    def cast(self, dtype: torch.dtype) -> Case:
        """The case with its float32 tensors in another dtype."""
        samples = tuple(sample.cast(dtype) for sample in self.samples)
        return dataclasses.replace(self, samples=samples)


def _imitation(tensor: torch.Tensor, device_type: str) -> torch.Tensor:
    shape, strides = tensor.shape, tensor.stride()
    return torch.empty_strided(shape, strides, dtype=tensor.dtype, device=device_type)


class InexpressibleError(Exception):
    """A sample that cannot be written as source that TorchScript reads."""


_file_numbers = count()


def _compile(
    expression: str, arity: int, region: Region | None, traced: Program | None = None
) -> Program:
    parameters = ", ".join(f"t{i}: Tensor" for i in range(arity))
    body = [f"    return {expression}"]
    if region is not None:
        entered = f"    with torch.autocast({region.device_type!r}, dtype={region.dtype}):"
        body = [entered, f"    {body[0]}"]
    source = "\n".join([f"def program({parameters}):", *body, ""])
    filename = f"<operator database {next(_file_numbers)}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    namespace: dict[str, object] = {
        "__name__": "opdb",
        "torch": torch,
        "Tensor": torch.Tensor,
        "traced": traced,
    }
    exec(compile(source, filename, "exec"), namespace)
    program = namespace["program"]
    assert callable(program)
    return program


def literal(value: object, tensors: list[torch.Tensor]) -> str:
    """The source of a value; tensors are appended to the list and become parameters.

    Raises:
        InexpressibleError: TorchScript has no literal for it.
    """
    match value:
        case torch.Tensor():
            tensors.append(value)
            return f"t{len(tensors) - 1}"
        case None | bool() | int() | str():
            return repr(value)
        case float():
            return repr(value) if math.isfinite(value) else f'float("{value}")'
        case complex():
            return f"complex({literal(value.real, tensors)}, {literal(value.imag, tensors)})"
        case list() | torch.Size():
            return f"[{', '.join(literal(item, tensors) for item in value)}]"
        case tuple():
            inner = ", ".join(literal(item, tensors) for item in value)
            return f"({inner},)" if len(value) == 1 else f"({inner})"
        case torch.device():
            return f'torch.device("{value}")'
        case torch.dtype() | torch.memory_format() | torch.layout():
            return str(value)
        case _:
            raise InexpressibleError(f"an argument of type {type(value).__name__}")


Call = Callable[[Sequence[str], Sequence[str]], str]
"""Writes a call, given the sources of its arguments and of its keywords (``name=value``)."""


def _function(path: str) -> Call:
    return lambda args, keywords: f"{path}({', '.join([*args, *keywords])})"


def _swapped(path: str) -> Call:
    return lambda args, keywords: _function(path)([args[1], args[0], *args[2:]], keywords)


def _method(name: str) -> Call:
    return lambda args, keywords: _function(f"{args[0]}.{name}")(args[1:], keywords)


def _attribute(name: str) -> Call:
    return lambda args, keywords: f"{args[0]}.{name}"


def _reflected(symbol: str) -> Call:
    return lambda args, keywords: f"{args[1]} {symbol} {args[0]}"


def _on_copy(write: Call) -> Call:
    return lambda args, keywords: write([f"{args[0]}.clone()", *args[1:]], keywords)


def _on_product(path: str) -> Call:
    return lambda args, keywords: _function(path)(
        [f"{args[0]} @ {args[1]}.mT", *args[2:]], keywords
    )


SPECIAL: dict[str, Call] = {
    "T": _attribute("T"),
    "H": _attribute("H"),
    "mT": _attribute("mT"),
    "mH": _attribute("mH"),
    "__radd__": _reflected("+"),
    "__rand__": _reflected("&"),
    "__rdiv__": lambda args, keywords: f"{args[0]}.reciprocal() * {args[1]}",
    "__rmatmul__": _reflected("@"),
    "__rmod__": _reflected("%"),
    "__rmul__": _reflected("*"),
    "__ror__": _reflected("|"),
    "__rpow__": _reflected("**"),
    "__rsub__": _reflected("-"),
    "__rxor__": _reflected("^"),
    "einsum": _swapped("torch.einsum"),
    "linalg.lstsq/grad_oriented": lambda args, keywords: (
        _function("torch.linalg.lstsq")(args, keywords) + "[:2]"
    ),
    "linalg.pinv/singular": _on_product("torch.linalg.pinv"),
    "nn.functional.embedding": _swapped("torch.nn.functional.embedding"),
    "nn.functional.embedding_bag": _swapped("torch.nn.functional.embedding_bag"),
    "pca_lowrank": _on_product("torch.pca_lowrank"),
    "polygamma": _swapped("torch.polygamma"),
    "resize_": _on_copy(_method("resize_")),
    "resize_as_": _on_copy(_function("torch.resize_as_")),
    "special.polygamma": _swapped("torch.special.polygamma"),
    "svd_lowrank": _on_product("torch.svd_lowrank"),
    "where": lambda args, keywords: _function("torch.where")([args[1], args[0], args[2]], keywords),
    "zero_": _on_copy(_function("torch.zero_")),
}
"""How to write the operators whose function in the database is no function of torch."""


def _index(value: object, tensors: list[torch.Tensor]) -> str:
    match value:
        case tuple():
            return ", ".join(_index(item, tensors) for item in value)
        case slice():
            parts = (value.start, value.stop, value.step)
            return ":".join("" if part is None else str(part) for part in parts)
        case types.EllipsisType():
            return "..."
        case _:
            return literal(value, tensors)


def _ways(operator: OpInfo) -> Iterator[Call]:
    """How the operator may be written, the most usual spelling first."""
    for key in (f"{operator.name}/{operator.variant_test_name}", operator.name):
        if key in SPECIAL:
            yield SPECIAL[key]
    if callable(_look_up(torch, operator.name)):
        yield _function(f"torch.{operator.name}")
    if hasattr(torch.Tensor, operator.name):
        yield _method(operator.name)
    if hasattr(torch.ops.aten, operator.aten_name):
        yield _function(f"torch.ops.aten.{operator.aten_name}")


def _look_up(owner: object, path: str) -> object:
    for name in path.split("."):
        owner = getattr(owner, name, None)
    return owner


def _expression(
    operator: OpInfo, write: Call, sample: SampleInput, tensors: list[torch.Tensor]
) -> str:
    if operator.name == "__getitem__":
        return f"{literal(sample.input, tensors)}[{_index(sample.args[0], tensors)}]"
    args = [literal(value, tensors) for value in (sample.input, *sample.args)]
    keywords = [f"{name}={literal(value, tensors)}" for name, value in sample.kwargs.items()]
    return write(args, keywords)


# Cases --------------------------------------------------------------------------------------------


def cases(
    input_dtype: torch.dtype,
    *,
    device_type: str = "cpu",
    shard: tuple[int, int] = (0, 1),
    samples: int | None = None,
    only: str = "",
    form: Literal["source", "call", "in place"] = "source",
) -> Iterator[Case]:
    """The database's operators as cases, in the database's order.

    Args:
        input_dtype: the float32 tensors of the samples are cast to it.
        device_type: written where a sample names its device; the tensors are on the CPU always.
        shard: which of how many parts of the database.
        samples: at most so many samples an operator, spread over those it has; all if None.
        only: a regular expression that the case's name has to match from its start.
        form: ``"source"`` writes the samples out as source too, which takes most of the time;
            ``"call"`` does not; ``"in place"`` has calls of the operators' in-place forms.
    """
    part, parts = shard
    for operator in op_db[part::parts]:
        name, variant = operator.name, operator.variant_test_name
        if not re.match(only, f"{name}/{variant}"):
            continue
        if name in UNINITIALISED:
            yield Case(name, variant, unusable="its result is uninitialised memory")
        elif torch.float32 not in operator.supported_dtypes("cpu"):
            yield Case(name, variant, unusable="it takes no float32 tensors on the CPU")
        else:
            given = attempt(_samples, operator)
            assert isinstance(given, list)
            chosen = _spread(given, samples)
            if form == "source":
                made = tuple(_written_sample(operator, each, device_type) for each in chosen)
            else:
                function = operator if form == "call" else operator.inplace_variant
                made = tuple(_sample(function, each, device_type) for each in chosen if function)
            reason = "" if made else "it has no samples"
            yield Case(name, variant, made, reason).cast(input_dtype)


def _samples(operator: OpInfo) -> list[SampleInput]:
    # Seeding for every sample takes longer than making it.
    return list(operator.sample_inputs("cpu", torch.float32, set_seed=False))


def _spread(given: list[SampleInput], samples: int | None) -> list[SampleInput]:
    if samples is None or len(given) <= samples:
        return given
    return [given[round(i * (len(given) - 1) / max(1, samples - 1))] for i in range(samples)]


def _sample(function: Program, sample: SampleInput, device_type: str) -> Sample:
    leaves, structure = tree_flatten(((sample.input, *sample.args), sample.kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    # A trace needs an input: what takes no tensors gets one that it does not look at.
    tensors = [leaves[place].detach() for place in places] or [torch.zeros(())]
    others = [None if i in places else leaf for i, leaf in enumerate(leaves)]

    def call(*tensors: torch.Tensor) -> object:
        filled = [device_type if leaf == "cpu" else leaf for leaf in others]
        for place, tensor in zip(places, tensors, strict=False):
            filled[place] = tensor
        args, keywords = tree_unflatten(filled, structure)
        return function(*args, **keywords)

    return Sample(call, tuple(tensors))


def _written_sample(operator: OpInfo, sample: SampleInput, device_type: str) -> Sample:
    plain = _sample(operator, sample, "cpu")
    plain = dataclasses.replace(plain, expression=_source(operator, sample, plain))
    return dataclasses.replace(
        _sample(operator, sample, device_type),
        expression=re.sub(r"""(['"])cpu\1""", f'"{device_type}"', plain.expression),
        unscriptable="" if operator.name in SPLIT_BY_THE_EXECUTOR else _problem(plain),
        varies=_varies(operator, sample),
    )


def _problem(plain: Sample) -> str:
    """Why TorchScript does not do what Python does with the sample, autocast apart."""
    expected = attempt(plain.call, *plain.inputs())
    if isinstance(expected, Failure):
        return f"it raises {expected.first_line}"
    program = attempt(plain.program)
    compiled = program if isinstance(program, Failure) else attempt(scripted, program)
    if isinstance(compiled, Failure):
        return f"TorchScript raises {compiled.first_line}"
    assert callable(compiled)
    how = difference(expected, attempt(compiled, *plain.inputs()))
    return f"TorchScript differs without autocast too: {how}" if how else ""


def _source(operator: OpInfo, sample: SampleInput, plain: Sample) -> str:
    """The first spelling that TorchScript compiles and that does what the operator does."""
    expected = attempt(plain.call, *plain.inputs())
    for write in _ways(operator):
        tensors: list[torch.Tensor] = []
        try:
            expression = _expression(operator, write, sample, tensors)
        except InexpressibleError:
            return ""
        written = Sample(plain.call, plain.tensors, expression)
        if difference(expected, attempt(written.program(), *written.inputs())):
            continue
        if not isinstance(attempt(scripted, written.program()), Failure):
            return expression
    return ""


# Running and comparing ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Failure:
    """An exception in place of a result."""

    error: Exception

    @property
    def first_line(self) -> str:
        """The exception's type and the first line that says something."""
        lines = [line for line in str(self.error).splitlines() if line.strip()]
        return f"{type(self.error).__name__}: {lines[0] if lines else ''}"[:200]


def attempt(call: Callable[..., object], *args: object, **keywords: object) -> object:
    """What a call gives, with the random generator seeded; a :class:`Failure` if it raises."""
    torch.default_generator.manual_seed(SEED)  # torch.manual_seed notes it for absent devices too
    with warnings.catch_warnings():
        # Operators warn about deprecation, experimental dtypes and much else.
        warnings.simplefilter("ignore")
        try:
            return call(*args, **keywords)
        except Exception as error:
            return Failure(error)


def difference(expected: object, got: object) -> str:
    """How two results differ: ``"raises"``, ``"structure"``, ``"dtype"``, ``"shape"``, ``"bits"``.

    Empty where they are equal, any NaN being equal to any other.
    """
    if isinstance(expected, Failure) or isinstance(got, Failure):
        return "raises"
    wanted, given = tree_leaves(expected), tree_leaves(got)
    if len(wanted) != len(given):
        return "structure"
    found = [_leaf_difference(one, other) for one, other in zip(wanted, given, strict=True)]
    return next(filter(None, found), "")


def _leaf_difference(expected: object, got: object) -> str:
    if not isinstance(expected, torch.Tensor):
        same = expected == got or (expected != expected and got != got)
        return "" if same and type(expected) is type(got) else "value"
    if not isinstance(got, torch.Tensor):
        return "structure"
    if expected.dtype != got.dtype:
        return f"dtype {_short(got.dtype)} instead of {_short(expected.dtype)}"
    if expected.shape != got.shape or expected.layout != got.layout:
        return "shape"
    if isinstance(expected, FakeTensor):
        return ""
    return "" if torch.equal(_bits(expected), _bits(got)) else "bits"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if not tensor.is_floating_point():
        return tensor
    bits = tensor.contiguous().view(_INTEGERS[tensor.element_size()])
    return bits.masked_fill(tensor.isnan(), -1)


class Verdict(enum.Enum):
    """What comparing an operator came to."""

    EQUAL = "equal"
    DIFFERS = "differs"
    REFUSED = "refused"
    INCOMPARABLE = "cannot be compared"


@dataclass(frozen=True)
class Outcome:
    """The verdict on a case, and why: one line a sample that is not equal."""

    case: str
    verdict: Verdict
    reasons: tuple[str, ...] = ()

    def __str__(self) -> str:
        """One line an operator."""
        return f"{self.case}: {self.verdict.value}: {'; '.join(self.reasons)}"


@dataclass(frozen=True)
class Runner:
    """A way to run a program: makes a callable of a sample, and names what to run it under.

    Attributes:
        name: what the tables call it.
        build: makes the callable, with no region at all for None; may raise.
        refusals: exceptions of ``build`` that are refusals and not mistakes.
        running: a context for the calls.
        traces: whether it traces the call, whose results must be tensors then, or compiles source.
    """

    name: str
    build: Callable[[Sample, Region | None], Program]
    refusals: tuple[type[Exception], ...] = ()
    running: Callable[[], AbstractContextManager[object]] = nullcontext
    traces: bool = False


def compare(case: Case, runner: Runner, region: Region) -> Outcome:
    """Run a case's samples in both ways, and compare."""
    unusable = case.unusable
    if region.is_imitated and case.operator in NOT_IMITATED:
        unusable = "fake tensors do not imitate what its kernel calls"
    if unusable:
        return Outcome(case.name, Verdict.INCOMPARABLE, (unusable,))
    found: dict[Verdict, list[str]] = {verdict: [] for verdict in Verdict}
    for sample in case.samples:
        verdict, reason = _compare_sample(sample, runner, region)
        found[verdict].append(f"{reason} in `{sample}`" if reason else "")
    for verdict in (Verdict.DIFFERS, Verdict.REFUSED, Verdict.EQUAL, Verdict.INCOMPARABLE):
        if found[verdict]:
            return Outcome(case.name, verdict, tuple(dict.fromkeys(filter(None, found[verdict]))))
    raise AssertionError(f"{case.name} has neither samples nor a reason for having none")


def _compare_sample(sample: Sample, runner: Runner, region: Region) -> tuple[Verdict, str]:
    expected = attempt(_eager, sample, region)
    if isinstance(expected, Failure):
        return Verdict.INCOMPARABLE, f"eager autocast raises {expected.first_line}"
    if sample.varies or difference(expected, attempt(_eager, sample, region)):
        return Verdict.INCOMPARABLE, "its result varies"
    problem = _untraceable(expected) if runner.traces else _unscriptable(sample, region, expected)
    if problem:
        return Verdict.INCOMPARABLE, problem
    built = attempt(runner.build, sample, region)
    if isinstance(built, Failure):
        if isinstance(built.error, runner.refusals):
            return Verdict.REFUSED, built.first_line
        return _raising(f"building raises {built.first_line}", sample, runner, region)
    assert callable(built)
    for run in range(RUNS):
        got = attempt(_run, built, sample, runner, region)
        if isinstance(got, Failure):
            return _raising(f"run {run + 1} raises {got.first_line}", sample, runner, region)
        how = difference(expected, got)
        if how:
            return Verdict.DIFFERS, f"run {run + 1}: {how}"
    return Verdict.EQUAL, ""


def _raising(what: str, sample: Sample, runner: Runner, region: Region) -> tuple[Verdict, str]:
    """A program that raises differs, unless it raises without any region too."""
    without = attempt(runner.build, sample, None)
    if not isinstance(without, Failure):
        assert callable(without)
        without = attempt(_run, without, sample, runner, region)
    if isinstance(without, Failure):
        return Verdict.INCOMPARABLE, f"{what}, and raises without a region too"
    return Verdict.DIFFERS, what


def _untraceable(result: object) -> str:
    leaves = tree_leaves(result)
    tensors = leaves and all(isinstance(leaf, torch.Tensor) for leaf in leaves)
    return "" if tensors else "its result is no tensor"


def _unscriptable(sample: Sample, region: Region, expected: object) -> str:
    if sample.unscriptable or sample.expression:
        return sample.unscriptable
    how = difference(expected, attempt(_trace_in_region, sample, region))
    return f"its trace differs under eager autocast: {how}" if how else ""


def _trace_in_region(sample: Sample, region: Region) -> object:
    plain = scripted(sample.program())
    with region.world():
        inputs = sample.inputs(region.device_type)
        with region.entered(), jit_autocast_pass(False):
            return plain(*inputs)


def _eager(sample: Sample, region: Region) -> object:
    with region.world():
        inputs = sample.inputs(region.device_type)
        with region.entered():
            return sample.call(*inputs)


def _run(built: Program, sample: Sample, runner: Runner, region: Region) -> object:
    with region.world():
        inputs = sample.inputs(region.device_type)
        with runner.running():
            return built(*inputs)


# Runners ------------------------------------------------------------------------------------------


def scripted(program: Program) -> Program:
    """The program compiled by plain ``torch.jit.script``."""
    compiled: Program = torch.jit.script(program)
    return compiled


def _script(sample: Sample, region: Region | None) -> Program:
    return scripted(sample.program(region))


def _recipe(sample: Sample, region: Region | None) -> Program:
    module = _Model(sample.call).eval()
    with _region(region):
        traced = torch.jit.trace(module, sample.inputs(), check_trace=False)
    frozen: Program = torch.jit.freeze(traced)
    return frozen


class _Model(torch.nn.Module):
    def __init__(self, call: Program) -> None:
        super().__init__()
        self.call = call

    def forward(self, *inputs: torch.Tensor) -> object:
        return self.call(*inputs)


def _region(region: Region | None) -> AbstractContextManager[object]:
    if region is None:
        return nullcontext()
    return torch.autocast(region.device_type, dtype=region.dtype, cache_enabled=False)


def _amp_script(sample: Sample, region: Region | None) -> Program:
    program: Program = amp_script.script(sample.program(region))
    return program


def _amp_trace(sample: Sample, region: Region | None) -> Program:
    if region is None:
        return _recipe(sample, region)
    program: Program = amp_script.trace_and_freeze(
        sample.call,
        sample.inputs(),
        device_type=region.device_type,
        dtype=region.dtype,
        compute="native",
        fold_batch_norm=False,
        verify=False,
    )
    return program


RUNNERS = {
    runner.name: runner
    for runner in (
        Runner("torch.jit.script", _script, running=lambda: jit_autocast_pass(True)),
        Runner("trace and freeze", _recipe, traces=True),
        Runner("amp_script.script", _amp_script, refusals=(LoweringError,)),
        Runner("amp_script.trace_and_freeze", _amp_trace, refusals=(LoweringError,), traces=True),
    )
}
"""PyTorch's two ways and ours, by name."""
