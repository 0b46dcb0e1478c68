"""Operators whose bits depend on whether a weight requires gradients, frozen."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from agreement import assert_same
from torch import nn

import amp_script

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

PRODUCTS: dict[str, Product] = {
    "matmul": lambda x, weight, vector: x @ weight,
    "matmul with a vector": lambda x, weight, vector: x @ vector,
    "matmul from the left": lambda x, weight, vector: weight.t() @ x.mT,
    "matmul with a vector from the left": lambda x, weight, vector: vector @ x.mT,
    "matmul of what is contiguous, from the left": lambda x, weight, vector: (
        weight.t() @ x.mT.contiguous()
    ),
    "matmul of what is contiguous with a vector, from the left": lambda x, weight, vector: (
        vector @ x.mT.contiguous()
    ),
    "linear": lambda x, weight, vector: nn.functional.linear(x, weight.t()),
    "linear with a bias": lambda x, weight, vector: nn.functional.linear(
        x, weight.t(), weight[0] * 1.0
    ),
}


class Model(nn.Module):
    def __init__(self, product: Product) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.product = product
        self.weight, self.vector = nn.Parameter(torch.randn(16, 24)), nn.Parameter(torch.randn(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return self.product(x.transpose(0, 1), self.weight, self.vector)


X = torch.linspace(-3, 3, 160).reshape(2, 5, 16).sin()


@pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS)
@pytest.mark.parametrize("grad", [False, True])
def test_products_are_folded_where_eager_mode_folds_them(product: Product, grad: bool) -> None:
    model = Model(product).eval()
    frozen = amp_script.trace_and_freeze(model, X, compute="native")
    model.requires_grad_(False)
    frozen_without = amp_script.trace_and_freeze(model, X, compute="native")
    other = torch.cat([X, X.cos()])
    for x in (X, other, X[:, :0]):
        without = model(x)
        model.requires_grad_(True)
        with torch.set_grad_enabled(grad):
            folded = model(x).detach()
            assert_same(frozen(x).detach(), folded)
            assert_same(frozen_without(x).detach(), without)
        model.requires_grad_(False)
        if x is X:
            assert not torch.equal(folded, without), "the paths do not differ: nothing is tested"


def test_an_encoder_layer_in_a_float32_block() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(16, 16)
            self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            with torch.autocast("cpu", enabled=False):
                return self.layer(x.float())

    model = Block().eval()
    frozen = amp_script.trace_and_freeze(model, X, compute="native")
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                want = model(X).detach()
            assert_same(frozen(X).detach(), want)


def _symmetric(x: torch.Tensor) -> torch.Tensor:
    return x + x.mT


OTHERS: dict[str, Product] = {
    "attention with a mask": lambda x, weight, vector: nn.functional.scaled_dot_product_attention(
        x, x, x, attn_mask=weight[:5, :5].contiguous()
    ),
    "attention with a computed mask": lambda x, weight, vector: (
        nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=weight[:5, :5] * 2)
    ),
    "singular values": lambda x, weight, vector: torch.linalg.svdvals(x.float() * vector),
    "eigenvalues": lambda x, weight, vector: torch.linalg.eigvalsh(
        _symmetric(x.float().mT @ x.float() * vector)
    ),
    "attention with a mask that no weight is in": lambda x, weight, vector: (
        nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=x[0, :, :5])
    ),
}


@pytest.mark.parametrize("operator", OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("enabled", [False, True])
def test_other_operators(operator: Product, enabled: bool) -> None:
    class Block(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled):
                return self.product(x, self.weight, self.vector)

    model = Block(operator).eval()
    frozen = amp_script.trace_and_freeze(model, X, compute="native")
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                want = model(X).detach()
            for _ in range(3):
                assert_same(frozen(X).detach(), want)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mask = nn.Parameter(torch.randn(5, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=self.mask)


def test_a_mask_whose_cast_eager_autocast_keeps() -> None:
    model = Masked().eval()
    frozen = amp_script.trace_and_freeze(model, X, compute="native")
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                want = model(X).detach()
            assert_same(frozen(X).detach(), want)


def test_other_sizes_may_be_contiguous() -> None:
    model = Model(
        lambda x, weight, vector: nn.functional.linear(x, weight.t(), weight[0] * 1.0)
    ).eval()
    batches = [torch.randn(1, 40, 16), torch.randn(9, 40, 16), torch.randn(9, 1, 16)]
    for example in batches:
        frozen = amp_script.trace_and_freeze(model, example, compute="native")
        for x in batches:
            with torch.no_grad():
                assert_same(frozen(x), model(x))


def test_what_an_input_requires_is_left_to_the_input() -> None:
    def product(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        return x.transpose(0, 1).float() @ matrix.t()

    class Plain(nn.Module):
        def forward(self, x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", enabled=False):
                return product(x, matrix)

    model = Plain().eval()
    matrix = torch.linspace(-1, 1, 384).reshape(24, 16).cos()
    examples = [matrix, matrix.clone().requires_grad_()]
    for example in examples:
        frozen = amp_script.trace_and_freeze(model, (X, example), compute="native")
        for given in examples:
            assert_same(frozen(X, given).detach(), model(X, given).detach())
