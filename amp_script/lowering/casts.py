"""Casts: what a policy does to one operator, written into the graph.

The rules themselves are in :mod:`amp_script.lowering.helpers`; here each policy says which of them
to call on which argument.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from .. import policy
from ..jit_state import in_a_new_thread
from ..policy import Policy, Rule
from ._graph import (
    Editor,
    Value,
    dtype_code,
    is_none,
    is_optional_tensor,
    is_tensor,
    is_tensor_list,
    parsed_schema,
    source_of,
)
from .helpers import helper
from .known import KnownCasts, may_be_leaf
from .regions import Site
from .state import DeviceRegion

_FLOAT32 = dtype_code(torch.float32)


def insert_casts(editor: Editor, sites: Sequence[Site]) -> None:
    """Write into the graph what autocast does to each operator.

    Args:
        editor: of the graph that holds the operators.
        sites: the operators in the order in which they run, with the state each runs in.
    """
    known = KnownCasts(editor.graph, sites)
    for site in sites:
        if site.node.kind().startswith("prim::"):
            continue
        schema = site.node.schema()
        for device_type, region in site.state.active():
            rule = rule_of(device_type, schema)
            if rule is not None:
                _WRITERS[rule.policy](_Operator(editor, known, site, device_type, region), rule)


@cache
def rule_of(device_type: str, schema: str) -> Rule | None:
    """What autocast on the device type does to the operator with the schema, given as text."""
    parsed = parsed_schema(schema)
    if parsed is None:
        return None
    return policy.find(device_type, parsed.name, parsed.overload_name)


@cache
def _last_argument_is_first() -> bool:
    """Whether eager autocast casts the last argument of an operator first.

    The order is that in which the compiler that built torch evaluates arguments. Gradients tell:
    autograd adds up those of one tensor in the order in which its casts were made.
    """
    return in_a_new_thread(_casts_last_argument_first)


def _casts_last_argument_first() -> bool:
    x = torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.float16):
        product: Any = torch.mm(x, x).grad_fn
    (first, _), (second, _) = product.next_functions
    return bool(first._sequence_nr() > second._sequence_nr())


class _Operator:
    """One operator in one device type's region, and the pieces that policies are written with."""

    def __init__(
        self,
        editor: Editor,
        known: KnownCasts,
        site: Site,
        device_type: str,
        region: DeviceRegion,
    ) -> None:
        self.editor = editor
        self.node = site.node
        self.region = region
        self._known = known
        self._site = site
        self._device_type = device_type

    @property
    def target(self) -> Value:
        """The region's target as a value."""
        return self.target_value(self.region.target)

    def target_value(self, target: int | Value) -> Value:
        """A target as a value."""
        if isinstance(target, int):
            return self.editor.shared_constant(("target", target), target)
        return target

    def call(self, name: str, *inputs: Value) -> Value:
        """Call a helper before the operator, for the region's device type."""
        return self.editor.call_before(self.node, helper(name, self._device_type), *inputs)

    def instead(self, code: int) -> int | Value:
        """Another dtype as the target, where the region is on."""
        if self.region.is_on:
            return code
        dtype = self.target_value(code)
        return self.editor.call_before(self.node, helper("instead"), dtype, self.target)

    def cast_all(self, target: int | Value, *, cached: bool = False) -> None:
        """Cast every argument that is, may be or holds tensors.

        Args:
            target: what to cast to.
            cached: whether eager autocast may take the casts from its cache.
        """
        cached = cached and self._site.state.cache_enabled is not False
        arguments = list(enumerate(self.node.inputs()))
        for index, value in reversed(arguments) if _last_argument_is_first() else arguments:
            if is_tensor(value):
                self.node.replaceInput(index, self._cast(value, target, cached))
            elif is_optional_tensor(value):
                made = self._call_cast("cast_optional", (value,), target, cached)
                self.node.replaceInput(index, made)
            elif is_tensor_list(value):
                self.node.replaceInput(index, self._cast_list(value, target, cached))

    def _cast(self, value: Value, target: int | Value, cached: bool) -> Value:
        known, path = self._known, self._site.path
        if known.is_right(value, target):
            return value
        cached = cached and may_be_leaf(value)
        before = known.made(value, target, path)
        if before is not None:
            made = self._call_cast("cast_again", (value, before), target, cached)
        else:
            recorded = cached and self._is_used_once(value)
            made = self._call_cast("cast", (value,), target, cached, recorded=recorded)
            known.add(value, target, path, made)
        if not cached:
            # The cache may hold a cast of a leaf to the dtype of another region.
            known.add_right(made, target)
        return made

    def _cast_list(self, value: Value, target: int | Value, cached: bool) -> Value:
        made_by = value.node()
        if made_by.kind() != "prim::ListConstruct" or len(value.uses()) != 1:
            return self._call_cast("cast_list", (value,), target, cached)
        parts = list(made_by.inputs())
        casts = [self._cast(part, target, cached) for part in parts]
        if casts == parts:
            return value
        return self.editor.list_before(self.node, torch._C.TensorType.get(), casts)

    def _call_cast(
        self,
        name: str,
        values: Sequence[Value],
        target: int | Value,
        cached: bool,
        *,
        recorded: bool = False,
    ) -> Value:
        if not cached:
            return self.call(name, *values, self.target_value(target))
        state = self._site.state
        cache = state.cache
        assert cache is not None
        if isinstance(state.cache_enabled, Value):
            choose = helper("cache_if")
            cache = self.editor.call_before(self.node, choose, cache, state.cache_enabled)
        suffix = "recorded" if recorded else "cached"
        return self.call(f"{name}_{suffix}", *values, self.target_value(target), cache)

    def _is_used_once(self, value: Value) -> bool:
        """Whether one operator takes the value, once a call of the program as far as is known."""
        return (
            not self._site.state.keeps_casts
            and not self._site.in_loop
            and value.node().kind() == "prim::GetAttr"
            and len(value.uses()) == 1
        )

    def tensors_are(self, target: int | Value) -> bool:
        """Whether a cast to the target surely changes no argument."""
        right = self._known.is_right
        for value in self.node.inputs():
            if is_tensor(value):
                if not right(value, target):
                    return False
            elif is_tensor_list(value):
                made_by = value.node()
                if made_by.kind() != "prim::ListConstruct" or len(value.uses()) != 1:
                    return False
                if not all(right(part, target) for part in made_by.inputs()):
                    return False
            elif is_optional_tensor(value):
                return False
        return True


def _lower(operator: _Operator, rule: Rule) -> None:
    operator.cast_all(operator.region.target, cached=True)


def _float32(operator: _Operator, rule: Rule) -> None:
    operator.cast_all(operator.instead(_FLOAT32))


def _cast_inputs(operator: _Operator, rule: Rule) -> None:
    assert rule.dtype is not None
    operator.cast_all(operator.instead(dtype_code(rule.dtype)))


def _promote(operator: _Operator, rule: Rule) -> None:
    if operator.tensors_are(operator.region.target):
        return
    widest = target = operator.target
    for value in operator.node.inputs():
        if is_tensor(value):
            widest = operator.call("widest", value, widest, target)
        elif is_tensor_list(value):
            widest = operator.call("widest_of_list", value, widest, target)
    operator.cast_all(widest)


def _optional_dtype(operator: _Operator, rule: Rule) -> None:
    node = operator.node
    schema = parsed_schema(node.schema())
    assert schema is not None
    for index in policy.optional_dtype_arguments(schema):
        given = node.inputsAt(index)
        if is_none(given) or given.type().kind() == "OptionalType":
            dtype = operator.call("float32_unless_given", node.inputsAt(0), given, operator.target)
            node.replaceInput(index, dtype)


def _appended_dtype(operator: _Operator, rule: Rule) -> None:
    node = operator.node
    dtype = operator.call("float32_or_own", node.inputsAt(0), operator.target)
    replacement = operator.editor.node_before(node, node.kind(), *node.inputs(), dtype)
    replacement.copyMetadata(node)
    replacement.output().setType(node.output().type())
    # The node itself stays for the passes that follow, which drop what nothing uses.
    node.output().replaceAllUsesWith(replacement.output())


def _refuse(operator: _Operator, rule: Rule) -> None:
    message = f"{rule.message}\n  at {source_of(operator.node)}"
    text = operator.editor.constant_before(operator.node, message)
    operator.editor.call_before(operator.node, helper("refuse"), text, operator.target)


_WRITERS: dict[Policy, Callable[[_Operator, Rule], None]] = {
    Policy.LOWER: _lower,
    Policy.FLOAT32: _float32,
    Policy.CAST_INPUTS: _cast_inputs,
    Policy.PROMOTE: _promote,
    Policy.FLOAT32_OPTIONAL_DTYPE: _optional_dtype,
    Policy.FLOAT32_APPENDED_DTYPE: _appended_dtype,
    Policy.REFUSED: _refuse,
}
