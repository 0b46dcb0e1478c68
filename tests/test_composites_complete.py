"""Every composite operator of the installed torch is taken apart, or exempt for a reason."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from composite_arguments import ARGUMENTS
from composite_observation import DEVICE_TYPES, Observation
from torch._C._profiler import _ExperimentalConfig
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_map_only

from amp_script import policy
from amp_script.lowering.composites import decomposition, decompositions
from amp_script.lowering.composites.tracing import OTHER_NAMES

SAMPLES = 6
"""Samples of the operator database taken of each operator."""

_RENAMED = "compiled to the operator that it is another name of, and told from it in traces"
_PRIVATE = "torch calls it from inside operators that autocast knows, and no program does"
_NO_EFFECT = "the product of a diagonal without elements, in whatever dtype, is the same 1"
_COMPILER = "torch.compile's decompositions alone call it"
_RAISES = "raises in eager mode, because lower precision has no such kernel"
_RANDOM = "sums only to check its argument"
_ASKS = "asks for the norm in float32 by itself"

EXEMPT = {
    **dict.fromkeys(OTHER_NAMES, _RENAMED),
    "aten::_histogramdd_from_bin_tensors": _RAISES,
    "aten::_linalg_det": _NO_EFFECT,
    "aten::_linalg_det.result": _NO_EFFECT,
    "aten::_safe_softmax": _PRIVATE,
    "aten::_scaled_dot_product_attention_math": _PRIVATE,
    "aten::_unsafe_index_put": _COMPILER,
    "aten::_unsafe_masked_index_put_accumulate": _COMPILER,
    "aten::det": _NO_EFFECT,
    "aten::histogram.bins_tensor": _RAISES,
    "aten::histogramdd.TensorList_bins": _RAISES,
    "aten::linalg_det": _NO_EFFECT,
    "aten::linalg_det.out": _NO_EFFECT,
    "aten::multinomial": _RANDOM,
    "aten::multinomial.out": _RANDOM,
    "aten::renorm.out": _ASKS,
    "aten::renorm_": _ASKS,
}

UNOBSERVED = {
    r"_.*": "private: what torch does with it is seen inside the operators that call it",
    r".*backward.*": "the gradient of another operator",
    r".*_(\..*)?": "in place: computes in the dtype of its tensor",
    r".*\.(x_scalar|n_scalar|self_scalar|other_scalar|(Out)?Scalar.*|.*_Scalar|value.*)": (
        "the overload for a number calls the one for a tensor, which is seen"
    ),
    r"(quantize|dequantize|fake_quantize|choose_qparams|fused_moving_avg|quantized_|fbgemm_|q_"
    r"|qscheme|int_repr|empty_quantized).*": "quantization computes in integers",
    r"(bitwise|gcd|lcm|bincount|one_hot).*": "takes integers alone",
    r"(cudnn|miopen|mkldnn|mps|conv_depthwise3d|batch_norm_(elemt|gather|stats|update)"
    r"|convolution_overrideable|(addmm|baddbmm|bmm|mm)\.dtype).*": "other devices' kernel",
    r"(.*sparse.*|to_mkldnn|to_dense.*|to_padded_tensor|nested_.*|.*(row|col)_indices.*|coalesce"
    r"|indices.*|values.*|smm|sspaddmm|hspmm)": "layouts of tensors, which compute nothing",
    r"(rand|normal|bernoulli|binomial|poisson|cauchy|exponential|geometric|log_normal|uniform"
    r"|rrelu|native_dropout|.*dropout).*": "random numbers, the same with autocast and without",
    r".*(_window|fftfreq|range|tri[lu]_indices)(\..*)?": "makes a tensor from numbers",
    r"(set|resize|retain|requires_grad|output_nr|is_|data|lift|pin_memory|size|stride|sym_|numel"
    r"|dim|get_device|item|storage_offset|from_file|can_cast|promote_types|result_type|copy|view"
    r"|contiguous|conj|imag|split|unsafe_|swap|meshgrid|where|fill|zero|flatten|unflatten|record_"
    r"|clone|to\.|slice_|select_copy|get_gradients|embedding_renorm|confirmed).*": (
        "asks about a tensor or copies it"
    ),
    r".*_copy(\..*)?": "a view that copies",
    r"(align_.*|refine_names|rename|.*\.(.*names.*|.*[dD]imname.*))": (
        "dimensions by name, which torch up to 2.9 has: calls the overload for their numbers"
    ),
    r"(glu_jvp|native_norm.*|linalg__powsum|divide\..*|xlogy\..*)": (
        "TorchScript programs call its siblings, which are seen"
    ),
}
"""Operators that nothing here calls, by pattern of the name, with the reason that this is safe.

Overloads with ``out`` are seen where the operator database says that they exist, and else through
the operator that they write the result of.
"""

X, LONG = torch.rand(2, 3, 4), torch.tensor([0, 1])
EXTRA: tuple[Callable[..., Any], ...] = (
    lambda x: torch.nn.functional.embedding_bag(LONG, x[0], LONG),
    lambda x: torch.ops.aten.embedding_bag.default(x[0], LONG, LONG),
    lambda x: torch.lerp(x, x, x),
    lambda x: torch.nn.functional.affine_grid(x[:1, :2, :3], [1, 1, 2, 2]),
    lambda x: torch.nn.functional.fold(x.view(1, 4, 6)[..., :4], (3, 3), (2, 2)),
    lambda x: torch.nn.functional.pad(x[None], (1, 1, 1, 1, 1, 1), "reflect"),
    lambda x: torch.nn.utils.rnn.pad_sequence([x[0], x[1][:2]]),
    lambda x: torch.istft(torch.stft(x.flatten().repeat(4), 8, return_complex=True), 8),
    lambda x: torch.gradient(x, spacing=(x[0, 0, :2], x[0, :, 0]), dim=(0, 1)),
    lambda x: torch.gradient(x, spacing=(x[0, 0, :2],), dim=0),
    lambda x: torch.gradient(x, spacing=1.0, dim=(0, 1)),
    lambda x: torch.gradient(x, spacing=(1.0, 2.0), dim=(0, 1)),
    lambda x: torch.ops.aten.gradient.array(x, dim=[0]),
    lambda x: torch.ops.aten.gradient.scalararray(x, spacing=1.0, dim=[0]),
    lambda x: torch.ops.aten.gradient.tensorarrayint(x, spacing=[x[0, 0, :2]], dim=0),
    lambda x: torch.ops.aten.gradient.tensorarray(x, spacing=[x[0, 0, :2]], dim=[0]),
    lambda x: torch.ops.aten.histogramdd.int_bins(x[0], 2),
    lambda x: torch.movedim(x, 0, 1),
    lambda x: torch.slogdet(x[:, :3, :3]),
    lambda x: torch.clamp_max(x, 0.5),
    lambda x: torch.float_power(x, 2),
    lambda x: torch.ops.aten.norm.ScalarOpt_dtype(x, 2, dtype=torch.float32),
    lambda x: torch.ops.aten.norm.ScalarOpt_dim_dtype(x, 2, [0], False, dtype=torch.float32),
    lambda x: torch.ops.aten.unique_dim_consecutive(x, 0),
    lambda x: torch.isin(x, 0.5),
)
"""Calls of what neither the database nor the decompositions' own tests call."""


@pytest.fixture(scope="module")
def observation() -> Observation:
    if "capture_overload_names" not in (_ExperimentalConfig.__init__.__doc__ or ""):
        pytest.skip("this torch's profiler does not tell overloads apart")
    found = Observation()
    for call in _calls():
        found.watch(call)
    return found


_RUNS = (
    (torch.float32, torch.float32, True),
    (torch.bfloat16, torch.bfloat16, True),
    (torch.bfloat16, torch.bfloat16, False),
    (torch.float32, torch.bfloat16, True),
)
"""Dtypes that float32 arguments get by turns, and whether autocast is on."""


def _calls() -> Iterator[Callable[[], None]]:
    for info in op_db:
        if torch.float32 in info.supported_dtypes("cpu") and "jiterator" not in info.name:
            yield lambda info=info: _run_samples(info)
    for composite in decompositions():
        yield lambda operator=composite.operator: _run_arguments(operator)
    for call in EXTRA:
        yield lambda call=call: _run_extra(call)


def _run_samples(info: Any) -> None:
    functions = [info.get_op(), info.get_method(), info.get_inplace(), info.get_operator()]
    for other in info.aliases:
        functions += [other.op, other.method_variant, other.inplace_variant]
    torch.manual_seed(0)
    samples = info.sample_inputs_func(info, "cpu", torch.float32, requires_grad=False)
    for sample, _ in zip(samples, range(SAMPLES), strict=False):
        given = (sample.input, *sample.args, sample.kwargs)
        for one, other, enabled in _RUNS:
            for function in filter(None, functions):
                *arguments, named = _cast(given, (one, other))
                result = _try(function, arguments, named, enabled)
            if info.supports_out and isinstance(result, torch.Tensor):
                for dtype in {result.dtype, one}:
                    *arguments, named = _cast(given, (one, other))
                    out = torch.empty_like(result, dtype=dtype)
                    _try(info.get_op(), arguments, {**named, "out": out}, enabled)


def _run_extra(call: Callable[..., Any]) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for enabled in (True, False):
            _try(call, [X.to(dtype)], {}, enabled)


def _run_arguments(operator: str) -> None:
    name, _, overload = operator.removeprefix("aten::").partition(".")
    function = getattr(getattr(torch.ops.aten, name), overload or "default")
    for seed in range(8):
        arguments = ARGUMENTS[operator](random.Random(seed))
        pairs = list(zip(function._schema.arguments, arguments, strict=True))
        positional = [value for argument, value in pairs if not argument.kwarg_only]
        named = {argument.name: value for argument, value in pairs if argument.kwarg_only}
        for enabled in (True, False):
            _try(function, positional, named, enabled)


def _cast(arguments: Any, mix: tuple[torch.dtype, torch.dtype]) -> Any:
    """Copies of arguments, float32 ones in the mix's dtypes by turns."""
    turn = 0

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal turn
        if tensor.dtype != torch.float32:
            return tensor.detach().clone()
        turn += 1
        return tensor.detach().to(mix[(turn - 1) % 2], copy=True)

    return tree_map_only(torch.Tensor, copy, arguments)


def _try(function: Any, arguments: Iterable[Any], named: dict[str, Any], enabled: bool) -> Any:
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            return function(*arguments, **named)
    except Exception:
        return None  # a sample in a dtype that the operator does not take


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_every_composite_is_taken_apart_or_exempt(observation: Observation) -> None:
    missing = []
    for (operator, device_type), inside in sorted(observation.reached.items()):
        composite = decomposition(operator)
        taken_apart = composite is not None and composite.reaches(device_type)
        if inside and operator.startswith("aten::") and not taken_apart and operator not in EXEMPT:
            missing.append(f"{operator} on {device_type} calls {', '.join(sorted(inside))}")
    assert not missing, "composites without a decomposition:\n" + "\n".join(missing)


def test_every_exemption_is_needed(observation: Observation) -> None:
    reached = {operator for (operator, _), inside in observation.reached.items() if inside}
    assert sorted(set(EXEMPT) - reached) == []
    assert sorted(set(EXEMPT).intersection(each.operator for each in decompositions())) == []


@pytest.mark.parametrize(
    "operator", sorted(name for name, why in EXEMPT.items() if why == _RENAMED)
)
def test_renamed_operators_do_not_occur(operator: str) -> None:
    name = operator.removeprefix("aten::")
    schema, *_ = torch._C._jit_get_schemas_for_operator(operator)
    parameters = ", ".join(f"{each.name}: {each.type.annotation_str}" for each in schema.arguments)
    passed = ", ".join(
        f"{each.name}={each.name}" if each.kwarg_only else each.name for each in schema.arguments
    )
    unit: Any = torch._C.CompilationUnit()
    unit.define(
        f"def f({parameters}):\n    return torch.ops.aten.{name}({passed})\n", {"torch": torch}.get
    )
    (function,) = unit.get_functions()
    assert operator not in {node.kind() for node in function.graph.nodes()}


def test_every_operator_was_observed_or_cannot_be(observation: Observation) -> None:
    known = set().union(*map(policy.listed_operators, DEVICE_TYPES))
    unseen = []
    for schema in torch._C._jit_get_all_schemas():
        overload = f".{schema.overload_name}" if schema.overload_name else ""
        operator = schema.name + overload
        if (
            operator.startswith("aten::")
            and torch._C._dispatch_has_kernel(operator)
            and operator not in known
            and operator not in observation.seen
            and not any(argument.is_out for argument in schema.arguments)
            and not any(re.fullmatch("aten::" + pattern, operator) for pattern in UNOBSERVED)
        ):
            unseen.append(operator)
    assert not unseen, "operators that no sample calls:\n" + "\n".join(sorted(unseen))
