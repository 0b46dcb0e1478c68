"""A model's run under autocast and its run in float32, and what every submodule did in both.

The run under autocast comes first. Of each call of a submodule it leaves a copy of the outputs, the
autocast state that the call met, and the dtypes of its inputs. The run in float32 follows and is
compared on the way. In it each submodule runs once more, before its turn, as it ran under autocast,
but on the inputs of this run: what differs then is its own doing.

A submodule that met inputs in lower precision is given such here, and is compared with float32 on
the same rounded values, in a third run. What is too large for the lower dtype is rounded to its
largest number, so that an overflow counts where it happens and not in all that follows.

In memory are the outputs of one run, in the dtypes that they have under autocast, and for each
level of nesting one call's inputs and outputs in float32.
"""

from __future__ import annotations

import copy
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from amp_script.accuracy.difference import Difference, difference
from amp_script.calls import Call
from amp_script.errors import AmpScriptError, ComparisonError
from amp_script.float32_blocks import Float32Blocks
from amp_script.gist import gist
from amp_script.jit_state import DeviceState
from amp_script.regions import Region
from amp_script.scripting.script_calls import lowered_script_calls
from amp_script.structure import map_tensors, tensors_in
from amp_script.submodules import Forward, Names, called_from_python, forward_replaced, names_of
from amp_script.tracing.missing_kernels import stand_in_for_missing_kernels
from amp_script.untouched import generators_kept, modules_of, seeded, untouched

__all__ = ["Outputs", "Runs", "SubmoduleCall"]

Outputs: TypeAlias = "Mapping[str, torch.Tensor]"
"""The tensors of a result by path."""


@dataclass(eq=False)
class SubmoduleCall:
    """One call of a submodule in the run in float32; filled in when it is over.

    Attributes:
        module: the submodule.
        index: the how-manieth of its calls it is, from 0.
        caller: the call in which it happened, None for an outermost one.
        parts: the calls that happened in it directly.
        dtypes: of the output tensors under autocast.
        accumulated: how far the outputs under autocast are from those in float32; None where
            nothing can be compared.
        own: the same on the inputs of the run in float32.
        note: why something could not be compared, or ``""``.
    """

    module: nn.Module
    index: int
    caller: SubmoduleCall | None = None
    parts: list[SubmoduleCall] = field(default_factory=list)
    dtypes: tuple[torch.dtype, ...] = ()
    accumulated: Difference | None = None
    own: Difference | None = None
    note: str = ""


class Runs:
    """The runs of one model on one call.

    Args:
        model: the model, in evaluation mode.
        call: its inputs.
        region: the autocast region.
    """

    def __init__(self, model: Callable[..., object], call: Call, region: Region) -> None:
        self.model, self.call, self.region = model, call, region
        self.names: Names = names_of(model)
        self._observable = called_from_python(model)

    def name(self, module: nn.Module) -> str:
        """A module's first name."""
        return self.names[module][0]

    def compared(
        self, kept: Float32Blocks, after_call: Callable[[int, int], None]
    ) -> tuple[list[SubmoduleCall], Difference, Outputs]:
        """Run both ways and compare every call of a submodule.

        Args:
            kept: submodules that are kept in float32.
            after_call: told how many calls are compared, and of how many.

        Returns:
            The calls in the order in which they began; how far the result is from float32; the
            result in float32.

        Raises:
            ComparisonError: the model fails, or its results cannot be compared.
        """
        seen = _UnderAutocast(self.region.device_type)
        reduced = self.reduced(kept, seen)
        kept.require_ran(seen.counts.keys())
        observer = _InFloat32(self, seen, after_call)
        full = self._run(self.call.in_float32(), "in float32", observer, kept.enter())
        found = difference(reduced, full)
        if found is None:
            raise ComparisonError(
                "there is nothing to compare: the model returns no tensor, or none that has the "
                "same size in float32 and under autocast"
            )
        return [*observer.calls, *observer.left()], found, full

    def reduced(self, kept: Float32Blocks, observer: _Observer | None = None) -> Outputs:
        """The result under autocast.

        Raises:
            ComparisonError: the model fails.
        """
        # Nearest to the model, an observer sees what is kept as it is kept.
        return self._run(self.call, "under autocast", observer, kept.enter(), self.region.enter())

    def _run(
        self,
        call: Call,
        where: str,
        observer: _Observer | None,
        *contexts: AbstractContextManager[object],
    ) -> Outputs:
        observer = observer or _Observer()
        with ExitStack() as stack:
            stack.enter_context(seeded(self.region.device_type))
            stack.enter_context(lowered_script_calls())
            stack.enter_context(stand_in_for_missing_kernels(self.region))
            stack.enter_context(untouched(modules_of(self.model)))
            stack.enter_context(forward_replaced(self._observable, observer))
            for context in contexts:
                stack.enter_context(context)
            try:
                return _Copies().of(call.run(self.model, call.fresh()))
            except AmpScriptError:
                raise
            except Exception as error:
                raise ComparisonError(self._failure(where, observer, error)) from error

    def _failure(self, where: str, observer: _Observer, error: Exception) -> str:
        module = observer.failed
        name = "" if module is None else self.name(module)
        inside = f", in {name!r} ({type(module).__name__})" if name else ""
        return f"the model fails {where}{inside}: {gist(error)}"


class _Observer:
    """Stands in for the ``forward`` of every submodule, and lets it run.

    Attributes:
        counts: how often each module was called.
        failed: the innermost module that an exception has come from, or None.
    """

    def __init__(self) -> None:
        self.counts: Counter[nn.Module] = Counter()
        self.failed: nn.Module | None = None

    def __call__(
        self, module: nn.Module, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Stand for ``forward``."""
        index = self.counts[module]
        self.counts[module] += 1
        try:
            return self.run(module, index, forward, args, kwargs)
        except Exception:
            self.failed = self.failed or module
            raise

    def run(
        self,
        module: nn.Module,
        index: int,
        forward: Forward,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run one call."""
        return forward(*args, **kwargs)


class _Seen(NamedTuple):
    """What the run under autocast leaves of a call."""

    outputs: Outputs
    state: DeviceState
    inputs: Sequence[torch.dtype]


class _UnderAutocast(_Observer):
    """Notes what each call gives and meets."""

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self._device_type = device_type
        self._copies = _Copies()
        self.calls: dict[tuple[nn.Module, int], _Seen] = {}

    def run(
        self,
        module: nn.Module,
        index: int,
        forward: Forward,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        device_type = self._device_type
        state = DeviceState(
            torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
        )
        inputs = _dtypes((args, kwargs))
        result = forward(*args, **kwargs)
        self.calls[module, index] = _Seen(self._copies.of(result), state, inputs)
        return result


class _InFloat32(_Observer):
    """Compares each call with the same one under autocast, of which nothing is kept then."""

    def __init__(
        self, runs: Runs, seen: _UnderAutocast, after_call: Callable[[int, int], None]
    ) -> None:
        super().__init__()
        self._device_type = runs.region.device_type
        self._seen = seen.calls
        self._total = len(seen.calls)
        self._after_call = after_call
        self._whole: dict[int, object] = {id(part): part for part in _parts(runs.names)}
        self._current: SubmoduleCall | None = None
        self._again = False
        self.calls: list[SubmoduleCall] = []

    def __call__(
        self, module: nn.Module, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self._again:
            return forward(*args, **kwargs)
        return super().__call__(module, forward, args, kwargs)

    def run(
        self,
        module: nn.Module,
        index: int,
        forward: Forward,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        call = SubmoduleCall(module, index, self._current)
        self.calls.append(call)
        if call.caller is not None:
            call.caller.parts.append(call)
        seen = self._seen.pop((module, index), None)
        if seen is None:
            call.note = "not called under autocast"
            own = None
        else:
            own = self._own(call, seen, forward, (args, kwargs))
        self._current = call
        try:
            result = forward(*args, **kwargs)
        finally:
            self._current = call.caller
        if seen is not None:
            outputs = dict(tensors_in(result, "output"))
            call.dtypes = tuple(tensor.dtype for tensor in seen.outputs.values())
            call.accumulated = difference(seen.outputs, outputs)
            call.own = (
                own if own is None or isinstance(own, Difference) else difference(own, outputs)
            )
            if call.accumulated is None:
                call.note = "no tensors to compare" if outputs else "returns no tensor"
            self._after_call(self._total - len(self._seen), self._total)
        return result

    def left(self) -> list[SubmoduleCall]:
        """The calls under autocast that this run was without."""
        note = "not called in float32"
        return [SubmoduleCall(module, index, note=note) for module, index in self._seen]

    def _own(
        self, call: SubmoduleCall, seen: _Seen, forward: Forward, given: tuple[Any, Any]
    ) -> Difference | Outputs | None:
        """What the module makes of the given inputs as it runs under autocast.

        Returns:
            Its outputs, if it was given the very inputs; else how far they are from float32 on the
            same rounded inputs; None with a note if it cannot be run so.
        """
        dtypes = _dtypes(given)
        if len(dtypes) != len(seen.inputs):
            call.note = "called with other inputs under autocast than in float32"
            return None
        if not seen.state.enabled and dtypes == seen.inputs:
            return Difference()
        region = torch.autocast(
            self._device_type,
            dtype=seen.state.dtype,
            enabled=seen.state.enabled,
            cache_enabled=False,
        )
        try:
            inputs, exact = self._rounded(given, seen.inputs)
            found = self._run_again(call.module, forward, inputs, region)
            if exact:
                return found
            inputs, _ = self._rounded(given, seen.inputs, back=True)
            return difference(found, self._run_again(call.module, forward, inputs, nullcontext()))
        except Exception as error:  # of the user's objects, and of modules run out of their turn
            call.note = f"cannot be run on its own: {gist(error)}"
            return None

    def _rounded(
        self, given: tuple[Any, Any], dtypes: Sequence[torch.dtype], *, back: bool = False
    ) -> tuple[Any, bool]:
        """Copies of inputs, rounded to other dtypes; whether that changes no value.

        Args:
            given: positional and keyword arguments.
            dtypes: one for each tensor in them.
            back: whether to return the rounded values in the dtypes that they are given in.
        """
        wanted = iter(dtypes)
        exact = True

        def change(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal exact
            dtype = next(wanted)
            if dtype == tensor.dtype or not (
                dtype.is_floating_point and tensor.is_floating_point()
            ):
                return tensor
            rounded = tensor.to(dtype)
            if rounded.isinf().any():
                largest = torch.finfo(dtype).max
                within = torch.where(tensor.isinf(), tensor, tensor.clamp(-largest, largest))
                rounded = within.to(dtype)
            exact = exact and bool((rounded == tensor).all())
            return rounded.to(tensor.dtype) if back else rounded

        shared = dict(self._whole)
        results = (tensor for _, tensor in tensors_in(given, "") if not tensor.is_leaf)
        shared.update((id(tensor), tensor.detach().clone()) for tensor in results)
        return map_tensors(copy.deepcopy(given, shared), change, "inputs"), exact

    def _run_again(
        self,
        module: nn.Module,
        forward: Forward,
        inputs: tuple[Any, Any],
        context: AbstractContextManager[object],
    ) -> Outputs:
        args, kwargs = inputs
        self._again = True
        try:
            with untouched([module]), generators_kept(self._device_type), context:
                return _Copies().of(forward(*args, **kwargs))
        finally:
            self._again = False


class _Copies:
    """Copies of tensors that later code may change; one for a tensor that is returned twice."""

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}

    def of(self, result: object) -> Outputs:
        """Copies of the tensors in a result."""
        return {path: self._copy(tensor) for path, tensor in tensors_in(result, "output")}

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_inference():  # which counts no changes
            return tensor.detach().clone()
        known = self._known.get(id(tensor))
        if known is not None and known.tensor() is tensor and known.version == tensor._version:
            copied = known.copied()
            if copied is not None:
                return copied
        copied = tensor.detach().clone()
        self._known[id(tensor)] = _Known(weakref.ref(tensor), tensor._version, weakref.ref(copied))
        return copied


class _Known(NamedTuple):
    """A tensor, how often it had been changed when it was copied, and the copy."""

    tensor: weakref.ref[torch.Tensor]
    version: int
    copied: weakref.ref[torch.Tensor]


def _dtypes(given: object) -> list[torch.dtype]:
    return [tensor.dtype for _, tensor in tensors_in(given, "")]


def _parts(names: Names) -> list[object]:
    """Modules with their parameters and buffers, which copies of inputs share."""
    parts: list[object] = []
    for module in names:
        parts += [module, *module.parameters(recurse=False), *module.buffers(recurse=False)]
    return parts
