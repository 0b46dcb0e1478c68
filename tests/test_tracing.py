"""trace_and_freeze: eager autocast's bits on every run, and nothing of the caller's is changed."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import amp_script
from amp_script.errors import (
    ArgumentError,
    StructureError,
    TracingError,
    TracingWarning,
    VerificationError,
)
from amp_script.frozen import FrozenModule
from amp_script.jit_state import AmbientState

HALVES = (torch.bfloat16, torch.float16)


def eager(model: Callable[..., Any], *args: Any, dtype: torch.dtype = torch.bfloat16) -> Any:
    with torch.no_grad(), torch.autocast("cpu", dtype=dtype):
        return model(*args)


def assert_same(got: Any, want: Any) -> None:
    if isinstance(want, torch.Tensor):
        assert got.dtype == want.dtype
        assert torch.equal(got, want)
    elif isinstance(want, dict):
        assert got.keys() == want.keys()
        for key in want:
            assert_same(got[key], want[key])
    elif isinstance(want, (tuple, list)):
        assert len(got) == len(want)
        for a, b in zip(got, want, strict=True):
            assert_same(a, b)
    else:
        assert got == want


class Net(nn.Module):
    """Layers in and out of nested regions, a branch on a dtype, a product that is split."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.exact = nn.Linear(16, 16)
        self.last = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.first(x)
        with torch.autocast("cpu", enabled=False):
            z = torch.softmax(self.exact(y.float()), -1)
        if y.dtype == torch.float32:
            y = y * 2
        product = torch.addmm(y.new_zeros(16), z, self.exact.weight)
        return self.last(product), z


@pytest.mark.parametrize("dtype", HALVES)
def test_bits_of_eager_autocast_on_every_run(dtype: torch.dtype) -> None:
    model, x = Net().eval(), torch.rand(3, 8)
    frozen = amp_script.trace_and_freeze(model, x, dtype=dtype, compute="native")
    for _ in range(4):
        assert_same(frozen(x), eager(model, x, dtype=dtype))
    assert frozen.metadata.verification is not None
    assert frozen.metadata.verification.bit_equal


def test_is_a_script_module_without_parameters_that_plain_torch_reads(tmp_path: Any) -> None:
    model, x = Net().eval(), torch.rand(3, 8)
    frozen = amp_script.trace_and_freeze(model, x, compute="native")
    assert isinstance(frozen, torch.jit.ScriptModule)
    assert isinstance(frozen, FrozenModule)
    assert not list(frozen.parameters())
    amp_script.save(frozen, tmp_path / "net.pt")
    loaded = torch.jit.load(tmp_path / "net.pt")
    for _ in range(3):
        assert_same(loaded(x), eager(model, x))


def test_ignores_what_surrounds_the_call() -> None:
    model, x = Net().eval(), torch.rand(3, 8)
    frozen = amp_script.trace_and_freeze(model, x, compute="native")
    want = eager(model, x)
    failures: list[BaseException] = []

    def run() -> None:
        try:
            for dtype in HALVES:
                with torch.autocast("cpu", dtype=dtype):
                    assert_same(frozen(x), want)
            with amp_script.jit_autocast_pass(True):
                assert_same(frozen(x), want)
        except BaseException as error:
            failures.append(error)

    for _ in range(3):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    run()
    assert not failures


# --- the frozen graph -----------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.embedding = nn.Embedding(10, 8)
        self.drop = nn.Dropout(0.5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.embedding(ids))
        scores = self.q(x) @ self.k(x).transpose(-1, -2)
        return scores.softmax(-1) @ self.v(x) @ self.embedding.weight.t()


def nodes(graph: torch.Graph, kind: str) -> list[Any]:
    return list(graph.findAllNodes(kind))


def test_graph_casts_each_value_once_and_no_constant() -> None:
    model, ids = Attention().eval(), torch.randint(0, 10, (2, 5))
    graph = amp_script.trace_and_freeze(model, ids, compute="native").graph
    casts = nodes(graph, "aten::to")
    assert len({node.inputsAt(0).debugName() for node in casts}) == len(casts)
    assert not [node for node in casts if node.inputsAt(0).node().kind() == "prim::Constant"]
    assert not nodes(graph, "prim::GetAttr")
    assert not nodes(graph, "aten::dropout")
    weights = [
        value
        for node in nodes(graph, "prim::Constant")
        if isinstance(value := node.output().toIValue(), torch.Tensor) and value.dim() == 2
    ]
    # Looked up in float32, multiplied in bfloat16: the embedding is needed in both.
    assert sorted((str(weight.dtype), tuple(weight.shape)) for weight in weights) == [
        ("torch.bfloat16", (8, 8)),
        ("torch.bfloat16", (8, 8)),
        ("torch.bfloat16", (8, 8)),
        ("torch.bfloat16", (8, 10)),
        ("torch.float32", (10, 8)),
    ]


def test_constants_are_the_programs_own() -> None:
    model, ids = Attention().eval(), torch.randint(0, 10, (2, 5))
    frozen = amp_script.trace_and_freeze(model, ids, compute="native")
    want = frozen(ids)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    assert_same(frozen(ids), want)


@pytest.mark.parametrize("compute", ["native", "upcast"])
@pytest.mark.parametrize("layer", [nn.Linear, nn.LSTM, nn.GRU, nn.BatchNorm1d])
def test_weights_that_are_not_cast_are_the_programs_own(
    layer: type[nn.Module], compute: Any
) -> None:
    model = nn.Sequential(layer(8) if layer is nn.BatchNorm1d else layer(8, 8)).eval()
    x = torch.randn(3, 8)
    frozen = amp_script.trace_and_freeze(model, x, keep_float32=["0"], compute=compute)
    with torch.no_grad():
        before = copy.deepcopy(frozen(x))
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.add_(1)
        assert_same(frozen(x), before)


class Constants(nn.Module):
    """Returns what does not depend on its input, bare, in containers, as views and as weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("kept", torch.rand(4, 4))

    def forward(self, x: torch.Tensor) -> dict[str, object]:
        mask = torch.ones(4)
        return {
            "product": self.layer(x) + mask,
            "list": [torch.zeros(1, 4), torch.zeros(1, 4)],
            "tuple": (torch.arange(3), self.kept + 1, self.kept.clone(), self.kept.t()),
            "weight": self.layer.weight.to(torch.bfloat16),
            "mask": mask,
        }


@pytest.mark.parametrize("compute", ["native", "upcast", "packed", None])
def test_constants_that_are_returned_are_new_in_each_call(compute: Any, tmp_path: Path) -> None:
    model, x = Constants().eval(), torch.randn(2, 4)
    file = tmp_path / "model.pt"
    amp_script.save(amp_script.trace_and_freeze(model, x, compute="native"), file)
    plain = compute is None
    program: Any = torch.jit.load(file) if plain else amp_script.load(file, compute=compute)
    with torch.no_grad():
        want = copy.deepcopy(tree_leaves(program(x)))
        for _ in range(3):
            results = tree_leaves(program(x))
            assert_same(results, want)
            assert len({result.data_ptr() for result in results}) == len(results)
            for result in results:
                result.add_(1)
    if not plain:
        amp_script.save(program, file)
        assert_same(tree_leaves(amp_script.load(file, compute=compute)(x)), want)


# --- the border -----------------------------------------------------------------------------------


def test_dtypes_at_the_border() -> None:
    model, x = Net().eval(), torch.rand(3, 8)
    frozen = amp_script.trace_and_freeze(model, x, compute="native", output_dtype=torch.float32)
    assert_same(frozen(x), tuple(t.float() for t in eager(model, x)))
    half = x.bfloat16()
    frozen = amp_script.trace_and_freeze(model, x, compute="native", input_dtype=torch.bfloat16)
    assert frozen.metadata.inputs[0].dtype is torch.bfloat16
    assert_same(frozen(half), eager(model, half.float()))
    frozen = amp_script.trace_and_freeze(model, half, compute="native", input_dtype=torch.float32)
    assert_same(frozen(half.float()), eager(model, half))


class Tagged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.labels = ["a", "b"]
        self.times = 3
        self.register_buffer("scale", torch.rand(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)

    @torch.jit.export
    def exported(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.layer(x)) * self.times

    def plain(self, x: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, self.layer.weight) + self.scale


def test_preserved_attributes_and_exported_methods() -> None:
    model, x = Tagged().eval(), torch.rand(3, 4)
    frozen = amp_script.trace_and_freeze(
        model, x, compute="native", preserved_attrs=["labels", "scale", "plain"]
    )
    for _ in range(3):
        for name in ("forward", "exported", "plain"):
            assert_same(getattr(frozen, name)(x), eager(getattr(model, name), x))
    assert frozen.labels == ["a", "b"]
    assert torch.equal(frozen.scale, model.scale)
    assert not hasattr(frozen, "times")


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.mean = self.norm.running_mean
        self.weight = self.layer.weight
        self.plain = torch.rand(4, 1, 1)
        self.register_buffer("scale", torch.rand(4, 1, 1))
        self.times = 3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layer(x)) * self.scale.matmul(self.plain) * self.times


class ScaledWithMethod(Scaled):
    @torch.jit.export
    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale * self.times


@pytest.mark.parametrize("name", ["scale", "plain", "weight", "mean"])
@pytest.mark.parametrize(
    ("kind", "compute"), [(Scaled, "native"), (Scaled, "packed"), (ScaledWithMethod, "upcast")]
)
def test_a_preserved_tensor_may_be_set(
    tmp_path: Path, name: str, kind: type[Scaled], compute: Any
) -> None:
    torch.manual_seed(0)
    model, x = kind().eval(), torch.rand(2, 3, 5, 5)
    frozen = amp_script.trace_and_freeze(model, x, compute=compute, preserved_attrs=[name])
    amp_script.save(frozen, tmp_path / "model.pt")
    loaded = amp_script.load(tmp_path / "model.pt", compute=compute)
    with torch.no_grad():
        value = torch.rand_like(getattr(model, name))
        getattr(model, name).copy_(value)
        for program in (frozen, loaded):
            before = program(x)
            setattr(program, name, value)
            fresh = amp_script.trace_and_freeze(model, x, compute=compute, preserved_attrs=[name])
            assert not torch.equal(program(x), before)
            assert_same(program(x), fresh(x))


class WithMethods(nn.Module):
    """What a scripted model may have beside its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.scale = 2.0

    def product(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) @ x.t()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x) + 1

    @torch.jit.export
    def scaled(
        self, x: torch.Tensor, times: int = 2, offset: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, int]:
        y = self.product(x) * times * self.scale
        if offset is not None:
            y = y + offset
        return y, times


def test_methods_of_a_scripted_model_are_preserved_where_asked(tmp_path: Path) -> None:
    model, x = WithMethods().eval(), torch.rand(3, 4)
    scripted: Any = torch.jit.script(model)
    frozen: Any = amp_script.trace_and_freeze(
        scripted, x, compute="native", preserved_attrs=["scaled", "scale", "forward"]
    )
    amp_script.save(frozen, tmp_path / "model.pt")
    for program in (frozen, torch.jit.load(tmp_path / "model.pt")):
        for _ in range(3):
            assert_same(program(x), eager(model, x))
            for more in ((), (3,), (3, x[:, :3])):
                assert_same(program.scaled(x, *more), eager(model.scaled, x, *more))
    assert frozen.scale == 2.0
    plain = amp_script.trace_and_freeze(scripted, x, compute="native")
    assert_same(plain(x), eager(model, x))
    assert not hasattr(plain, "scaled")


def test_methods_whose_casts_are_made_are_not_preserved() -> None:
    lowered, x = amp_script.script(WithMethods().eval()), torch.rand(3, 4)
    with pytest.raises(TracingError, match="method 'scaled' of a LoweredModule cannot be pres"):
        amp_script.trace_and_freeze(lowered, x, preserved_attrs=["scaled"])


class Python(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ x.t()

    def described(self, x: torch.Tensor) -> str:
        return "{:>{}}".format(*eval(repr((x.dim(), 3))))


@pytest.mark.parametrize("name", ["described", "state_dict"])
def test_a_method_that_torchscript_cannot_compile_is_named_with_its_line(name: str) -> None:
    complaint = rf"cannot compile what Python exports or preserves \({name}\)[^$]*, line \d+"
    with pytest.raises(TracingError, match=complaint):
        amp_script.trace_and_freeze(Python().eval(), torch.rand(3, 4), preserved_attrs=[name])


class Optional(nn.Module):
    """A convolution's bias is typed as optional."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv1d(3, 3, 1), nn.ConvTranspose1d(3, 3, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)

    @torch.jit.export
    def exported(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) + 1


def test_a_model_with_exported_methods_may_have_optional_tensors() -> None:
    model, x = Optional().eval(), torch.rand(2, 3, 5)
    frozen = amp_script.trace_and_freeze(model, x, compute="native")
    for name in ("forward", "exported"):
        assert_same(getattr(frozen, name)(x), eager(getattr(model, name), x))


def test_one_thing_where_a_list_is_expected_is_refused() -> None:
    model, x = nn.Linear(4, 4).eval(), torch.rand(3, 4)
    with pytest.raises(TracingError, match="check_inputs is a Tensor: expected a list"):
        amp_script.trace_and_freeze(model, x, check_inputs=x)
    with pytest.raises(TracingError, match=r"expected a list, \['weight'\]"):
        amp_script.trace_and_freeze(model, x, preserved_attrs="weight")
    number: Any = 3
    with pytest.raises(TracingError, match="preserved_attrs holds 3: expected names"):
        amp_script.trace_and_freeze(model, x, preserved_attrs=[number])


SPECIAL_INPUTS: dict[str, Callable[[], torch.Tensor]] = {
    "nested": lambda: torch.nested.nested_tensor([torch.rand(2, 4), torch.rand(3, 4)]),
    "quantized": lambda: torch.quantize_per_tensor(torch.rand(2, 4), 0.1, 0, torch.qint8),
    "oneDNN": lambda: torch.rand(2, 4).to_mkldnn(),
}


@pytest.mark.parametrize("kind", SPECIAL_INPUTS)
@pytest.mark.filterwarnings(
    "ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning",
    "ignore:torch.quantize_per_tensor:UserWarning",
)
def test_inputs_that_no_program_takes_are_named(kind: str) -> None:
    model = nn.Linear(4, 4).eval()
    with pytest.raises(TracingError, match=f"input is a {kind} tensor: expected a strided or a"):
        amp_script.trace_and_freeze(model, SPECIAL_INPUTS[kind]())


class Image(torch.Tensor):
    """A subclass of tensors that overrides nothing."""


def test_an_example_of_a_subclass_of_tensors_is_named() -> None:
    x = torch.rand(2, 4)
    model = nn.Linear(4, 4).eval()
    with pytest.raises(TracingError, match=r"input is of the class Image.*as_subclass"):
        amp_script.trace_and_freeze(model, x.as_subclass(Image))
    amp_script.trace_and_freeze(model, nn.Parameter(x))


SPECIAL_OUTPUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sparse": lambda x: (x @ x.t()).relu().to_sparse(),
    "sparse rows": lambda x: (x @ x.t()).to_sparse_csr(),
    "oneDNN": lambda x: (x @ x.t()).float().to_mkldnn(),
    "quantized": lambda x: torch.quantize_per_tensor((x @ x.t()).float(), 0.1, 0, torch.qint8),
    "nested": lambda x: torch.nested.as_nested_tensor([x[0] @ x.t(), x[1, :2] @ x[:, :2].t()]),
}


@pytest.mark.parametrize("kind", SPECIAL_OUTPUTS)
@pytest.mark.filterwarnings(
    "ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning",
    "ignore:Sparse CSR tensor support is in beta state:UserWarning",
    "ignore:torch.quantize_per_tensor:UserWarning",
)
def test_outputs_that_are_no_plain_tensors_are_verified(kind: str) -> None:
    model, x = SPECIAL_OUTPUTS[kind], torch.randn(3, 4)
    frozen = amp_script.trace_and_freeze(model, x, compute="native")
    assert frozen.metadata.verification is not None
    assert frozen.metadata.verification.bit_equal
    given, expected = frozen(x), eager(model, x)
    assert (given.layout, given.dtype, given.is_quantized, given.is_nested) == (
        expected.layout,
        expected.dtype,
        expected.is_quantized,
        expected.is_nested,
    )
    with pytest.raises(VerificationError, match="differs from eager autocast in output"):
        amp_script.verify(frozen, lambda x: model(x * 1.5), x)


def test_a_frozen_program_may_be_part_of_a_model() -> None:
    x = torch.rand(3, 4)
    part = amp_script.trace_and_freeze(nn.Linear(4, 4).eval(), x, compute="native")
    for model in (part, nn.Sequential(part, nn.Tanh()).eval()):
        frozen = amp_script.trace_and_freeze(model, x, compute="native")
        assert_same(frozen(x), eager(model, x))


def test_what_a_program_holds_fast_cannot_be_set() -> None:
    model, x = ScaledWithMethod().eval(), torch.rand(2, 3, 5, 5)
    frozen = amp_script.trace_and_freeze(model, x, preserved_attrs=["scale"])
    with pytest.raises(TypeError, match="scale: expected a float32 tensor on cpu, given float64"):
        frozen.scale = torch.rand(4, 1, 1).double()
    frozen = amp_script.trace_and_freeze(Scaled().eval(), x, preserved_attrs=["times"])
    with pytest.raises(AttributeError, match="the program does not read 'times'"):
        frozen.times = 4


# --- what is traced through -----------------------------------------------------------------------


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, times: int = 2) -> torch.Tensor:
        for _ in range(times):
            x = self.layer(x)
        with torch.autocast("cpu", enabled=False):
            y = torch.mm(x.float(), x.float().t())
            if bool(y.sum() > 1000):
                y = y * 0
        return y


@torch.jit.script
def scripted_product(x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
    return torch.mm(x, x.t()) * scale


class Mixed(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.part(x, times=3)
        with torch.autocast("cpu", enabled=False):
            exact = scripted_product(y)
            with torch.autocast("cpu", dtype=torch.float16):
                half = scripted_product(y)
        return y, exact, half, scripted_product(y, scale=0.5)


@pytest.mark.parametrize("compile_part", [torch.jit.script, amp_script.script])
def test_scripted_parts_are_lowered_for_the_state_they_are_called_in(compile_part: Any) -> None:
    part, x = Scripted().eval(), torch.rand(4, 4)

    def unscripted(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        def product(y: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
            return torch.mm(y, y.t()) * scale

        y = part(x, times=3)
        with torch.autocast("cpu", enabled=False):
            exact = product(y)
            with torch.autocast("cpu", dtype=torch.float16):
                half = product(y)
        return y, exact, half, product(y, scale=0.5)

    frozen = amp_script.trace_and_freeze(Mixed(compile_part(part)).eval(), x, compute="native")
    other = torch.rand(4, 4) * 9  # takes the other branch, which a trace of Python would not hold
    for inputs in (x, other, x):
        assert_same(frozen(inputs), eager(unscripted, inputs))


def test_a_script_module_itself() -> None:
    part, x = Scripted().eval(), torch.rand(4, 4)
    frozen = amp_script.trace_and_freeze(torch.jit.script(part), x, compute="native")
    for inputs in (x, x * 9):
        assert_same(frozen(inputs), eager(part, inputs))


def linear_quantised(model: nn.Module) -> nn.Module:
    quantised: nn.Module = torch.ao.quantization.quantize_dynamic(model, {nn.Linear})
    return quantised


def convolution_quantised() -> nn.Module:
    stubs = torch.ao.quantization.QuantStub(), torch.ao.quantization.DeQuantStub()
    model = nn.Sequential(stubs[0], nn.Conv2d(3, 4, 3), stubs[1]).eval()
    model.qconfig = torch.ao.quantization.get_default_qconfig(torch.backends.quantized.engine)
    torch.ao.quantization.prepare(model, inplace=True)
    model(torch.rand(1, 3, 8, 8))
    torch.ao.quantization.convert(model, inplace=True)
    return model


class WithQuantised(nn.Module):
    """A quantised layer, one that is not, and a method that TorchScript compiles."""

    def __init__(self) -> None:
        super().__init__()
        self.first = linear_quantised(nn.Sequential(nn.Linear(8, 8)))
        self.second = nn.Bilinear(8, 8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        return self.second(y, y)

    @torch.jit.export
    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x)


QUANTISED: dict[str, Callable[[], nn.Module]] = {
    "dynamic": lambda: linear_quantised(nn.Sequential(nn.Linear(8, 8), nn.ReLU())),
    "scripted": lambda: torch.jit.script(
        linear_quantised(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
    ),
    "exporting": WithQuantised,
    "static": convolution_quantised,
}


@pytest.mark.parametrize("name", QUANTISED)
# torch.ao.quantization warns of itself, in other words in each version.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_quantised_layers(name: str, tmp_path: Path) -> None:
    model = QUANTISED[name]().eval()
    x = torch.rand(1, 3, 8, 8) if name == "static" else torch.randn(4, 8)
    frozen = amp_script.trace_and_freeze(model, x, dtype=torch.bfloat16, compute="native")
    amp_script.save(frozen, tmp_path / "model.pt")
    for program in (frozen, amp_script.load(tmp_path / "model.pt")):
        assert_same(program(x), eager(model, x))


class UnregisteredParts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Linear(4, 4), nn.Linear(4, 4)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.rand(4, 4))
        self.other = self.one
        self.layer = nn.Linear(4, 4)
        self.again = self.layer
        self.layer.register_forward_hook(lambda module, inputs, output: output * 2)
        self.layer.register_full_backward_hook(lambda *grads: None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.again(self.layer(x @ self.one) @ self.other)


def function_of_a_parameter() -> Callable[[torch.Tensor], torch.Tensor]:
    weight = nn.Parameter(torch.rand(4, 4))
    layer = nn.Linear(4, 4).eval()
    return lambda x: layer(x @ weight)


@pytest.mark.parametrize("make", [UnregisteredParts, Tied, function_of_a_parameter])
def test_parameters_are_found_wherever_they_are(make: Callable[[], Any]) -> None:
    model, x = make(), torch.rand(3, 4)
    if isinstance(model, nn.Module):
        model.eval()
    frozen = amp_script.trace_and_freeze(model, x, compute="native")
    assert_same(frozen(x), eager(model, x))


# --- with and without gradients -------------------------------------------------------------------

PADDING = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])

ATTENTIVE: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "encoder layer": (lambda: nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), {}),
    "encoder layer, norm first": (
        lambda: nn.TransformerEncoderLayer(
            16, 4, 32, batch_first=True, norm_first=True, activation="gelu"
        ),
        {},
    ),
    "encoder layer, mask": (
        lambda: nn.TransformerEncoderLayer(16, 4, 32, batch_first=True),
        {"src_key_padding_mask": PADDING},
    ),
    "encoder layer, time first": (lambda: nn.TransformerEncoderLayer(16, 4, 32), {}),
    "encoder": (
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 2, enable_nested_tensor=False
        ),
        {"src_key_padding_mask": PADDING},
    ),
}


class SelfAttention(nn.Module):
    def __init__(self, need_weights: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)
        self.need_weights = need_weights

    def forward(self, src: torch.Tensor) -> Any:
        return self.attention(src, src, src, need_weights=self.need_weights)


ATTENTIVE["self-attention"] = (lambda: SelfAttention(False), {})
ATTENTIVE["self-attention, weights"] = (lambda: SelfAttention(True), {})


@pytest.mark.parametrize("name", ATTENTIVE)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.filterwarnings("ignore::amp_script.errors.TracingWarning")  # torch checks its masks
def test_fast_paths_with_and_without_gradients(name: str, dtype: torch.dtype) -> None:
    make, kwargs = ATTENTIVE[name]
    model, x = make().eval(), torch.rand(2, 5, 16)
    frozen = amp_script.trace_and_freeze(model, {"src": x, **kwargs}, dtype=dtype, compute="native")
    for grad in (False, True, False, True):
        with torch.set_grad_enabled(grad):
            with torch.autocast("cpu", dtype=dtype):
                want = model(x, **kwargs)
            assert_same(frozen(x, **kwargs), want)


RECURRENT: dict[str, Callable[[], nn.Module]] = {
    "gru": lambda: nn.GRU(8, 6, 2, batch_first=True, bidirectional=True),
    "lstm": lambda: nn.LSTM(8, 6, 2, batch_first=True, bidirectional=True),
    "lstm with projection": lambda: nn.LSTM(8, 6, 1, proj_size=3),
    "rnn": lambda: nn.RNN(8, 6, 1, nonlinearity="relu"),
    "gru cell": lambda: nn.GRUCell(8, 6),
}


@pytest.mark.parametrize("name", RECURRENT)
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")  # torch's
def test_recurrent_layers_at_other_lengths(name: str) -> None:
    model = RECURRENT[name]().eval()
    shapes = [(3, 8), (2, 8)] if name.endswith("cell") else [(2, 5, 8), (4, 7, 8), (1, 1, 8)]
    examples = [torch.rand(shape) for shape in shapes]
    frozen = amp_script.trace_and_freeze(
        model, examples[0], compute="native", check_inputs=examples[1:]
    )
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            for x in examples:
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    want = model(x)
                assert_same(frozen(x), want)


def test_gradients_of_the_inputs() -> None:
    model, x = Net().eval(), torch.rand(3, 8)
    frozen = amp_script.trace_and_freeze(model, x, compute="native")
    grads = []
    for program in (model, frozen):
        inputs = x.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=program is model):
            result = program(inputs)[0].float().sum()
        result.backward()
        grads.append(inputs.grad)
    assert_same(grads[1], grads[0])


# --- nothing of the caller's is changed -----------------------------------------------------------


class Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(1))
        self.seen: list[int] = []
        self.table: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.append(x.dim())
        if self.table is None:
            self.table = torch.ones(4)
        return self.layer(x) * self.table + self.calls


def test_the_model_is_as_before() -> None:
    model, x = Stateful().eval(), torch.rand(3, 4)
    model.layer.weight.requires_grad_(False)
    before = copy.deepcopy(vars(model)), copy.deepcopy(model.state_dict())
    example = x.clone()
    frozen = amp_script.trace_and_freeze(model, x, compute="native")
    assert model.seen == []
    assert model.table is None
    assert vars(model).keys() == before[0].keys()
    assert_same(dict(model.state_dict()), dict(before[1]))
    assert not model.layer.weight.requires_grad
    assert model.layer.bias.requires_grad
    assert model.layer.weight.grad is None
    assert torch.equal(x, example)
    for _ in range(3):  # the program keeps a state of its own, and so does the model
        assert_same(frozen(x), eager(model, x))
    assert model.calls.item() == 3


def process_state() -> dict[str, object]:
    flag = torch._C._jit_set_autocast_mode(True)
    torch._C._jit_set_autocast_mode(flag)
    return {
        "ambient": AmbientState.current(),
        "pass": flag,
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "filters": list(warnings.filters),
        "showwarning": warnings.showwarning,
        "fast path": torch.backends.mha.get_fastpath_enabled(),
        "random": torch.get_rng_state().tolist(),
        "tensor methods": (torch.Tensor.__bool__, torch.Tensor.item, torch.Tensor.numpy),
        "calls": (torch._C.ScriptMethod.__call__, torch._C.ScriptFunction.__call__),
        "is_tracing": torch.jit.is_tracing,
        "lstm": torch._VF.lstm,
    }


class Raises(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.jit.is_tracing():
            raise ArithmeticError("on purpose")
        return x @ x.t()


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("ambient", [None, torch.float16])
def test_the_process_is_as_before(grad: bool, ambient: torch.dtype | None) -> None:
    model, x = Stateful().eval(), torch.rand(3, 4)
    with (
        torch.set_grad_enabled(grad),
        torch.autocast("cpu", dtype=ambient or torch.bfloat16, enabled=ambient is not None),
    ):
        before = process_state()
        frozen = amp_script.trace_and_freeze(model, x, compute="native")
        assert process_state() == before
        with pytest.raises(ArithmeticError, match="on purpose"):
            amp_script.trace_and_freeze(Raises().eval(), x)
        assert process_state() == before
        assert frozen(x).dtype == torch.float32


def test_random_operators_draw_what_eager_draws() -> None:
    def noisy(x: torch.Tensor) -> torch.Tensor:
        return x @ x.t() + torch.rand(3, 3)

    x = torch.rand(3, 4)
    frozen = amp_script.trace_and_freeze(noisy, x, compute="native")
    torch.manual_seed(1)
    want = eager(noisy, x)
    torch.manual_seed(1)
    assert_same(frozen(x), want)


def test_many_threads_may_trace() -> None:
    x = torch.rand(3, 8)
    models = [Net().eval() for _ in range(4)]
    results: dict[int, Any] = {}

    def run(index: int) -> None:
        results[index] = amp_script.trace_and_freeze(models[index], x, compute="native")

    threads = [threading.Thread(target=run, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, model in enumerate(models):
        assert_same(results[index](x), eager(model, x))


# --- errors and warnings that one can act on ------------------------------------------------------


def test_refused_before_anything_runs() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Dropout()), torch.rand(3, 4)
    with pytest.raises(TracingError, match=r"training mode \(Sequential, 0, 1\); call eval\(\)"):
        amp_script.trace_and_freeze(model, x)
    model.eval()
    with pytest.raises(TracingError, match="no tensor among the example inputs"):
        amp_script.trace_and_freeze(model, ())
    with pytest.raises(TracingError, match="input is on 'meta' and the region on 'cpu'"):
        amp_script.trace_and_freeze(model, x.to("meta"))
    with pytest.raises(TracingError, match=r"0\.weight is on 'meta'.*model.*\.to\('cpu'\)"):
        amp_script.trace_and_freeze(copy.deepcopy(model).to("meta"), x)
    with pytest.raises(TracingError, match=r"int8.*bfloat16, torch\.float16"):
        amp_script.trace_and_freeze(model, x, dtype=torch.int8)
    with pytest.raises(TracingError, match=r"output_dtype is torch.int32: expected a floating"):
        amp_script.trace_and_freeze(model, x, output_dtype=torch.int32)
    with pytest.raises(TracingError, match="no autocast on 'meta'"):
        amp_script.trace_and_freeze(model, x, device_type="meta")
    with pytest.raises(TracingError, match="too many positional arguments"):
        amp_script.trace_and_freeze(model, (x, x))
    with pytest.raises(TracingError, match="the model is a str: expected a module"):
        amp_script.trace_and_freeze("model", x)  # type: ignore[call-overload]  # on purpose
    with pytest.raises(StructureError, match=r"input\[0\] is a builtins.complex"):
        amp_script.trace_and_freeze(model, ([1j, x],))
    with pytest.raises(TracingError, match="no attribute 'missing' to preserve"):
        amp_script.trace_and_freeze(model, x, preserved_attrs=["missing"])
    with pytest.raises(TracingError, match=r"the model is the class Linear: .* with Linear\("):
        amp_script.trace_and_freeze(nn.Linear, x)
    for dtype in ("dtype", "input_dtype", "output_dtype"):
        given: Any = {dtype: "bfloat16"}
        expected = f"^{dtype} is the str 'bfloat16': expected a torch.dtype. Give torch.bfloat16$"
        with pytest.raises(ArgumentError, match=expected):
            amp_script.trace_and_freeze(model, x, **given)


@pytest.mark.parametrize(
    ("lazy", "name"),
    [(nn.LazyLinear(3), "weight"), (nn.LazyBatchNorm1d(affine=False), "running_mean")],
)
def test_a_lazy_module_has_to_run_first(lazy: nn.Module, name: str) -> None:
    x, model = torch.rand(3, 4), nn.Sequential(lazy).eval()
    with pytest.raises(TracingError, match=rf"0\.{name} has no shape yet.* run the model once"):
        amp_script.trace_and_freeze(model, x)
    model(x)
    assert_same(amp_script.trace_and_freeze(model, x, compute="native")(x), eager(model, x))


def test_results_that_are_no_structure_of_tensors() -> None:
    x = torch.rand(3, 4)
    with pytest.raises(StructureError, match=r"output\['a'\] is a builtins.object"):
        amp_script.trace_and_freeze(lambda x: {"a": object()}, x)
    with pytest.raises(StructureError, match=r"output is a .*dict: its key 0 is a int: expected"):
        amp_script.trace_and_freeze(lambda x: {"a": x, 0: x}, x)
    with pytest.raises(TracingError, match="returned no tensor"):
        amp_script.trace_and_freeze(lambda x: (1, None), x)


def reads_data(x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:
        return x @ x.t()
    return x


def reads_sizes(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.size(0) > 1 else x


def test_a_branch_on_data_is_shown_with_its_line() -> None:
    x = torch.rand(3, 4)
    with pytest.warns(TracingWarning, match=r"values of the example inputs.*\n.*if x.sum\(\) > 0"):
        amp_script.trace_and_freeze(reads_data, x, compute="native")
    with pytest.warns(TracingWarning, match="if x.sum"):  # sizes that vary say nothing about it
        amp_script.trace_and_freeze(
            reads_data, x, compute="native", check_inputs=[torch.rand(5, 4)]
        )


def test_a_branch_on_sizes_is_shown_until_other_sizes_are_checked() -> None:
    x = torch.rand(3, 4)
    with pytest.warns(TracingWarning, match=r"sizes of the example inputs.*\n.*x.size\(0\) > 1"):
        amp_script.trace_and_freeze(reads_sizes, x, compute="native")
    frozen = amp_script.trace_and_freeze(
        reads_sizes, x, compute="native", check_inputs=[torch.rand(5, 4)]
    )
    assert frozen.metadata.inputs[0].shape == (None, 4)


def loops_over_a_range(x: torch.Tensor) -> torch.Tensor:
    total = x[0] @ x.t()
    for i in range(1, x.shape[0] - 1):
        total = total + x[i] @ x.t()
    return total


def repeats_a_list(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x @ x.t()] * x.shape[0])


def picks_from_a_list(x: torch.Tensor) -> torch.Tensor:
    return [x, x + 1, x + 2, x + 3, x + 4][x.shape[0] - 1] @ x.t()


def takes_the_front_of_a_list(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([x @ x.t()] * 9)[: x.shape[0]] + len([1, 2, 3, 4, 5, 6][: x.shape[0]])


@pytest.mark.parametrize(
    ("model", "line"),
    [
        (loops_over_a_range, r"for i in range\(1, x\.shape\[0\] - 1\):"),
        (repeats_a_list, r"return torch\.cat"),
        (picks_from_a_list, r"return \[x, x \+ 1"),
        (takes_the_front_of_a_list, r"return torch\.stack"),
    ],
)
def test_a_number_that_python_takes_from_sizes_is_shown(
    model: Callable[..., Any], line: str
) -> None:
    x = torch.rand(3, 4)
    with pytest.warns(TracingWarning, match=rf"sizes of the example inputs.*\n.*{line}"):
        amp_script.trace_and_freeze(model, x, compute="native")
    with pytest.raises(
        VerificationError, match=r"held fast when traced, at \S+test_tracing\.py:\d+: "
    ):
        amp_script.trace_and_freeze(model, x, compute="native", check_inputs=[torch.rand(5, 4)])


def picks_by_data(x: torch.Tensor) -> torch.Tensor:
    return [x, x + 1, x + 2, x + 3][x[0].argmax()] @ x.t()


def test_a_number_that_python_takes_from_data_is_shown() -> None:
    with pytest.warns(TracingWarning, match=r"values of the example inputs.*\n.*return \[x, x"):
        amp_script.trace_and_freeze(picks_by_data, torch.rand(3, 4), compute="native")


def gives_sizes_to_operators(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    n = x.shape[0]
    written = x.clone()
    written[: n - 1, 0] = 0
    return (
        torch.zeros(n) + n,
        torch.arange(n, device=x.device),
        x.view(n, -1),
        x.unfold(0, n, n),
        x.chunk(n - n + 1)[0],
        x.diagonal(n - n),
        torch.triu(x, n),
        torch.nn.functional.one_hot(torch.arange(2), n),
        x[:, : n - 1],
        x[n - 1 :, None, :n],
        x[n - 1],
        x[torch.arange(n)],
        x[..., x.argmax() % n],
        written @ x.t(),
    )


def test_sizes_that_operators_take_are_recorded_and_not_shown() -> None:
    x, longer = torch.rand(3, 4), torch.rand(4, 4)
    frozen = amp_script.trace_and_freeze(gives_sizes_to_operators, x, compute="native")
    with amp_script.autocast("cpu"):
        want = gives_sizes_to_operators(longer)
    assert_same(frozen(longer), want)


class LoopsOverItsWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(3, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = [x @ self.weight[i] for i in range(self.weight.shape[0])]
        return torch.stack(rows)[[1, 2][torch.tensor(1)]]


@pytest.mark.filterwarnings("ignore:torch.tensor results::")
def test_sizes_of_weights_and_constants_are_not_shown() -> None:
    amp_script.trace_and_freeze(LoopsOverItsWeight().eval(), torch.rand(3, 4), compute="native")


def scales_by_length(x: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"kept": x * 2, "scaled": x.sum(0) * len(x)}


def flattens(x: torch.Tensor) -> torch.Tensor:
    return x.view(int(x.size(0)) * 4) * 2


def test_check_inputs_say_which_output_differs_and_where() -> None:
    with pytest.raises(VerificationError) as raised:
        amp_script.trace_and_freeze(
            scales_by_length, torch.rand(3, 4), compute="native", check_inputs=[torch.rand(5, 4)]
        )
    kept, scaled = raised.value.report.outputs
    assert kept.bit_equal
    assert not scaled.bit_equal
    message = str(raised.value)
    assert "check_inputs[0]: differs from eager autocast in output['scaled']" in message
    assert '"scaled": x.sum(0) * len(x)' in message
    assert "mul(_, 3) with the example, mul(_, 5) with these inputs" in message


def test_check_inputs_of_another_structure_are_named() -> None:
    def model(tensors: list[torch.Tensor], flag: bool = True) -> torch.Tensor:
        return torch.stack([tensor @ tensor.t() for tensor in tensors]) * (2 if flag else 3)

    x = torch.rand(3, 4)
    for inputs, message in (
        (([x],), r"does not fit the program: .*\n  tensors\[1\]: expected .*given nothing"),
        (([x, x, x],), r"not fit the program: .*\n  tensors\[2\]: expected nothing, given float32"),
        (([x, x], False), "the program fails: .*flag was True when the program was traced"),
        (
            ([x, x], True, x),
            r"check_inputs\[0\]: the inputs do not fit the model: too many positional arguments",
        ),
        ((), r"check_inputs\[0\]: no tensor among"),
        (([x, x.double()],), r"check_inputs\[0\]: tensors\[1\] is float64: expected float32, as"),
        (([x, x.to_mkldnn()],), r"check_inputs\[0\]: tensors\[1\] is a oneDNN tensor"),
    ):
        with pytest.raises(TracingError, match=message):
            amp_script.trace_and_freeze(model, ([x, x], True), check_inputs=[inputs])


def test_sizes_that_vary_are_told_by_name() -> None:
    def model(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a @ b

    frozen = amp_script.trace_and_freeze(
        model,
        {"a": torch.rand(3, 4), "b": torch.rand(4, 3)},
        check_inputs=[{"b": torch.rand(4, 3), "a": torch.rand(5, 4)}],
    )
    assert [spec.shape for spec in frozen.metadata.inputs] == [(None, 4), (4, 3)]


def test_check_inputs_may_have_the_dtypes_of_the_border() -> None:
    model, x = nn.Linear(4, 4).eval(), torch.rand(3, 4)
    given = [torch.rand(5, 4), torch.rand(5, 4).to(torch.float16)]
    amp_script.trace_and_freeze(model, x, input_dtype=torch.float16, check_inputs=given)
    with pytest.raises(
        TracingError, match=r"check_inputs\[1\]: input is float16: expected float32"
    ):
        amp_script.trace_and_freeze(model, x, check_inputs=given)


def test_check_inputs_say_where_the_program_fails() -> None:
    with pytest.raises(TracingError) as raised:
        amp_script.trace_and_freeze(
            flattens, torch.rand(3, 4), compute="native", check_inputs=[torch.rand(5, 4)]
        )
    message = str(raised.value)
    assert "check_inputs[0]: the program fails" in message
    assert "x: float32 [5, 4]" in message
    assert "return x.view(int(x.size(0)) * 4) * 2" in message
    assert "view(_, [12]) with the example, view(_, [20]) with these inputs" in message


def test_sizes_that_are_returned_are_numbers() -> None:
    def sizes(x: torch.Tensor) -> tuple[int, int, torch.Tensor]:
        return x.size(0), x.shape[1] * 2, x * 2

    examples = [torch.rand(3, 4), torch.rand(5, 6)]
    frozen = amp_script.trace_and_freeze(
        sizes, examples[0], compute="native", check_inputs=examples[1:]
    )
    for x in examples:
        assert_same(frozen(x), sizes(x))
    assert type(frozen(examples[0])[0]) is int


def test_an_input_that_is_a_view_keeps_the_storage_around_it() -> None:
    x = torch.rand(14)[:10].view(2, 5)

    def looks_beyond_its_view(x: torch.Tensor) -> torch.Tensor:
        return torch.as_strided(x, (2, 2), (1, 2), storage_offset=10) * 2

    frozen = amp_script.trace_and_freeze(looks_beyond_its_view, x, compute="native")
    assert torch.equal(frozen(x), looks_beyond_its_view(x))


class Exporting(nn.Module):
    """Methods that are compiled, with regions, early exits out of them, and submodules in them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.parts = nn.Linear(8, 8), nn.ModuleList([nn.Linear(8, 8)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x)

    @torch.jit.export
    def exported(self, x: torch.Tensor):
        with torch.autocast("cpu", dtype=torch.float16):
            if x.dim() == 3:
                return x
            y = self.parts[0](x)
            with torch.autocast("cpu", enabled=False):
                for row in y.float():
                    if bool(row.sum() > 1):
                        break
                    y = torch.mm(y.float(), y.float().t()).half()
        return torch.mm(y, x)

    def preserved(self, x: torch.Tensor):
        with torch.autocast("cpu", enabled=False):
            if x.dim() == 3:
                return x
            y = torch.mm(x, x)
        return self.first(y)


def test_compiled_methods_with_regions_and_early_exits() -> None:
    torch.manual_seed(0)
    model = Exporting().eval()
    x = torch.randn(8, 8)
    frozen = amp_script.trace_and_freeze(
        model, x, compute="native", preserved_attrs=["preserved"], keep_float32=[]
    )
    for name in ("forward", "exported", "preserved"):
        for given in (x,) if name == "forward" else (x, x[None]):
            want = eager(getattr(model, name), given)
            for _ in range(3):
                assert_same(getattr(frozen, name)(given), want)


@pytest.mark.parametrize("name", ["My Net", "Ünï", "a.b", "1x", "class", "torch", "forward", "λ"])
def test_a_model_of_any_name_is_saved(name: str, tmp_path: Path) -> None:
    model = type(name, (Net,), {})().eval()
    x = torch.randn(4, 8)
    frozen = amp_script.trace_and_freeze(model, x, compute="native")
    amp_script.save(frozen, tmp_path / "model.pt")
    for loaded in (amp_script.load(tmp_path / "model.pt"), torch.jit.load(tmp_path / "model.pt")):
        assert_same(loaded(x), eager(model, x))
