"""Programs for plain torch.jit.script, each run in a process of its own.

A case is a function named ``case_...`` that raises when something is wrong. Run as a script this
file forks a child for each, from a process that has imported torch and compiled nothing, and prints
a JSON object of case name to error text, or null.
"""

import functools
import gc
import inspect
import io
import json
import linecache
import os
import re
import sys
import traceback
import weakref
from collections.abc import Callable
from typing import Any, List, Optional

import torch
import torch.nn.functional as F  # noqa: N812  # the usual name
from torch import nn

from amp_script import autocast, autocast_decorator
from amp_script.errors import DecoratorError

X = torch.randn(4, 4)
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
REGION = "__torch__.torch.amp.autocast_mode.autocast"


def check(scripted: Callable[..., Any], eager: Callable[..., Any], *args: Any) -> None:
    """Compare dtypes and bits over the runs in which the executor still changes its code."""
    expected = eager(*args)
    for _ in range(4):
        result = scripted(*args)
        assert result.dtype is expected.dtype, (result.dtype, expected.dtype)
        assert torch.equal(result, expected)


def regions(scripted: Any) -> int:
    """Return how many regions the program enters."""
    graph = scripted.inlined_graph
    entered = graph.findAllNodes("prim::Enter")
    for node in entered:
        assert node.input().type().str() == REGION, node
    assert len(graph.findAllNodes("prim::Exit")) == len(entered)
    return len(entered)


def refused(scripting: Callable[[], object], error: type[Exception], text: str) -> None:
    try:
        scripting()
    except error as refusal:
        message = str(refusal)
    else:
        raise AssertionError("not refused")
    assert re.search(text, message, re.DOTALL), message


# --- with blocks ---------------------------------------------------------------------------------


def ours(x: torch.Tensor) -> torch.Tensor:
    with autocast("cpu"):
        return torch.mm(x, x)


def torchs(x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu"):
        return torch.mm(x, x)


def half(x: torch.Tensor) -> torch.Tensor:
    with autocast(device_type="cpu", dtype=torch.float16, enabled=True, cache_enabled=False):
        y = torch.mm(x, x)
    return y + y


def bound_by_as(x: torch.Tensor) -> torch.Tensor:
    with autocast("cpu") as region:
        y = torch.mm(x, x)
    if region._enabled:
        return y
    return x


def disabled_inside(x: torch.Tensor) -> torch.Tensor:
    with autocast("cpu", torch.bfloat16):
        y = torch.mm(x, x)
        with autocast("cpu", enabled=False):
            return torch.mm(y.float(), x)


def both_classes(x: torch.Tensor) -> torch.Tensor:
    with autocast("cpu"):
        y = torch.mm(x, x)
    with torch.autocast("cpu", torch.float16):
        z = torch.mm(x, x)
    return y.float() + z.float()


class Block(nn.Module):
    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with autocast("cpu"):
            return self.linear(x)


class TorchBlock(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu"):
            return self.linear(x)


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), TorchBlock(), Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).float()
        with autocast("cpu", torch.float16):
            return torch.mm(x, x)


def case_ours_alone() -> None:
    check(torch.jit.script(ours), ours, X)


def case_ours_first_then_torchs() -> None:
    for function in (ours, torchs, half, both_classes):
        check(torch.jit.script(function), function, X)


def case_torchs_first_then_ours() -> None:
    for function in (torchs, ours, both_classes, half):
        check(torch.jit.script(function), function, X)


def case_both_scripted_before_either_runs() -> None:
    first, second = torch.jit.script(torchs), torch.jit.script(half)
    check(second, half, X)
    check(first, torchs, X)


def case_both_in_one_function() -> None:
    check(torch.jit.script(both_classes), both_classes, X)


def case_nested_and_disabled() -> None:
    check(torch.jit.script(disabled_inside), disabled_inside, X)


def case_a_target_of_as_compiles_and_the_pass_refuses_it() -> None:
    scripted = torch.jit.script(bound_by_as)
    assert regions(scripted) == 1
    refused(lambda: scripted(X), RuntimeError, "with autocast.*is not supported")


def case_module_of_ours_first() -> None:
    for module in (Block(), TorchBlock(), Block(), Nested()):
        check(torch.jit.script(module), module, X)


def case_module_of_torchs_first() -> None:
    for module in (TorchBlock(), Block(), Nested(), TorchBlock()):
        check(torch.jit.script(module), module, X)


def case_saved_and_loaded() -> None:
    module = Block()
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(module), file)
    file.seek(0)
    loaded = torch.jit.load(file)
    check(loaded, module, X)
    assert regions(loaded) == 1


def case_cuda_region_on_the_processor_casts_nothing() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        with autocast("cuda", torch.float16):
            return torch.mm(x, x)

    scripted = torch.jit.script(function)
    assert regions(scripted) == 1
    assert scripted(X).dtype is F32


def case_gradients() -> None:
    module = Block()
    scripted = torch.jit.script(module)
    for _ in range(4):
        grads = []
        for run in (module, scripted):
            module.zero_grad()
            run(X).float().sum().backward()
            grads.append([p.grad.clone() for p in module.parameters()])
        for expected, got in zip(*grads, strict=True):
            assert torch.equal(expected, got)


def case_a_subclass_is_refused() -> None:
    class Mine(autocast):
        pass

    def function(x: torch.Tensor) -> torch.Tensor:
        with Mine("cpu"):
            return torch.mm(x, x)

    torch.jit.script(ours)
    refused(lambda: torch.jit.script(function), Exception, "Cannot instantiate class 'Mine'")


def case_decorating_inside_a_scripted_function_is_refused() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return autocast("cpu")(x)

    refused(lambda: torch.jit.script(function), RuntimeError, "no attribute or method '__call__'")


# --- decorated functions -------------------------------------------------------------------------


@autocast("cpu")
def decorated(x: torch.Tensor) -> torch.Tensor:
    """Multiply."""
    return torch.mm(x, x)


@autocast("cpu", torch.float16)
def defaults(x: torch.Tensor, times: int = 2, *, transpose: bool) -> torch.Tensor:
    for _ in range(times):
        x = torch.mm(x, x.t() if transpose else x)
    return x


# fmt: off
@autocast("cpu")
def one_line(x: torch.Tensor) -> torch.Tensor: return torch.mm(x, x)


@autocast(
    "cpu",
    torch.float16,
)
@autocast("cpu",
          enabled=True)
# A comment between decorator and function.
def awkward(x,
            text: str = """a:
b""", # a colon: here
   other: Optional[torch.Tensor]=None):
    # type: (Tensor, str, Optional[Tensor]) -> Tensor

# A comment at the margin: with a colon.
    y = torch.mm(x, torch.
  mm(x, x)) ; z = """one
  two
        three"""
    if text == "a:\nb" and z == "one\n  two\n        three": return y
    else:
        raise RuntimeError("the strings have changed: " + text + z)


def tabs():
	@autocast("cpu")
	def inner(x: torch.Tensor, flag: bool = True):
		if flag:
			y = torch.mm(x, x)
		else:
			y = x
		return y
	return inner
# fmt: on


def plain(x: torch.Tensor) -> torch.Tensor:
    return torch.mm(x, x)


called_as_function = autocast("cpu")(plain)


def calls_decorated(x: torch.Tensor) -> torch.Tensor:
    return decorated(x).float() + called_as_function(x).float() + one_line(x).float()


@autocast("cpu")
def decorated_calls_decorated(x: torch.Tensor) -> torch.Tensor:
    return torch.mm(defaults(x, transpose=True).float(), x)


def closes_over(function: Callable[..., Any], module: Any) -> Callable[..., Any]:
    @autocast("cpu")
    def inner(x: torch.Tensor) -> torch.Tensor:
        return function(module.functional.relu(x), x)

    return inner


def case_decorated_function() -> None:
    scripted = torch.jit.script(decorated)
    assert regions(scripted) == 1
    check(scripted, decorated, X)
    assert scripted.__doc__ == "Multiply."


def case_decorated_defaults_and_keywords() -> None:
    scripted = torch.jit.script(defaults)
    assert regions(scripted) == 1
    for kwargs in ({"transpose": True}, {"times": 1, "transpose": False}):
        expected = defaults(X, **kwargs)
        for _ in range(4):
            assert torch.equal(scripted(X, **kwargs), expected)


def case_decorated_one_line() -> None:
    scripted = torch.jit.script(one_line)
    assert regions(scripted) == 1
    check(scripted, one_line, X)


def case_decorated_awkward_layout() -> None:
    scripted = torch.jit.script(awkward)
    assert regions(scripted) == 2
    check(scripted, awkward, X)
    inner = tabs()
    scripted = torch.jit.script(inner)
    assert regions(scripted) == 1
    check(scripted, inner, X)


def case_decorated_by_call() -> None:
    scripted = torch.jit.script(called_as_function)
    assert regions(scripted) == 1
    check(scripted, called_as_function, X)
    assert regions(torch.jit.script(plain)) == 0


def case_called_from_scripted_and_decorated_functions() -> None:
    scripted = torch.jit.script(calls_decorated)
    assert regions(scripted) == 3
    check(scripted, calls_decorated, X)
    scripted = torch.jit.script(decorated_calls_decorated)
    assert regions(scripted) == 2
    check(scripted, decorated_calls_decorated, X)


def case_decorated_closures() -> None:
    for function in (torch.mm, plain, decorated):
        inner = closes_over(function if function is torch.mm else lambda_free(function), nn)
        scripted = torch.jit.script(inner)
        assert regions(scripted) == 1 + (function is decorated)
        check(scripted, inner, X)


def lambda_free(function: Callable[..., Any]) -> Callable[..., Any]:
    def two(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return function(x)

    return two


def case_a_factory_makes_one_source_and_keeps_no_function() -> None:
    before = len(linecache.cache)
    seen = []
    for _ in range(50):
        inner = closes_over(torch.mm, nn)
        seen.append(weakref.ref(inner))
    inspect.getsource(inner)
    del inner
    gc.collect()
    assert len(linecache.cache) - before <= 2
    assert [ref() for ref in seen] == [None] * 50


def case_regions_that_differ_have_sources_that_differ() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, x)

    for dtype in (BF16, F16, BF16):
        for enabled in (True, False):
            made = autocast("cpu", dtype, enabled)(function)
            check(torch.jit.script(made), made, X)


def case_torchs_instance_decorates_through_ours() -> None:
    function = autocast_decorator(torch.autocast("cpu"), plain)
    scripted = torch.jit.script(function)
    assert regions(scripted) == 1
    check(scripted, function, X)


def case_overloads() -> None:
    scripted = torch.jit.script(calls_overloaded)
    assert regions(scripted) == 2
    check(scripted, calls_overloaded, X)


@torch.jit._overload
def overloaded(x: torch.Tensor, y: int) -> torch.Tensor: ...


@torch.jit._overload
def overloaded(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor: ...


@autocast("cpu")
def overloaded(x, y):
    if isinstance(y, int):
        return torch.mm(x, x)
    else:
        return torch.mm(x, y)


def calls_overloaded(x: torch.Tensor) -> torch.Tensor:
    return overloaded(x, 1) + overloaded(x, x)


def case_errors_show_the_users_line() -> None:
    @autocast("cpu")
    def wrong(x: torch.Tensor) -> torch.Tensor:
        y = torch.mm(x, x)
        return unknown_name(y)  # noqa: F821  # the case

    line = case_errors_show_the_users_line.__code__.co_firstlineno + 4
    refused(
        lambda: torch.jit.script(wrong),
        RuntimeError,
        rf'unknown_name.*File "{re.escape(__file__)}", line {line}\n',
    )


def case_run_time_errors_show_the_users_line() -> None:
    class Net(nn.Module):
        @autocast("cpu")
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.mm(x, x)
            return torch.mm(y, torch.zeros(3, 3))

    line = case_run_time_errors_show_the_users_line.__code__.co_firstlineno + 5
    refused(
        lambda: torch.jit.script(Net())(X),
        RuntimeError,
        rf'File "{re.escape(__file__)}", line {line},',
    )


def case_what_has_no_source_is_refused() -> None:
    namespace: dict[str, Any] = {"torch": torch, "__name__": "nowhere"}
    exec("def f(x):\n    return torch.mm(x, x)\n", namespace)
    made = autocast("cpu")(namespace["f"])
    assert made(X).dtype is BF16
    refused(lambda: torch.jit.script(made), OSError, "source")
    refused(lambda: torch.jit.script(autocast("cpu")(lambda x: x)), OSError, "source")


def case_what_is_no_function_is_refused() -> None:
    cached = functools.lru_cache(plain)
    for thing in (torch.mm, nn.Linear(2, 2), nn.Linear, torch.jit.script(plain), cached):
        made = autocast("cpu")(thing)
        refused(lambda made=made: torch.jit.script(made), RuntimeError, "autocast decorates a")


def case_generators_and_coroutines_are_refused() -> None:
    @autocast("cpu")
    def generator(x):
        yield x

    @autocast("cpu")
    async def coroutine(x):
        return x

    @autocast("cpu")
    async def both(x):
        yield x

    for made in (generator, coroutine, both):
        refused(lambda made=made: torch.jit.script(made), RuntimeError, "no generators and no")

    class Net(nn.Module):
        @autocast("cpu")
        def forward(self, x):
            yield x

    refused(lambda: torch.jit.script(Net()), Exception, "Yield")


class Mine(autocast):
    pass


def case_a_subclass_as_decorator_is_refused() -> None:
    @Mine("cpu")
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, x)

    @autocast("cpu")
    @Mine("cpu")
    def inside(x: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, x)

    def caller(x: torch.Tensor) -> torch.Tensor:
        return function(x)

    class Net(nn.Module):
        @autocast("cpu")
        @Mine("cpu")
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.mm(x, x)

    for made in (function, inside, caller):
        refused(lambda made=made: torch.jit.script(made), RuntimeError, "not with .*Mine")
    refused(lambda: torch.jit.script(Net()), DecoratorError, "not with .*Mine")
    assert Net()(X).dtype is BF16


def case_torchs_decorator_inside_ours_is_refused() -> None:
    class Net(nn.Module):
        @autocast("cpu")
        @torch.autocast("cpu", torch.float16)
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.mm(x, x)

    refused(lambda: torch.jit.script(Net()), DecoratorError, "decorator is not supported")


def case_under_another_decorator_it_is_refused() -> None:
    class Net(nn.Module):
        @torch.no_grad()
        @autocast("cpu")
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + x

    refused(lambda: torch.jit.script(Net()), RuntimeError, "must be the outermost decorator")


def case_over_another_decorator() -> None:
    """TorchScript drops the other one, as it does without ours."""

    class Net(nn.Module):
        @autocast("cpu")
        @torch.no_grad()
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(x, x)

    scripted = torch.jit.script(Net())
    assert regions(scripted) == 1
    check(scripted, Net(), X)


def case_script_if_tracing_inside() -> None:
    @autocast("cpu")
    @torch.jit.script_if_tracing
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, x)

    scripted = torch.jit.script(function)
    assert regions(scripted) == 1
    check(scripted, function, X)


# --- decorated methods ---------------------------------------------------------------------------


class Methods(nn.Module):
    scale: float

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = 2.0

    @autocast("cpu")
    def forward(self, x: torch.Tensor, extra: Optional[torch.Tensor] = None) -> torch.Tensor:
        y = self.linear(x)
        if extra is not None:
            y = torch.mm(y, extra)
        return torch.mm(self.full(y.float()), self.static(x).float())

    @autocast("cpu", enabled=False)
    def full(self, x: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, x)

    @staticmethod
    @autocast("cpu", torch.float16)
    def static(x: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, x)

    @torch.jit.export
    @autocast("cpu")
    def exported(self, xs: List[torch.Tensor]) -> torch.Tensor:
        return torch.mm(xs[0], decorated(xs[-1]).float())

    @autocast("cpu")
    @torch.jit.export
    def exported_inside(self, x: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, x)

    @torch.jit.unused
    @autocast("cpu")
    def unused(self, x: torch.Tensor) -> torch.Tensor:
        yield x

    @autocast("cpu")
    @torch.jit.ignore
    def ignored(self, x: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, x)

    @torch.jit.export
    def calls_ignored(self, x: torch.Tensor) -> torch.Tensor:
        return self.ignored(x)


class Parent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.child = Methods()
        self.layers = nn.Sequential(Block(), Block())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.child(x).float() + self.layers(x.float()).float()


def case_decorated_methods() -> None:
    module = Methods()
    scripted = torch.jit.script(module)
    assert regions(scripted) == 3
    check(scripted, module, X)
    check(scripted, module, X, X)
    check(scripted.exported, module.exported, [X, X])
    check(scripted.exported_inside, module.exported_inside, X)
    check(scripted.calls_ignored, module.calls_ignored, X)


def case_decorated_methods_of_submodules_and_subclasses() -> None:
    class Sub(Methods):
        pass

    for module in (Parent(), Sub()):
        check(torch.jit.script(module), module, X)


def case_one_method_of_several_modules() -> None:
    first, second = Methods(), Methods()
    check(torch.jit.script(first), first, X)
    check(torch.jit.script(second), second, X)


def case_bound_method_assigned_to_an_instance() -> None:
    linear = nn.Linear(4, 4)
    linear.forward = autocast("cpu")(linear.forward)
    scripted = torch.jit.script(linear)
    assert regions(scripted) == 1
    check(scripted, linear, X)


def case_method_of_a_script_class() -> None:
    scripted = torch.jit.script(uses_script_class)
    assert regions(scripted) == 1
    check(scripted, uses_script_class, X)


class Pair:
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    @autocast("cpu")
    def product(self) -> torch.Tensor:
        return torch.mm(self.x, self.x)


def uses_script_class(x: torch.Tensor) -> torch.Tensor:
    return Pair(x).product()


# -------------------------------------------------------------------------------------------------


def cases() -> dict[str, Callable[[], None]]:
    return {name: value for name, value in globals().items() if name.startswith("case_")}


def run(case: Callable[[], None]) -> str | None:
    """Run a case in a child of this process, and return its traceback if it fails."""
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(readable)
        try:
            case()
            text = ""
        except BaseException:
            text = traceback.format_exc()
        with os.fdopen(writable, "w") as pipe:
            pipe.write(text or "passed")
        os._exit(0)
    os.close(writable)
    with os.fdopen(readable) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    return None if text == "passed" else text or f"the process ended with status {status}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    json.dump({name: run(case) for name, case in cases().items()}, sys.stdout)
