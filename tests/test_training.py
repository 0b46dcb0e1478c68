"""Gradients of scripted programs, against eager autocast's, to the bit."""

from __future__ import annotations

import copy
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, List, Optional  # noqa: UP035  # TorchScript reads these

import pytest
import torch
from agreement import ambient_autocast, assert_same
from torch import nn
from torch.utils.checkpoint import checkpoint
from versions import keeps_casts_made_without_gradients

import amp_script
from amp_script.errors import LoweringError
from amp_script.lowering import casts, helpers

STEPS = 4
AMBIENT = (None, torch.bfloat16)
EXAMPLE = Path(__file__).parents[1] / "examples" / "train_scripted.py"


class Network(nn.Module):
    """Sigmoid and tanh, whose derivatives TorchScript changes; weights used once and often."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.randn(8, 8) / 4)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = self.norm(torch.tanh(self.first(x)).float())
            h = torch.sigmoid(self.second(h)) + self.second(h) + self.first(h)
            for _ in range(2):
                h = torch.mm(h, self.weight) + h
        with torch.autocast("cpu", enabled=False):
            h = torch.mm(h.float(), self.weight)
        return torch.mm(self.first(h.to(self.weight.dtype)), self.weight).float().sum()


class OneWeight(nn.Module):
    """A weight that reaches operators by several ways: itself, a list, an argument, its alias."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8) / 4)
        self.alias = self.weight

    def forward(self, x: torch.Tensor):
        ways = [self.weight, self.alias, x]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = torch.mm(x, self.weight)
            for _ in range(2):
                for way in ways:
                    y = torch.mm(y, way)
            y = _product(y, self.alias) + torch.mm(x, x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = y + torch.mm(x, self.weight)
        return y.float().sum()


def _product(x: torch.Tensor, y: torch.Tensor):
    return torch.mm(x, y)


class NoCache(nn.Module):
    """Regions that do not cache casts, known so and only while running."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8) / 4)

    def forward(self, x: torch.Tensor, cached: bool = False):
        with amp_script.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
            y = torch.mm(torch.mm(x, self.weight), self.weight)
            with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=True):
                y = torch.mm(torch.mm(y, self.weight), self.weight)
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cached):
            y = torch.mm(torch.mm(y, self.weight), self.weight)
        return y.float().sum()


class Without(nn.Module):
    """Blocks without gradients before and between uses of a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8) / 4)

    def forward(self, x: torch.Tensor):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with torch.no_grad():
                a = torch.mm(x, self.weight)
            b = torch.mm(x, self.weight)
            with torch.no_grad():
                c = torch.mm(b, self.weight)
            return (torch.mm(b + c, self.weight) + a).float().sum()


class Forked(nn.Module):
    """A weight used in a fork and outside."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            future = torch.jit.fork(self.layer, x)
            y = self.layer(x) + torch.jit.wait(future)
        return y.float().sum()


class Forces(nn.Module):
    """Gradients of inputs, taken inside forward."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 1)
        self.energy_in_region = where != "gradient alone"
        self.gradient_in_region = where != "energy alone"

    def forward(self, x: torch.Tensor):
        x = x.detach().requires_grad_(True)
        ones: List[Optional[torch.Tensor]] = [torch.ones(())]  # noqa: UP006, UP045
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.energy_in_region):
            energy = self.second(torch.tanh(self.first(x))).float().sum()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.gradient_in_region):
            force = torch.autograd.grad([energy], [x], grad_outputs=ones, create_graph=True)[0]
        assert force is not None
        return energy + force.pow(2).sum()


MODULES: dict[str, Callable[[], nn.Module]] = {
    "network": Network,
    "one weight": OneWeight,
    "no cache": NoCache,
    "without": Without,
    "forked": Forked,
    "energy": lambda: Forces("energy alone"),
    "gradient": lambda: Forces("gradient alone"),
    "energy and gradient": lambda: Forces("both"),
}

Train = Callable[[nn.Module, torch.Tensor, "torch.dtype | None"], list[torch.Tensor]]


def plainly(module: nn.Module, x: torch.Tensor, ambient: torch.dtype | None) -> list[torch.Tensor]:
    """Steps of gradient descent."""
    seen = []
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    for _ in range(STEPS):
        optimizer.zero_grad()
        x = x.detach().requires_grad_()
        with ambient_autocast(ambient):
            loss = module(x)
        loss.backward()
        seen += [loss.detach(), *_gradients(module)]
        if x.grad is not None:
            seen.append(x.grad)
        optimizer.step()
    return seen


def several_calls_in_one_region(
    module: nn.Module, x: torch.Tensor, ambient: torch.dtype | None
) -> list[torch.Tensor]:
    """The caller's region spans calls, and weights are cast once for all of them."""
    seen = []
    for _ in range(STEPS):
        module.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=ambient is not None):
            with torch.set_grad_enabled("Forces" in str(module)):
                module(x)
            loss = module(x) + module(2 * x)
            with torch.autocast("cpu", enabled=False):
                loss = loss + module(3 * x)
        loss.backward()
        seen += [loss.detach(), *_gradients(module)]
    return seen


def with_a_grad_scaler(
    module: nn.Module, x: torch.Tensor, ambient: torch.dtype | None
) -> list[torch.Tensor]:
    """Loss scaling."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    for _ in range(STEPS):
        optimizer.zero_grad()
        with ambient_autocast(ambient):
            loss = module(x)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return [parameter.detach() for parameter in module.parameters()]


def checkpointed(
    module: nn.Module, x: torch.Tensor, ambient: torch.dtype | None
) -> list[torch.Tensor]:
    """Gradient checkpointing around the module, both kinds."""
    seen = []
    # Reentrant checkpointing calls the module without gradients first.
    kinds = (False, False) if "Forces" in str(module) else (False, True)
    for reentrant in kinds * (STEPS // 2):
        module.zero_grad()
        x = x.detach().requires_grad_()
        with ambient_autocast(ambient):
            loss = checkpoint(module, x, use_reentrant=reentrant)
        loss.backward()
        seen += [loss.detach(), *_gradients(module)]
    return seen


def _gradients(module: nn.Module) -> Iterator[torch.Tensor]:
    return (p.grad.clone() for p in module.parameters() if p.grad is not None)


@pytest.mark.parametrize("ambient", AMBIENT, ids=str)
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize(
    "train", [plainly, several_calls_in_one_region, with_a_grad_scaler, checkpointed]
)
def test_gradients_are_eager_autocasts(
    train: Train, name: str, ambient: torch.dtype | None
) -> None:
    after_calls_without = train is several_calls_in_one_region and name in ("one weight", "forked")
    if (name == "without" or after_calls_without) and keeps_casts_made_without_gradients():
        pytest.skip("eager autocast of this torch loses all gradients of this module")
    torch.manual_seed(0)
    module = MODULES[name]()
    scripted = amp_script.script(copy.deepcopy(module))
    x = torch.randn(8, 8)
    assert_same(train(scripted, x, ambient), train(module, x, ambient))


@pytest.mark.parametrize("ambient", AMBIENT, ids=str)
def test_double_backward(ambient: torch.dtype | None) -> None:
    def twice(module: nn.Module) -> list[torch.Tensor]:
        seen = []
        for _ in range(STEPS):
            x = torch.linspace(-1, 1, 64).reshape(8, 8).requires_grad_()
            with ambient_autocast(ambient):
                loss = module(x)
            (first,) = torch.autograd.grad(loss, x, create_graph=True)
            second = torch.autograd.grad(
                first.pow(2).sum(), list(module.parameters()), allow_unused=True
            )
            seen += [first.detach(), *(each for each in second if each is not None)]
        return seen

    torch.manual_seed(0)
    module = Network()
    assert_same(twice(amp_script.script(copy.deepcopy(module))), twice(module))


def test_frozen_weights_and_inputs_alone() -> None:
    torch.manual_seed(0)
    module = Network()
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    scripted = amp_script.script(copy.deepcopy(module))
    seen = []
    for each in (scripted, module):
        x = torch.linspace(-1, 1, 64).reshape(8, 8).requires_grad_()
        each(x).backward()
        seen.append(x.grad)
    assert_same(*seen)


def test_gradients_inside_a_region_keep_a_program_from_being_saved(tmp_path: Path) -> None:
    scripted = amp_script.script(Forces("both"))
    with pytest.raises(
        amp_script.errors.LoweringError, match="take the gradients after the region"
    ):
        scripted.save(tmp_path / "forces.pt")


def test_anomaly_detection_and_hooks_on_saved_tensors() -> None:
    torch.manual_seed(0)
    module = Network()
    scripted = amp_script.script(copy.deepcopy(module))
    gradients = []
    for each in (scripted, module):
        x = torch.linspace(-1, 1, 64).reshape(8, 8).requires_grad_()
        with torch.autograd.graph.save_on_cpu(), torch.autocast("cpu", dtype=torch.bfloat16):
            each(x).backward()
        gradients.append([x.grad, *_gradients(each)])
    assert_same(*gradients)


def _distributed(rank: int, meeting: str, scripted: bool) -> list[torch.Tensor]:
    torch.distributed.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=2)
    try:
        seen = _train_parallel(rank, scripted)
        # A process that leaves first keeps the other one waiting.
        torch.distributed.barrier()
        return seen
    finally:
        torch.distributed.destroy_process_group()


def _train_parallel(rank: int, scripted: bool) -> list[torch.Tensor]:
    """Train in a function of its own, so that the process group outlives the parallel module.

    Where that module is the last to hold the group, Python frees it and waits, holding its lock,
    for the group's threads, which may be waiting for the lock: now and then for ever.
    """
    torch.manual_seed(0)
    module = Network()
    parallel = nn.parallel.DistributedDataParallel(
        amp_script.script(module) if scripted else module
    )
    optimizer = torch.optim.SGD(parallel.parameters(), lr=1e-3)
    seen = []
    for step in range(STEPS):
        optimizer.zero_grad()
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(2 * step + rank))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = parallel(x)
        loss.backward()
        seen += [loss.detach(), *_gradients(module)]
        optimizer.step()
    return seen


_WORKER = """
import sys, torch
sys.path.insert(0, {directory!r})
from test_training import _distributed
torch.save([_distributed({rank}, meeting, scripted) for meeting, scripted in {runs!r}], {file!r})
"""


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed")
def test_two_processes_with_ddp(tmp_path: Path) -> None:
    runs = [(str(tmp_path / kind), kind == "scripted") for kind in ("scripted", "eager")]
    files = [tmp_path / f"rank{rank}.pt" for rank in range(2)]
    workers = [
        subprocess.Popen(
            [
                sys.executable,
                "-W",
                "ignore",
                "-c",
                _WORKER.format(
                    directory=str(Path(__file__).parent), rank=rank, runs=runs, file=str(file)
                ),
            ]
        )
        for rank, file in enumerate(files)
    ]
    try:
        assert [worker.wait(timeout=120) for worker in workers] == [0, 0]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    for file in files:
        scripted, eager = torch.load(file)
        assert_same(scripted, eager)


def test_the_training_example_runs() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--steps", "4"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "equal eager autocast's to the bit" in done.stdout


class Double(torch.autograd.Function):
    """A function with a forward and backward that are told about autocast."""

    @staticmethod
    @amp_script.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    @amp_script.custom_bwd(device_type="cpu")
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, w = ctx.saved_tensors
        return gradient @ w.t(), x.t() @ gradient


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.randn(8, 8) / 4)

    def forward(self, x: torch.Tensor):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = Double.apply(self.layer(x), self.weight)
            return torch.mm(y, self.weight).float().sum()


@pytest.mark.parametrize("ambient", AMBIENT, ids=str)
def test_custom_autograd_functions(ambient: torch.dtype | None) -> None:
    torch.manual_seed(0)
    module = Custom()
    scripted = amp_script.script(copy.deepcopy(module))
    x = torch.randn(8, 8)
    assert_same(plainly(scripted, x, ambient), plainly(module, x, ambient))


def test_compiling_leaves_custom_functions_as_they_were() -> None:
    before = dict(vars(torch.autograd.Function))
    amp_script.script(Custom())
    with pytest.raises(RuntimeError):
        amp_script.script(Uncompilable())
    assert dict(vars(torch.autograd.Function)) == before


class Uncompilable(nn.Module):
    def forward(self, x: torch.Tensor):
        return x.no_such_method()


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        with torch.autocast("cpu", dtype=torch.float16):
            z = self.second(y)
        return torch.tanh(z).float() + y


TRANSFORMS: dict[str, Callable[[Callable[..., Any]], Any]] = {
    "grad": lambda module: torch.func.grad(lambda x: module(x).sum())(X),
    "hessian-free": lambda module: torch.func.grad(
        lambda x: torch.func.grad(lambda y: module(y).square().sum())(x).sum()
    )(X),
    "jacrev": lambda module: torch.func.jacrev(module)(X[:2]),
    "vjp": lambda module: torch.func.vjp(module, X)[1](torch.ones_like(X)),
    "jvp": lambda module: torch.func.jvp(module, (X,), (torch.ones_like(X),)),
}
X = torch.linspace(-1, 1, 20).reshape(5, 4)


@pytest.mark.parametrize("ambient", AMBIENT)
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_transforms_of_torch_func(
    transform: Callable[[Callable[..., Any]], Any], ambient: torch.dtype | None
) -> None:
    torch.manual_seed(0)
    module = Mixed()
    scripted = amp_script.script(module)
    for _ in range(3):
        with ambient_autocast(ambient):
            want = transform(module)
        with ambient_autocast(ambient):
            got = transform(scripted)
        assert_same(got, want)
    # torch.func's own ban on hooks on saved tensors is in force again.
    with pytest.raises(RuntimeError, match="saved tensor hooks"):
        torch.func.grad(lambda x: _with_hooks(scripted, x))(X)


def _with_hooks(module: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = module(x)
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved):
        return y.sum()


def test_vmap_of_casts_is_refused() -> None:
    plain, mixed = amp_script.script(nn.Linear(4, 4)), amp_script.script(Mixed())
    assert_same(torch.func.vmap(plain)(X), torch.func.vmap(nn.Linear.forward, (None, 0))(plain, X))
    with ambient_autocast(torch.bfloat16), pytest.raises(LoweringError, match=r"torch\.func\.vmap"):
        torch.func.vmap(plain)(X)
    with pytest.raises(LoweringError, match=r"torch\.func\.vmap of .*Mixed\.forward"):
        torch.func.vmap(torch.func.grad(lambda x: mixed(x).sum()))(X)


@contextmanager
def _float64_by_default() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


FIRST_CALLERS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "without gradients": torch.no_grad,
    "in inference mode": torch.inference_mode,
    "with a default device": lambda: torch.device("meta"),
    "with a default dtype": _float64_by_default,
}


@pytest.mark.parametrize("first", FIRST_CALLERS.values(), ids=FIRST_CALLERS)
def test_what_is_remembered_does_not_depend_on_the_first_caller(
    first: Callable[[], AbstractContextManager[Any]],
) -> None:
    questions = (casts._last_argument_is_first, helpers.cached_casts_are_differentiable)
    answers = [ask() for ask in questions]
    for ask in questions:
        ask.cache_clear()
    module = nn.Linear(4, 4)
    scripted = amp_script.script(module)
    found: list[Any] = []

    def train() -> None:
        """In a thread that has called no scripted program yet."""
        with first():
            found.append([ask() for ask in questions])
            with torch.autocast("cpu", dtype=torch.bfloat16):
                scripted(X)
        for _ in range(STEPS):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                found.append((scripted(X).detach(), module(X).detach()))
            with torch.no_grad():
                module.weight.add_(1)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert found[0] == answers
    assert len(found) == 1 + STEPS
    for got, want in found[1:]:
        assert_same(got, want)
