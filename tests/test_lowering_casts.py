"""Casts in lowered graphs: which values, to which dtypes, and how few."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  # torch's own custom
from agreement import assert_agrees, assert_same, saved_and_loaded
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from versions import with_autocast

import amp_script
from amp_script import policy
from amp_script.jit_state import AmbientState, DeviceState
from amp_script.lowering import lower_graph

DTYPES = [
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.complex64,
    torch.int64,
    torch.bool,
]


def product(x: torch.Tensor, y: torch.Tensor):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return torch.mm(x, y)


def lower_then_upper(x: torch.Tensor, y: torch.Tensor):
    with torch.autocast("cpu", dtype=torch.float16):
        return F.mse_loss(torch.mm(x, y), torch.mm(y, x)), torch.prod(x)


def promoted(x: torch.Tensor, y: torch.Tensor):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return torch.cat([x, y]), torch.stack([y, x])


def fallen_through(x: torch.Tensor, y: torch.Tensor):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return x + y, torch.mul(y, 2.5), x.t()


@pytest.mark.parametrize("program", [product, lower_then_upper, promoted, fallen_through])
@pytest.mark.parametrize("second", DTYPES, ids=str)
@pytest.mark.parametrize("first", DTYPES, ids=str)
def test_every_mix_of_dtypes(
    program: Callable[..., Any], first: torch.dtype, second: torch.dtype
) -> None:
    x, y = (torch.arange(9).reshape(3, 3).to(dtype) for dtype in (first, second))
    assert_agrees(_scripted(program), program, x, y, ambient=(None, torch.float16))


def _scripted(program: Callable[..., Any], made: dict[Any, Any] = {}) -> Any:  # noqa: B006  # kept
    if program not in made:
        made[program] = amp_script.script(program)
    return made[program]


def optional_bias(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return F.linear(x, w, b), F.conv1d(x[None], w[:, :, None], b)


optional_bias.__annotations__["b"] = torch.Tensor | None


@pytest.mark.parametrize("bias", [None, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_optional_arguments(bias: torch.dtype | None) -> None:
    x, w = torch.rand(4, 4), torch.rand(4, 4)
    b = None if bias is None else torch.rand(4).to(bias)
    assert_agrees(_scripted(optional_bias), optional_bias, x, w, b)


def lists(xs: list[torch.Tensor], y: torch.Tensor):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        a = torch.cat(xs)
        xs.append(torch.mm(y, y))
        b = torch.stack(xs)
        c = torch.cat([y, torch.mm(y, y)])
        d = torch.cat([torch.mm(y, y), torch.mm(y, y).relu()])
    return a, b, c, d


lists.__annotations__["xs"] = list[torch.Tensor]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_lists_of_tensors(dtype: torch.dtype) -> None:
    class Module(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor):
            return lists([x, y], y)

    module = Module()
    x, y = torch.rand(3, 3).to(dtype), torch.rand(3, 3)
    assert_agrees(amp_script.script(module), module, x, y)


def test_a_mix_of_half_types_is_refused_as_in_eager_mode() -> None:
    x, y = torch.rand(2, 2).half(), torch.rand(2, 2)
    with pytest.raises(RuntimeError, match="Unexpected floating ScalarType") as eager:
        promoted(x, y)
    with pytest.raises(torch.jit.Error) as scripted:
        _scripted(promoted)(x, y)
    assert str(eager.value).splitlines()[0] in str(scripted.value)
    assert_agrees(_scripted(promoted), promoted, y, x, ambient=(None,))


def onednn_layout(x: torch.Tensor, y: torch.Tensor):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return F.linear(x, y)


def test_tensors_in_onednn_layout_are_on_the_cpu() -> None:
    x, y = torch.rand(4, 4).to_mkldnn(), torch.rand(4, 4).to_mkldnn()
    want = onednn_layout(x, y)
    got = amp_script.script(onednn_layout)(x, y)
    assert_same(got.to_dense(), want.to_dense())


# Other devices ------------------------------------------------------------------------------------


def many_operators(x: torch.Tensor, y: torch.Tensor):
    a = torch.mm(x, y)
    b = torch.softmax(x, 0)
    c = F.layer_norm(x, [4])
    d = torch.cat([a, a])
    e = torch.norm(x, 2.0)
    f = F.mse_loss(x, y)
    g = torch.cumsum(x, 0)
    h = torch.exp(x)
    return a, b, c, d, e, f, g, h, torch.sum(x), torch.prod(a)


def _eager(x: torch.Tensor, y: torch.Tensor) -> Any:
    try:
        return many_operators(x, y)
    except RuntimeError as error:
        if "not linked" not in str(error):
            raise
        pytest.skip(str(error))


@pytest.mark.parametrize("inputs", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("device", with_autocast("cuda", "xpu", "mps", "mtia"))
def test_dtypes_on_other_devices(device: str, inputs: torch.dtype) -> None:
    function = torch.jit.script(many_operators)
    for dtype in (torch.bfloat16, torch.float16):
        state = AmbientState.current().with_device(device, DeviceState(True, dtype))
        graph = function.graph.copy()
        lower_graph(graph, state)
        lowered = torch._C.CompilationUnit().create_function("lowered", graph)
        with FakeTensorMode():
            x, y = (torch.empty(4, 4, dtype=inputs, device=device) for _ in range(2))
            with torch.autocast(device, enabled=False):
                torch.set_autocast_enabled(device, True)
                torch.set_autocast_dtype(device, dtype)
                want = _eager(x, y)
            got = lowered(x, y)
        assert [each.dtype for each in got] == [each.dtype for each in want]


def test_a_region_on_one_device_leaves_the_tensors_of_another_alone() -> None:
    def program(x: torch.Tensor):
        with torch.autocast("xpu", dtype=torch.bfloat16):
            return torch.mm(x, x)

    assert_agrees(amp_script.script(program), program, torch.rand(3, 3))


def refused(x: torch.Tensor):
    return F.binary_cross_entropy(x, x)


def test_what_eager_mode_refuses_is_refused_when_it_runs() -> None:
    assert policy.lookup("cuda", "aten::binary_cross_entropy") is policy.Policy.REFUSED
    state = AmbientState.current().with_device("cuda", DeviceState(True, torch.float16))
    graph = torch.jit.script(refused).graph.copy()
    lower_graph(graph, state)
    lowered = torch._C.CompilationUnit().create_function("lowered", graph)
    with pytest.raises(torch.jit.Error, match="unsafe to autocast"):
        lowered(torch.rand(3))


# How many casts -----------------------------------------------------------------------------------


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.query, self.key, self.value = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = self.norm(x)
            q, k, v = self.query(h), self.key(h), self.value(h)
            a = torch.matmul(torch.softmax(torch.matmul(q, k.transpose(-1, -2)), -1), v)
            return self.second(F.gelu(self.first(a)))


def _casts_run(scripted: Any, x: torch.Tensor) -> int:
    """How often a dtype is really changed in one call."""
    with torch.no_grad(), torch.profiler.profile() as profile:
        scripted(x)
    return sum(event.count for event in profile.key_averages() if event.key == "aten::_to_copy")


def test_a_value_that_feeds_several_operators_is_cast_once_without_gradients() -> None:
    module = Encoder()
    scripted = amp_script.script(module)
    x = torch.rand(2, 3, 8)
    assert_agrees(scripted, module, x)
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    # The result of the norm, and a weight and a bias for each of five layers.
    assert _casts_run(scripted, x) == 1 + 10
    for parameter in module.parameters():
        parameter.requires_grad_(True)
    assert _casts_run(scripted, x) == 1 + 10


def test_no_cast_is_written_where_the_dtype_is_right() -> None:
    calls = [
        node
        for node in amp_script.script(Encoder()).graph.findAllNodes("prim::CallFunction")
        if node.inputsAt(0).node().s("name").startswith("cast")
    ]
    # The result of the norm three times, and ten parameters; nothing between the layers.
    assert len(calls) == 3 + 10


def test_one_weight_used_in_a_loop_is_cast_once() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                for _ in range(5):
                    x = torch.tanh(self.cell(x))
            return x

    module = Recurrent()
    scripted = amp_script.script(module)
    assert_agrees(scripted, module, torch.rand(2, 8))
    assert _casts_run(scripted, torch.rand(2, 8)) == 3


def written_between(x: torch.Tensor):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = x * 2
        a = torch.mm(y, y)
        y.add_(1)
        b = torch.mm(y, y)
        y[0] = 7.0
        return a, b, torch.mm(y, y)


def test_a_cast_is_not_used_again_after_the_value_was_written_to() -> None:
    assert_agrees(amp_script.script(written_between), written_between, torch.rand(4, 4))


def addmm_everywhere(b: torch.Tensor, x: torch.Tensor):
    y = torch.addmm(b, x, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return y, torch.addmm(b, x, x), torch.addmm(b, x, x, beta=0.5), b.addmm(x, x)


def test_the_executor_does_not_split_addmm() -> None:
    torch.manual_seed(0)
    b, x = torch.randn(16, 16), torch.randn(16, 16)
    scripted = amp_script.script(addmm_everywhere)
    assert_agrees(scripted, addmm_everywhere, b, x)

    class Module(nn.Module):
        def forward(self, b: torch.Tensor, x: torch.Tensor):
            return addmm_everywhere(b, x)

    loaded = saved_and_loaded(amp_script.script(Module()))
    assert_agrees(loaded, addmm_everywhere, b, x, ambient=(None,))
