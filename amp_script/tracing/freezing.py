"""trace_and_freeze: a model as a frozen TorchScript program that is eager autocast to the bit.

The model runs under autocast, so that its casts become nodes, and so that Python's branches on
dtypes and nested regions go the way they go in eager mode. It runs once without and once with
gradients, because some modules take another path then; where the two recordings are alike, one is
kept. The recording is made a program with the model's own argument names and result, batch norms
are folded, weights become constants in the dtype that they are used in, and the program is compared
with the model.

Private names used here, present in torch 2.6 to 2.15: the ``torch._C`` passes
``_jit_pass_optimize_frozen_graph``, ``_jit_pass_constant_pooling``, ``_jit_pass_cse``,
``_jit_pass_dce``, ``_jit_pass_lint``; of the C++ module ``_method_names`` and ``_get_method``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, TypeVar, overload

import torch
from typing_extensions import ParamSpec

from amp_script.calls import Call, Inputs
from amp_script.compute import Compute
from amp_script.compute.dtypes import infer, promotes_as_number
from amp_script.dtypes import dtype_name, require_dtype
from amp_script.errors import (
    AmpScriptError,
    InputError,
    TracingError,
    TracingWarning,
    VerificationError,
)
from amp_script.float32_blocks import Float32Blocks
from amp_script.frozen import FrozenModule
from amp_script.gist import gist
from amp_script.jit_state import jit_autocast_pass, shield
from amp_script.lowering import lower_graph
from amp_script.lowering._graph import Editor, Graph
from amp_script.lowering.addmm import keep_addmm_whole
from amp_script.lowering.scalars import keep_scalars_tensors
from amp_script.metadata import InputSpec, Metadata, Verification
from amp_script.regions import Region, border_dtype
from amp_script.requirements import require_runnable, require_traceable
from amp_script.scripting.programs import originals
from amp_script.structure import Constant, Structure, flatten, forward_source, reconcile
from amp_script.tracing.batch_norm import fold_batch_norm as fold_batch_norm_into_layers
from amp_script.tracing.compiled_calls import submodules_called_by
from amp_script.tracing.constants import (
    attach_weights,
    copy_returned_constants,
    own_constants,
    share_constants,
)
from amp_script.tracing.gradient_paths import write_out_products
from amp_script.tracing.graph_difference import first_difference
from amp_script.tracing.missing_kernels import stand_in_for_missing_kernels
from amp_script.tracing.python_operators import python_operators_as_their_bodies
from amp_script.tracing.recording import Recorder, tensors_with_grad
from amp_script.tracing.session import HeldFast, depends_on_data, trace_session
from amp_script.tracing.specialise import specialise
from amp_script.typing import HasForward, TypedScriptModule
from amp_script.untouched import modules_of, seeded, tensors_of, untouched
from amp_script.verification import VerificationReport, expect, judge

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

if TYPE_CHECKING:

    class TypedFrozenModule(TypedScriptModule[P, R_co], FrozenModule):
        """A :class:`FrozenModule` whose call takes ``P`` and returns ``R_co``."""


__all__ = ["Inputs", "trace_and_freeze"]

_C: Any = torch._C  # torch's stubs lack most passes

_WITHOUT_GRAD: Final = "recorded_without_grad_"
_WITH_GRAD: Final = "recorded_with_grad_"


@overload
def trace_and_freeze(
    model: HasForward[P, R],
    example_inputs: Inputs,
    *,
    example_kwargs: Mapping[str, object] | None = None,
    device_type: str = "cpu",
    dtype: torch.dtype | None = None,
    compute: Compute = "auto",
    fold_batch_norm: bool = True,
    input_dtype: torch.dtype | None = None,
    output_dtype: torch.dtype | None = None,
    preserved_attrs: Sequence[str] = (),
    check_inputs: Iterable[Inputs] = (),
    keep_float32: Sequence[str] = (),
    verify: bool = True,
) -> TypedFrozenModule[P, R]: ...


@overload
def trace_and_freeze(
    model: Callable[P, R],
    example_inputs: Inputs,
    *,
    example_kwargs: Mapping[str, object] | None = None,
    device_type: str = "cpu",
    dtype: torch.dtype | None = None,
    compute: Compute = "auto",
    fold_batch_norm: bool = True,
    input_dtype: torch.dtype | None = None,
    output_dtype: torch.dtype | None = None,
    preserved_attrs: Sequence[str] = (),
    check_inputs: Iterable[Inputs] = (),
    keep_float32: Sequence[str] = (),
    verify: bool = True,
) -> TypedFrozenModule[P, R]: ...


def trace_and_freeze(
    model: object,
    example_inputs: Inputs,
    *,
    example_kwargs: Mapping[str, object] | None = None,
    device_type: str = "cpu",
    dtype: torch.dtype | None = None,
    compute: Compute = "auto",
    fold_batch_norm: bool = True,
    input_dtype: torch.dtype | None = None,
    output_dtype: torch.dtype | None = None,
    preserved_attrs: Sequence[str] = (),
    check_inputs: Iterable[Inputs] = (),
    keep_float32: Sequence[str] = (),
    verify: bool = True,
) -> FrozenModule:
    """Trace a model under autocast and freeze it.

    The program takes what the model takes, by the same names, and returns what it returns, but
    that a dataclass or a ``transformers`` model output is returned as a dictionary (which the type
    of the result does not say). Arguments that are no
    tensors are held fast: they keep their place in the signature, and another value is an error at
    call time. Each tensor is taken to be one of its own, even if the example passes one twice.

    Args:
        model: a module in evaluation mode, or a function.
        example_inputs: a tensor, a tuple or list of positional arguments, or a mapping of keyword
            arguments. An argument is a tensor or a nested structure of tensors.
        example_kwargs: keyword arguments beside positional ones.
        device_type: device type of the region, of the parameters and of the inputs.
        dtype: dtype of the region; the device's default where None.
        compute: ``"native"`` for reduced-precision kernels, ``"upcast"`` for float32 kernels on
            rounded values, ``"auto"`` for what suits this processor.
        fold_batch_norm: fold batch norms into the layer before them, in float32 before rounding.
            The result is then as near to float32 as eager autocast's, and not its bits; where it
            would not be as near on the example, nothing is folded.
        input_dtype: dtype of floating-point inputs at the program's border; the examples' where
            None.
        output_dtype: dtype of floating-point outputs at the border; eager autocast's where None.
        preserved_attrs: attributes and methods of the model that stay on the frozen module. The
            program follows a tensor among them that is set later; another value that it read while
            it was traced is held fast. Methods are compiled by scripting and lowered for the
            region; exported ones stay anyway.
        check_inputs: more inputs, in other sizes, on which the program must do as the model does.
        keep_float32: dotted names of submodules, or patterns such as ``"encoder.layer.3.*"``, that
            run as if their ``forward`` were in a block with ``autocast(enabled=False)``, inputs
            of lower precision cast to float32; see :func:`amp_script.keep_float32`. What the
            program is compared with is eager autocast with the same submodules kept.
        verify: compare the program with eager autocast on the example.

    Returns:
        A :class:`amp_script.frozen.FrozenModule`.

    Raises:
        TracingError: the model or an input cannot be traced exactly; says what to change.
        ArgumentError: a dtype is none.
        StructureError: an input or output is no structure of tensors.
        SubmoduleError: a pattern in ``keep_float32`` keeps nothing, or what cannot be kept.
        VerificationError: the program is not what eager autocast is; holds the report.

    Warns:
        TracingWarning: the model's Python code computed with the example's values, or with its
            sizes and no ``check_inputs`` have others; shows the lines.
    """
    if not callable(model):
        raise TracingError(
            f"the model is a {type(model).__name__}: expected a module or a function"
        )
    if isinstance(check_inputs, (torch.Tensor, Mapping)):
        raise TracingError(
            f"check_inputs is a {type(check_inputs).__name__}: expected a list of inputs, each "
            "like example_inputs"
        )
    if isinstance(preserved_attrs, str):
        raise TracingError(
            f"preserved_attrs is {preserved_attrs!r}: expected a list, [{preserved_attrs!r}]"
        )
    for attribute in preserved_attrs:
        if not isinstance(attribute, str):
            raise TracingError(
                f"preserved_attrs holds {attribute!r:.60}: expected names of attributes or methods"
            )
    for name, wanted in (("input_dtype", input_dtype), ("output_dtype", output_dtype)):
        require_dtype(name, wanted)
        if wanted is not None and not wanted.is_floating_point:
            raise TracingError(
                f"{name} is {wanted}: expected a floating-point dtype, since only floating-point "
                "tensors are converted at the border"
            )
    region = Region.resolve(device_type, dtype)
    call = Call.bind(model, example_inputs, example_kwargs)
    held = {name: part for name, part in (example_kwargs or {}).items() if _is_constant(part)}
    checks = [
        _bind_check(f"check_inputs[{index}]", model, inputs, held, call, input_dtype)
        for index, inputs in enumerate(check_inputs)
    ]
    if not call.tensors:
        raise TracingError(
            "no tensor among the example inputs, and a trace needs at least one; pass "
            "trace_and_freeze(model, (tensor, ...))"
        )
    require_runnable(model, call, region)
    kept = Float32Blocks.select(model, keep_float32)
    border = {
        path: border_dtype(tensor.dtype, input_dtype)
        for path, tensor in zip(call.paths, call.tensors, strict=True)
    }
    preserved = tuple(name for name in preserved_attrs if name != "forward")  # kept anyway
    freezing = _Freezing(model, region, border, output_dtype, preserved, compute, kept)
    with _as_if_nothing_ran(model, region):
        return freezing.run(call, checks, fold=fold_batch_norm, verify=verify)


@contextmanager
def _as_if_nothing_ran(model: object, region: Region) -> Iterator[None]:
    with (
        jit_autocast_pass(False),
        shield(),
        torch.inference_mode(False),
        untouched(modules_of(model)),
        seeded(region.device_type),
    ):
        yield


@dataclass(frozen=True)
class _Recording:
    """A model recorded on one call, ready to become a program.

    Attributes:
        recorder: holds the recorded methods.
        variants: dtypes of the output tensors by name of the method: one that runs without
            gradients, and perhaps one that runs with them.
        result: structure of the result.
        places: what the recording holds fast.
        changing: tensors of the model that the model itself changes, or that are preserved and
            may be set.
    """

    recorder: Recorder
    variants: dict[str, tuple[torch.dtype, ...]]
    result: Structure
    places: list[HeldFast]
    changing: list[torch.Tensor]

    @property
    def graphs(self) -> list[Graph]:
        return [self.recorder.graph(name) for name in self.variants]


@dataclass(frozen=True)
class _Freezing:
    """One call of :func:`trace_and_freeze`: what was asked for, and the steps to it."""

    model: Callable[..., object]
    region: Region
    border: Mapping[str, torch.dtype]
    output_dtype: torch.dtype | None
    preserved: tuple[str, ...]
    compute: Compute
    kept: Float32Blocks

    def run(self, call: Call, checks: Sequence[Call], *, fold: bool, verify: bool) -> FrozenModule:
        recording = self.record(call)
        program, folded = self.program(recording, [call, *checks], fold=fold)
        exact = not folded and program.compute == "native"
        verification = None
        try:
            if verify:
                name = "example_inputs"
                verification = self.check(program, call, recording, name, call, exact=exact)
            for index, check in enumerate(checks):
                name = f"check_inputs[{index}]"
                self.check(program, check, recording, name, call, exact=exact)
        except VerificationError:
            if not folded:
                raise
            # Folded, the program is further from float32 than eager autocast is on these inputs.
            return self.run(call, checks, fold=False, verify=verify)
        _warn(recording.places, sizes_vary=_sizes_vary([call, *checks]))
        metadata = replace(program.metadata, verification=verification)
        return FrozenModule.wrap(program, metadata, compute=self.compute)

    # --- recording ---

    def record(self, call: Call) -> _Recording:
        """Record the model without gradients and, where that differs, with them."""
        modules = modules_of(self.model)
        recorder = Recorder(self.model, modules, self.preserved)
        for name in recorder.compiled:
            self.kept.require_unused(submodules_called_by(recorder.cpp_module, name), name)
        with trace_session() as places, untouched(modules) as state:
            with torch.no_grad():
                result, dtypes = self.record_once(recorder, _WITHOUT_GRAD, call)
            changing = [*state.changed_tensors(), *recorder.preserved_tensors]
        variants = {_WITHOUT_GRAD: dtypes}
        with_grad = self.record_with_grad(recorder, call, result)
        if with_grad is not None:
            variants[_WITH_GRAD] = with_grad
        for name in variants:
            write_out_products(recorder.graph(name))
        return _Recording(recorder, variants, result, places, changing)

    def record_with_grad(
        self, recorder: Recorder, call: Call, result: Structure
    ) -> tuple[torch.dtype, ...] | None:
        """Record the path with gradients; None where it is the same path, or there is none."""
        with trace_session(), untouched(modules_of(self.model)), torch.enable_grad():
            try:
                structure, dtypes = self.record_once(recorder, _WITH_GRAD, call)
            except RuntimeError:
                return None  # the model itself runs without gradients alone
        one, other = recorder.graph(_WITHOUT_GRAD), recorder.graph(_WITH_GRAD)
        if structure != result or first_difference(one, other) is None:
            return None
        return dtypes

    def record_once(
        self, recorder: Recorder, name: str, call: Call
    ) -> tuple[Structure, tuple[torch.dtype, ...]]:
        """Record the model once, in the calling thread's gradient mode."""
        try:
            return self.record_attached(recorder, name, call)
        except RuntimeError as error:
            if "Cannot insert a Tensor that requires grad" not in str(error):
                raise
        # The model reads parameters that no module has registered, such as those of a plain list.
        with self.kept.enter(), self.region.enter():
            recorder.attach(tensors_with_grad(lambda: call.run(self.model, call.fresh())))
        return self.record_attached(recorder, name, call)

    def record_attached(
        self, recorder: Recorder, name: str, call: Call
    ) -> tuple[Structure, tuple[torch.dtype, ...]]:
        found: list[tuple[Structure, tuple[torch.dtype, ...]]] = []
        may_be_numbers: list[bool] = []

        def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
            outputs, structure = flatten(call.run(self.model, tensors), "output")
            if not outputs:
                raise TracingError("the model returned no tensor, and a program has to")
            if any(output.dim() == 0 and not depends_on_data(output) for output in outputs):
                may_be_numbers.append(True)
            found.append((structure, tuple(output.dtype for output in outputs)))
            return outputs

        with (
            seeded(self.region.device_type),
            self.kept.enter() as ran,
            stand_in_for_missing_kernels(self.region),
            python_operators_as_their_bodies(self.region),
            self.region.enter(),
        ):
            recorder.record(name, run, call.fresh())
        if name == _WITHOUT_GRAD:  # the other path may be without some of the model's calls
            self.kept.require_ran(ran)
        structure, dtypes = found[-1]
        return self.with_numbers(structure, call) if may_be_numbers else structure, dtypes

    def with_numbers(self, structure: Structure, call: Call) -> Structure:
        """Tell sizes that the model returns, which are tensors while recording, from tensors."""
        with untouched(modules_of(self.model)), self.kept.enter(), self.region.enter():
            _, eager = flatten(call.run(self.model, call.fresh()), "output")
        return reconcile(eager, structure)

    # --- the program ---

    def program(
        self, recording: _Recording, calls: Sequence[Call], *, fold: bool
    ) -> tuple[FrozenModule, int]:
        """Make a recording a frozen program; also returns how many batch norms were folded."""
        recorder = recording.recorder
        folded = 0
        for graph in recording.graphs:
            attach_weights(graph, recorder.cpp_module, recording.changing)
            if fold:
                folded += fold_batch_norm_into_layers(graph, self.region.dtype)
        self.define_forward(recording, calls[0])
        for name in recorder.compiled:
            lower_graph(recorder.graph(name), self.region.ambient(), originals)
        frozen = recorder.freeze([*self.preserved, *recorder.compiled])
        foreign = tensors_of(modules_of(self.model))
        for name in frozen._c._method_names():
            inputs = self.border if name == "forward" else {}
            self.tidy(frozen._c._get_method(name).graph, inputs, foreign)
        metadata = Metadata(
            "frozen",
            self.region.dtype,
            self.region.device_type,
            self.inputs(calls),
            keep_float32=self.kept.patterns,
        )
        return FrozenModule.wrap(frozen, metadata, compute=self.compute), folded

    def tidy(
        self, graph: Graph, inputs: Mapping[str, torch.dtype], foreign: Sequence[torch.Tensor]
    ) -> None:
        """Clean a frozen graph: one cast a value, products and scalars kept, own constants."""
        _C._jit_pass_optimize_frozen_graph(graph, False)  # drops dropout
        _C._jit_pass_constant_pooling(graph)
        _C._jit_pass_cse(graph)
        specialise(graph, inputs, self.region.device_type)
        keep_addmm_whole(Editor(graph))
        dtypes = infer(graph, inputs)
        keep_scalars_tensors(Editor(graph), lambda node: promotes_as_number(node, dtypes))
        own_constants(graph, foreign)
        share_constants(graph)
        copy_returned_constants(graph)
        _C._jit_pass_dce(graph)
        _C._jit_pass_lint(graph)

    def define_forward(self, recording: _Recording, call: Call) -> None:
        inside = [tensor.dtype for tensor in call.tensors]
        input_casts = [
            dtype if self.border[path] != dtype else None
            for path, dtype in zip(call.paths, inside, strict=True)
        ]
        output_casts = [
            next((b for d in each if (b := border_dtype(d, self.output_dtype)) != d), None)
            for each in zip(*recording.variants.values(), strict=True)
        ]
        source, names = forward_source(
            call.parameters, recording.result, list(recording.variants), input_casts, output_casts
        )
        recording.recorder.define(source, names)

    def inputs(self, calls: Sequence[Call]) -> tuple[InputSpec, ...]:
        """Specs of the inputs; a size in which the calls differ may vary."""
        named = [dict(call.named_tensors()) for call in calls]
        return tuple(
            InputSpec(leaf.path, None, None)
            if isinstance(leaf, Constant)
            else self.spec(leaf.path, [each[leaf.path] for each in named if leaf.path in each])
            for leaf in calls[0].leaves
        )

    def spec(self, path: str, examples: Sequence[torch.Tensor]) -> InputSpec:
        ranks = {tensor.dim() for tensor in examples}
        sizes = zip(*(tensor.shape for tensor in examples), strict=False)
        varying = tuple(size[0] if len(set(size)) == 1 else None for size in sizes)
        shape = varying if len(ranks) == 1 else None
        return InputSpec(path, self.border[path], shape, examples[0].device.type)

    # --- verifying ---

    def verify(
        self, program: FrozenModule, call: Call, recording: _Recording, name: str, *, exact: bool
    ) -> Verification:
        at_border = call.at_border(self.border)
        reports = []
        for grad in (False, True)[: len(recording.variants)]:
            with torch.set_grad_enabled(grad):
                with self.kept.enter():
                    expected = expect(self.model, call.rounded_by(at_border), self.region)
                report = judge(
                    program,
                    at_border,
                    expected,
                    output_dtype=self.output_dtype,
                    exact=exact,
                    name=name + (" with gradients" if grad else ""),
                )
                reports.append(report)
        return _summary(reports)

    def check(
        self,
        program: FrozenModule,
        check: Call,
        recording: _Recording,
        name: str,
        example: Call,
        *,
        exact: bool,
    ) -> Verification:
        """Verify on some inputs; where that fails, say what in the model the trace holds fast."""
        try:
            return self.verify(program, check, recording, name, exact=exact)
        except VerificationError as error:
            why = error.explanation + self.why(recording, example, check)
            raise VerificationError(error.report, why) from None
        except InputError as error:
            raise TracingError(f"{name} does not fit the program: {error}") from None
        except (RuntimeError, torch.jit.Error) as error:
            lines = [f"{name}: the program fails: {gist(error)}"]
            lines += [f"  {path}: {_sizes(tensor)}" for path, tensor in check.named_tensors()]
            raise TracingError("\n".join(lines) + self.why(recording, example, check)) from error

    def why(self, recording: _Recording, example: Call, check: Call) -> str:
        """What a recording of another call has in the place of something held fast."""
        if check is example:
            return ""
        try:
            other = self.record(check)
            found = first_difference(self.record(example).graphs[0], other.graphs[0])
        except (RuntimeError, AmpScriptError):
            found = None
        lines = []
        if found is not None:
            lines.append(f"held fast when traced, at {found.line or 'an unknown line'}:")
            lines.append(f"  {found.one} with the example, {found.other} with these inputs")
        elif recording.places:
            lines.append("held fast when traced, perhaps one of:")
            lines += [f"  {place.line}" for place in recording.places]
        return "".join(f"\n{line}" for line in lines)


def _bind_check(
    name: str,
    model: object,
    inputs: Inputs,
    held: Mapping[str, object],
    example: Call,
    input_dtype: torch.dtype | None,
) -> Call:
    """Bind more inputs, whose dtypes have to be the example's or those of the border."""
    try:
        call = Call.bind(model, inputs, {} if isinstance(inputs, Mapping) else held)
        require_traceable(call)
    except TracingError as error:
        raise TracingError(f"{name}: {error}") from None
    dtypes = {path: tensor.dtype for path, tensor in example.named_tensors()}
    for path, tensor in call.named_tensors():
        wanted = dtypes.get(path, tensor.dtype)
        if tensor.dtype not in (wanted, border_dtype(wanted, input_dtype)):
            raise TracingError(
                f"{name}: {path} is {dtype_name(tensor.dtype)}: expected {dtype_name(wanted)}, as "
                "in the example"
            )
    return call


def _is_constant(value: object) -> bool:
    return not isinstance(value, torch.Tensor) and not flatten(value, "")[0]


def _summary(reports: Sequence[VerificationReport]) -> Verification:
    worst = max(reports, key=lambda report: not report.bit_equal)
    return Verification(worst.bit_equal, worst.ulps, worst.distance, worst.eager_distance)


def _warn(places: Sequence[HeldFast], *, sizes_vary: bool) -> None:
    on_data = [place.line for place in places if place.on_data]
    on_sizes = [place.line for place in places if not place.on_data and not sizes_vary]
    paragraphs = []
    if on_data:
        paragraphs += [
            "the model computes in Python with the values of the example inputs; the program will "
            "always do as it did with these:",
            *on_data,
        ]
    if on_sizes:
        paragraphs += [
            "the model computes in Python with the sizes of the example inputs; pass inputs of "
            "other sizes as check_inputs, or on the command line with --check-inputs, to know "
            "whether the program holds for them:",
            *on_sizes,
        ]
    if paragraphs:
        warnings.warn("\n  ".join(paragraphs), TracingWarning, stacklevel=4)


def _sizes_vary(calls: Sequence[Call]) -> bool:
    first, *others = ({path: t.shape for path, t in call.named_tensors()} for call in calls)
    return any(other != first for other in others)


def _sizes(tensor: torch.Tensor) -> str:
    return f"{dtype_name(tensor.dtype)} {list(tensor.shape)}"
