"""Submodules kept in float32: as the same block written by hand, in eager runs and in programs."""

from __future__ import annotations

import copy
import inspect
import pickle
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import amp_script
from amp_script.errors import ArgumentError, SubmoduleError, VerificationError
from amp_script.submodules import forward_replaced

HALVES = (torch.bfloat16, torch.float16)


class Norm(nn.Module):
    """Overflows in float16 from values of 256 on."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x.square().mean(-1, keepdim=True).rsqrt()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.norm = Norm()
        self.down = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.norm(1000 * self.up(x)))


class ByHand(nn.Module):
    """What a user writes around a module to keep it in float32."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            result: torch.Tensor = self.inner(x.float())
        return result


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), Block(), Block(), nn.Linear(8, 2)).eval()


def replaced_by_hand(model: nn.Module, *names: str) -> nn.Module:
    model = copy.deepcopy(model)
    for name in names:
        owner, _, last = name.rpartition(".")
        parent = model.get_submodule(owner)
        setattr(parent, last, ByHand(getattr(parent, last)))
    return model


def eager(model: Callable[..., Any], *args: Any, dtype: torch.dtype = torch.bfloat16) -> Any:
    with torch.no_grad(), torch.autocast("cpu", dtype=dtype):
        return model(*args)


def assert_same(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.dtype == want.dtype
    assert torch.equal(got, want)


X = torch.rand(3, 4, generator=torch.Generator().manual_seed(0))

CASES = [
    (("1.norm",), ("1.norm",)),
    (("1",), ("1",)),
    (("1.*",), ("1.up", "1.norm", "1.down")),
    (("*.norm", "3"), ("1.norm", "2.norm", "3")),
    (("1", "1.norm", "1.*"), ("1",)),  # nested matches
    (("[12].[nd]o*",), ("1.norm", "1.down", "2.norm", "2.down")),
]


@pytest.mark.parametrize(("patterns", "names"), CASES)
def test_eager_runs_do_as_the_block_by_hand(
    patterns: tuple[str, ...], names: tuple[str, ...]
) -> None:
    model = net()
    for dtype in HALVES:
        with amp_script.keep_float32(model, *patterns):
            got = eager(model, X, dtype=dtype)
        assert_same(got, eager(replaced_by_hand(model, *names), X, dtype=dtype))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("patterns", "names"), CASES)
def test_programs_do_as_the_block_by_hand(
    patterns: tuple[str, ...], names: tuple[str, ...], dtype: torch.dtype
) -> None:
    model = net()
    frozen = amp_script.trace_and_freeze(
        model, X, dtype=dtype, compute="native", keep_float32=patterns
    )
    assert_same(frozen(X), eager(replaced_by_hand(model, *names), X, dtype=dtype))
    assert frozen.metadata.verification is not None
    assert frozen.metadata.verification.bit_equal
    assert frozen.metadata.keep_float32 == patterns


@pytest.mark.parametrize("pattern", ["", "*"])
def test_the_whole_model(pattern: str) -> None:
    model = net()
    with torch.no_grad():
        want = model(X)
    with amp_script.keep_float32(model, pattern):
        assert_same(eager(model, X.bfloat16()), model(X.bfloat16().float()).detach())
    frozen = amp_script.trace_and_freeze(model, X, compute="native", keep_float32=[pattern])
    assert_same(frozen(X), want)


def test_nothing_is_touched_and_the_block_ends_with_an_exception() -> None:
    model = net()
    before = [dict(vars(module)) for module in model.modules()]
    forwards = {kind: vars(kind).get("forward") for kind in map(type, model.modules())}
    want = eager(model, X)

    def run() -> None:
        with amp_script.keep_float32(model, "*"):
            assert [dict(vars(module)) for module in model.modules()] == before
            assert inspect.signature(model.forward).parameters.keys() == {"input"}
            copied = copy.deepcopy(model)
            assert pickle.loads(pickle.dumps(model))(X).dtype == torch.float32
            assert_same(model(X), copied(X))
        assert_same(eager(copied, X), want)
        with amp_script.keep_float32(model, "1"):
            model(X[:, :2])

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        run()
    assert [dict(vars(module)) for module in model.modules()] == before
    assert {kind: vars(kind).get("forward") for kind in map(type, model.modules())} == forwards
    assert_same(eager(model, X), want)


def test_other_threads_run_as_ever() -> None:
    model = net()
    want, kept = eager(model, X), eager(replaced_by_hand(model, "1"), X)
    inside, checked = threading.Event(), threading.Event()
    found: list[torch.Tensor] = []

    def run() -> None:
        inside.wait(10)
        found.append(eager(model, X))
        found.append(eager(amp_script.script(net()), X))
        with amp_script.keep_float32(model, "3"):
            found.append(eager(model, X))
            checked.set()

    thread = threading.Thread(target=run)
    thread.start()
    with amp_script.keep_float32(model, "1"):
        inside.set()
        checked.wait(10)
        assert_same(eager(model, X), kept)
    thread.join()
    assert_same(found[0], want)
    assert_same(found[1], want)
    assert_same(found[2], eager(replaced_by_hand(model, "3"), X))


def test_blocks_in_blocks_add_up() -> None:
    model = net()
    with amp_script.keep_float32(model, "0"), amp_script.keep_float32(model, "3", "1.up"):
        got = eager(model, X)
    assert_same(got, eager(replaced_by_hand(model, "0", "3", "1.up"), X))
    with amp_script.keep_float32(model, "1.norm"):
        frozen = amp_script.trace_and_freeze(model, X, compute="native", keep_float32=["3"])
    assert_same(frozen(X), eager(replaced_by_hand(model, "1.norm", "3"), X))


class Doubled(nn.Linear):
    """Has a parent whose ``forward`` it calls."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


class Odd(nn.Module):
    """A shared submodule, one called by ``forward``, one with a ``forward`` of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.again = nn.Linear(4, 4)
        self.direct = Doubled(4, 4)
        self.own = nn.Linear(4, 4)
        forward = self.own.forward
        self.own.forward = lambda input: forward(input) + 1  # type: ignore[method-assign]  # as some libraries do

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.again(self.first(x))
        return {"direct": self.direct.forward(y), "own": self.own(y), "y": y}


@pytest.mark.parametrize(
    ("pattern", "in_float32"),
    [
        ("again", {"y"}),
        ("direct", {"direct"}),
        ("own", {"own"}),
        ("[fdo]*", {"direct", "own", "y"}),
    ],
)
def test_however_a_submodule_is_called(pattern: str, in_float32: set[str]) -> None:
    model = Odd().eval()
    frozen = amp_script.trace_and_freeze(model, X, compute="native", keep_float32=[pattern])
    with amp_script.keep_float32(model, pattern):
        want = eager(model, X)
    got = frozen(X)
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert_same(got[name], tensor)
    assert {name for name, t in want.items() if t.dtype == torch.float32} >= in_float32
    assert frozen.metadata.verification is not None
    assert frozen.metadata.verification.bit_equal


def test_a_forward_of_its_own_that_calls_that_of_the_class_has_one_turn() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    vars(model[0])["forward"] = lambda x: nn.Linear.forward(model[0], x)
    turns: list[nn.Module] = []

    def note(module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        turns.append(module)
        return forward(*args, **kwargs)

    with forward_replaced(list(model), note):
        model(X)
    assert turns == [*model]


@dataclass
class Batch:
    x: torch.Tensor
    ids: torch.Tensor


class Nested(nn.Module):
    def forward(
        self,
        pair: tuple[torch.Tensor, list[torch.Tensor]],
        *,
        named: dict[Any, torch.Tensor],
        batch: Batch,
        double: torch.Tensor,
        other: object,
    ) -> list[torch.Tensor]:
        self.other = other
        return [pair[0], *pair[1], *named.values(), batch.x, batch.ids, double]


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.inner = nn.Linear(4, 4), Nested()

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        y = self.layer(x)
        half, other = y.to(torch.float16), object()
        batch = Batch(y, y.argmax(-1))
        found: list[torch.Tensor] = self.inner(
            (y, [half]), named={1: y, "two": half}, batch=batch, double=y.double(), other=other
        )
        assert self.inner.other is other
        assert batch.x.dtype == y.dtype
        return found


def test_only_lower_precision_is_cast_however_deep() -> None:
    model = Holder().eval()
    dtypes = [t.dtype for t in eager(model, X)]
    with amp_script.keep_float32(model, "inner"):
        kept = [t.dtype for t in eager(model, X)]
    assert set(dtypes) == {*HALVES, torch.int64, torch.float64}
    assert kept == [torch.float32 if dtype in HALVES else dtype for dtype in dtypes]


@pytest.mark.parametrize("compiled", [torch.jit.script, amp_script.script])
def test_script_modules(compiled: Any) -> None:
    inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
    model = nn.Sequential(nn.Linear(4, 4), compiled(inner), nn.Linear(4, 4)).eval()
    plain = nn.Sequential(model[0], inner, model[2])
    for patterns in (["1"], ["1", "1.0"], ["*"]):
        frozen = amp_script.trace_and_freeze(model, X, compute="native", keep_float32=patterns)
        with amp_script.keep_float32(plain, *patterns):
            assert_same(frozen(X), eager(plain, X))
    with pytest.raises(SubmoduleError, match=r"'1\.0' is compiled into a ScriptModule") as caught:
        amp_script.trace_and_freeze(model, X, keep_float32=["1.0"])
    assert pickle.loads(pickle.dumps(caught.value)).pattern == "1.0"


class Exporting(nn.Module):
    """Has methods that are compiled by scripting, and that call submodules."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + self.layers[0](x)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    @torch.jit.export
    def embed(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](x)

    def deep(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def test_methods_that_are_compiled() -> None:
    model = Exporting().eval()
    frozen = amp_script.trace_and_freeze(model, X, compute="native", keep_float32=["layers.1"])
    assert_same(frozen.embed(X), eager(model.embed, X))
    with amp_script.keep_float32(model, "layers.1"):
        assert_same(frozen(X), eager(model, X))
    with pytest.raises(SubmoduleError, match=r"'layers\.0': method 'embed' is compiled .*calls"):
        amp_script.trace_and_freeze(model, X, keep_float32=["layers.0"])
    with pytest.raises(SubmoduleError, match=r"'\*1': method 'deep' is compiled .*calls"):
        amp_script.trace_and_freeze(model, X, keep_float32=["*1"], preserved_attrs=["deep"])


def test_regions_of_the_submodule_itself_count() -> None:
    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", dtype=torch.float16):
                return self.layer(x)

    model = nn.Sequential(nn.Linear(4, 4), Inside()).eval()
    frozen = amp_script.trace_and_freeze(model, X, compute="native", keep_float32=["1"])
    assert frozen(X).dtype == torch.float16
    assert_same(frozen(X), eager(replaced_by_hand(model, "1"), X))


def test_an_overflow_is_mended() -> None:
    model = net()
    with torch.no_grad():
        full = model(X)
    broken = eager(model, X, dtype=torch.float16)
    frozen = amp_script.trace_and_freeze(
        model, X, dtype=torch.float16, compute="native", keep_float32=["*.norm"]
    )
    assert float((broken - full).norm() / full.norm()) > 0.1
    assert float((frozen(X) - full).norm() / full.norm()) < 0.01


def test_functions_and_compute_plans() -> None:
    model = net()

    def function(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = model(x).tanh()
        return result

    frozen = amp_script.trace_and_freeze(function, X, compute="upcast", keep_float32=["1"])
    with amp_script.keep_float32(function, "1"):
        want = eager(function, X).float()
    assert float((frozen(X).float() - want).norm() / want.norm()) < 0.01


def test_verify_keeps_what_the_program_kept(tmp_path: Path) -> None:
    model = net()
    frozen = amp_script.trace_and_freeze(model, X, compute="native", keep_float32=["1.norm"])
    amp_script.save(frozen, tmp_path / "net.pt")
    loaded = amp_script.load(tmp_path / "net.pt", compute="native")
    assert loaded.metadata.keep_float32 == ("1.norm",)
    assert amp_script.verify(loaded, model, X, exact=True).bit_equal
    by_hand = replaced_by_hand(model, "1.norm")
    assert amp_script.verify(loaded, by_hand, X, exact=True).bit_equal
    with pytest.raises(SubmoduleError, match="matches no submodule"):
        amp_script.verify(loaded, nn.Linear(4, 2).eval(), X)
    plain = amp_script.trace_and_freeze(model, X, compute="native")
    with amp_script.keep_float32(model, "1.norm"), pytest.raises(VerificationError):
        amp_script.verify(plain, model, X, exact=True)


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (
            ["1.norms"],
            r"'1.norms': it matches no submodule; there are '1.norm', '2.norm'.*, \.\.\.",
        ),
        (["1", "nowhere"], "'nowhere': it matches no submodule; there are '0', '1', "),
        (["list"], "'list': the model calls nothing that it matches .ModuleList."),
        (["list.0"], "'list.0': the model calls nothing that it matches .Linear."),
    ],
)
def test_a_pattern_that_keeps_nothing_is_refused(patterns: list[str], message: str) -> None:
    model = net()
    model.list = nn.ModuleList([nn.Linear(2, 2)])  # type: ignore[assignment]  # not in the sequence
    vars(model)["forward"] = lambda x: model[3](model[2](model[1](model[0](x))))
    with pytest.raises(SubmoduleError, match=message):
        amp_script.trace_and_freeze(model.eval(), X, keep_float32=patterns)


def test_a_pattern_that_kept_nothing_is_warned_of() -> None:
    model = nn.MultiheadAttention(4, 2).eval()
    with (
        pytest.warns(UserWarning, match="'out_proj': the model calls nothing that it matches") as w,
        amp_script.keep_float32(model, "out_proj", ""),
    ):
        eager(model, X, X, X)
    assert len(w) == 1
    assert w[0].filename == __file__


def test_a_recomputing_backward() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = checkpoint(self.block, x, use_reentrant=False)
            return found

    model = nn.Sequential(nn.Linear(4, 8), Checkpointed(), nn.Linear(8, 2))
    plain = nn.Sequential(model[0], replaced_by_hand(model[1].block, "norm"), model[2])
    gradients = []
    for net, patterns in ((model, ["1.block.norm"]), (plain, [])):
        with amp_script.keep_float32(net, *patterns):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = net(X).float().sum()
            loss.backward()
        gradients.append([p.grad for p in net.parameters()])
        net.zero_grad()
    for one, other in zip(*gradients, strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(
        SubmoduleError, match="'x': it matches no submodule, and the model has none"
    ):
        amp_script.trace_and_freeze(nn.Linear(4, 2).eval(), X, keep_float32=["x"])
    with pytest.raises(ArgumentError, match=r"keep_float32 is '1': expected a list, \['1'\]"):
        amp_script.trace_and_freeze(net(), X, keep_float32="1")
    with pytest.raises(ArgumentError, match="keep_float32 is a list with 1 in it"):
        amp_script.trace_and_freeze(net(), X, keep_float32=[1])  # type: ignore[list-item]


def test_names_with_characters_of_patterns_are_found_as_they_are() -> None:
    model = nn.Sequential()
    model.add_module("a[0]*", nn.Linear(4, 4))
    model.add_module("a0", nn.Linear(4, 4))
    model.eval()
    with amp_script.keep_float32(model, "a[0]*"):
        assert eager(model, X).dtype == torch.float32  # as a pattern it matches the other one too
    with amp_script.keep_float32(model, "a[[]0]*"):
        assert eager(model, X).dtype == torch.bfloat16
