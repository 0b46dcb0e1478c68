"""Arguments for every operator that is taken apart: shapes, dtypes and options drawn at random."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch

from amp_script.lowering.composites import interpolation

Arguments = tuple[object, ...]
Draw = Callable[[random.Random], Arguments]

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
DTYPES = (*FLOATS, *FLOATS, torch.float64, torch.complex64, torch.int64)


def tensor(r: random.Random, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(r.randrange(1 << 30))
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.randint(1, 5, shape, generator=generator)
    wide = torch.complex64 if dtype.is_complex else torch.float32
    return torch.randn(shape, generator=generator, dtype=wide).to(dtype)


def dtype(r: random.Random) -> torch.dtype:
    return r.choice(DTYPES)


def mostly(r: random.Random, usual: torch.dtype) -> torch.dtype:
    """The usual dtype, or now and then another."""
    return usual if r.random() < 0.85 else dtype(r)


def sizes(r: random.Random, most: int, *, empty: float = 0.05) -> list[int]:
    return [0 if r.random() < empty else r.choice([1, 2, 3]) for _ in range(r.randint(0, most))]


# --- contraction ----------------------------------------------------------------------------------


def tensordot(r: random.Random) -> Arguments:
    kind = dtype(r)
    shared = sizes(r, 3)
    broadcast = [size if r.random() < 0.85 else 1 for size in shared]
    before, after = sizes(r, 2), sizes(r, 2)
    one = tensor(r, before + shared, kind)
    other = tensor(r, broadcast + after, mostly(r, kind))
    dims_one = [len(before) + i for i in range(len(shared))]
    dims_other = list(range(len(shared)))
    if r.random() < 0.3:
        dims_one = [dim - one.dim() for dim in dims_one]
    if r.random() < 0.3:
        dims_one.reverse()
        dims_other.reverse()
    return one, other, dims_one, dims_other


def inner(r: random.Random) -> Arguments:
    kind, last = dtype(r), r.choice([0, 1, 3, 4])

    def one(kind: torch.dtype) -> torch.Tensor:
        return tensor(r, [*sizes(r, 2), last] if r.random() < 0.85 else [], kind)

    return one(kind), one(mostly(r, kind))


EQUATIONS = (
    "ij,jk->ik",
    "bij,bjk->bik",
    "...ij,...jk->...ik",
    "ij,ij->",
    "ij->ji",
    "ii->i",
    "ii",
    "ij,ij",
    "bi,bj,kij->bk",
    "bhid,bhjd->bhij",
    "i,j->ij",
    "a...,...b->ab...",
    "ij,j",
    "ijk,jil->kl",
    "ab,bc,cd->ad",
    "iij,jk->ik",
    "...->...",
    "i...->...",
    "ij,kj,lj->ikl",
    "Ab,bC->AC",
    " i j , j k -> i k ",
    "b...i,...ij->b...j",
    "ij->",
    "ijk->i",
    "jk,ik->ij",
)


def einsum(r: random.Random) -> Arguments:
    equation = r.choice(EQUATIONS)
    few = [1, 2, 3, 0] if r.random() < 0.3 else [2, 3]
    size_of: dict[str, int] = {}
    ellipsis = [r.choice([1, 2, 3]) for _ in range(2)]
    kind = dtype(r)
    operands = []
    for text in equation.replace(" ", "").split("->")[0].split(","):
        before, dots, after = text.partition("...")
        shape = []
        for part in (before, after):
            for label in part:
                size_of.setdefault(label, r.choice(few))
                shape.append(size_of[label] if r.random() < 0.92 else 1)
            if part is before and dots:
                shape += ellipsis[2 - r.randint(0, 2) :]
        operands.append(tensor(r, shape, kind if not operands else mostly(r, kind)))
    path = None
    if len(operands) == 3 and r.random() < 0.6:
        path = r.choice([[0, 1, 0, 1], [1, 2, 0, 1], [0, 2, 0, 1], [2, 0, 1, 0]])
    return equation, operands, path


def bilinear(r: random.Random) -> Arguments:
    kind, batch = dtype(r), sizes(r, 2)
    i, j, o = (r.choice([1, 2, 3]) for _ in range(3))
    weight = tensor(r, [o, i, j], mostly(r, kind))
    bias = r.choice([None, tensor(r, [o], kind)])
    return tensor(r, [*batch, i], kind), tensor(r, [*batch, j], kind), weight, bias


def trilinear(r: random.Random) -> Arguments:
    kind = dtype(r)
    b, i, j, o = (r.choice([1, 2, 3]) for _ in range(4))
    one, other = tensor(r, [b, i], kind), tensor(r, [b, j], kind)
    return one, tensor(r, [o, i, j], kind), other, [1, 3], [0], [1, 2], [2, 3], r.choice([0, 1, 2])


def matrices(r: random.Random) -> Arguments:
    kind, count = dtype(r), r.randint(1, 6)
    around = (
        [3] * (count + 1) if r.random() < 0.3 else [r.choice([2, 3, 4]) for _ in range(count + 1)]
    )
    chain = [tensor(r, around[i : i + 2], kind) for i in range(count)]
    if r.random() < 0.2:
        chain[0] = chain[0][0]
    if r.random() < 0.2:
        chain[-1] = chain[-1][..., 0]
    if r.random() < 0.1:
        chain[0] = chain[0].to(dtype(r))
    return (chain,)


# --- linear algebra -------------------------------------------------------------------------------


def square_matrix(r: random.Random, kind: torch.dtype) -> torch.Tensor:
    n = r.choice([0, 1, 2, 3])
    return tensor(r, [*sizes(r, 1), n, n], kind)


def matrix_power(r: random.Random) -> Arguments:
    return square_matrix(r, dtype(r)), r.randint(-4, 12)


def polar(r: random.Random) -> Arguments:
    narrow = sorted(r.choices([1, 2, 3, 4], k=2), reverse=True)
    return (tensor(r, [*sizes(r, 1), *narrow], r.choice([*FLOATS, torch.complex64])),)


def polar_out(r: random.Random) -> Arguments:
    (matrix,) = polar(r)
    assert isinstance(matrix, torch.Tensor)
    return matrix, torch.empty([0], dtype=matrix.dtype), torch.empty([0], dtype=matrix.dtype)


def matrix_exp(r: random.Random) -> Arguments:
    return (square_matrix(r, r.choice([*FLOATS, torch.float64])),)


def matrix_and_hermitian(r: random.Random) -> tuple[torch.Tensor, bool]:
    kind = r.choice([torch.float32, torch.float32, dtype(r)])
    if r.random() < 0.4:
        matrix = square_matrix(r, kind)
        return matrix + matrix.mH, True
    shape = [*sizes(r, 1), r.choice([1, 2, 3, 0]), r.choice([1, 2, 3, 5])]
    return tensor(r, shape, kind), False


def tolerance(r: random.Random) -> torch.Tensor:
    return torch.tensor(r.choice([0.1, 1e-3, 0.0]), dtype=torch.float64)


def pinv(r: random.Random) -> Arguments:
    matrix, hermitian = matrix_and_hermitian(r)
    return matrix, r.choice([1e-15, 0.1]), hermitian


def pinv_floats(r: random.Random) -> Arguments:
    matrix, hermitian = matrix_and_hermitian(r)
    return matrix, r.choice([None, 1e-3, 0.1]), r.choice([None, 1e-3, 0.1]), hermitian


def pinv_tensors(r: random.Random) -> Arguments:
    matrix, hermitian = matrix_and_hermitian(r)
    return matrix, r.choice([None, tolerance(r)]), r.choice([None, tolerance(r)]), hermitian


def pinv_rcond(r: random.Random) -> Arguments:
    matrix, hermitian = matrix_and_hermitian(r)
    return matrix, tolerance(r), hermitian


def pinverse(r: random.Random) -> Arguments:
    return matrix_and_hermitian(r)[0], r.choice([1e-15, 0.1])


def norm(r: random.Random) -> Arguments:
    return (
        tensor(r, sizes(r, 3, empty=0), dtype(r)),
        r.choice([None, 2, 1, float("inf"), -1, 0, 2.0, 3]),
        r.choice([None, None, [0], [0, 1], [-1, 0]]),
        r.random() < 0.5,
        r.choice([None, None, torch.float32, torch.float64]),
    )


def norm_in_words(r: random.Random) -> Arguments:
    x, _, dim, keepdim, kind = norm(r)
    return x, r.choice(["fro", "nuc"]), dim, keepdim, kind


def vecdot(r: random.Random) -> Arguments:
    kind = dtype(r)
    shapes = [3], [2, 3]
    return tensor(r, r.choice(shapes), kind), tensor(r, r.choice(shapes), mostly(r, kind)), -1


def vander(r: random.Random) -> Arguments:
    return tensor(r, sizes(r, 2, empty=0), dtype(r)), r.choice([None, 2, 3, 4])


# --- statistics -----------------------------------------------------------------------------------


def cov(r: random.Random) -> Arguments:
    shape = [r.choice([1, 2, 3, 4]) for _ in range(r.randint(0, 2))]
    count = shape[-1] if shape else 1
    weights = tensor(r, [count], torch.float32).abs().to(r.choice(FLOATS))
    return (
        tensor(r, shape, dtype(r)),
        r.choice([0, 1, 2]),
        r.choice([None, None, tensor(r, [count], torch.int64)]),
        r.choice([None, None, weights]),
    )


def corrcoef(r: random.Random) -> Arguments:
    return cov(r)[:1]


# --- losses ---------------------------------------------------------------------------------------


def scores(r: random.Random) -> tuple[torch.Tensor, list[int], int, torch.Tensor | None]:
    """Scores, the shape of class indices, the number of classes, weights of classes."""
    batch, classes, dims = r.choice([1, 2, 3, 0]), r.choice([1, 2, 4]), r.choice([1, 2, 3, 4, 5])
    space = [r.choice([1, 2, 3]) for _ in range(dims - 2)]
    shape = [classes] if dims == 1 else [batch, classes, *space]
    kind = dtype(r)
    weight = tensor(r, [classes], torch.float32).abs()
    weight = weight.to(kind) if kind in FLOATS and r.random() < 0.5 else weight
    indices = [] if dims == 1 else [batch, *space]
    return tensor(r, shape, kind), indices, classes, r.choice([None, weight])


def cross_entropy(r: random.Random) -> Arguments:
    x, indices, classes, weight = scores(r)
    smoothing = r.choice([0.0, 0.0, 0.1, 1.0])
    if r.random() < 0.4:
        target = tensor(r, list(x.shape), torch.float32).abs().to(r.choice(FLOATS))
        return x, target, weight, r.choice([0, 1, 2]), -100, smoothing
    target = tensor(r, indices, torch.int64) % classes
    return x, target, weight, r.choice([0, 1, 2]), r.choice([-100, 0]), smoothing


def nll_loss(r: random.Random) -> Arguments:
    x, indices, classes, weight = scores(r)
    target = tensor(r, indices, torch.int64) % classes
    return x, target, weight, r.choice([0, 1, 2]), r.choice([-100, 0])


def soft_margin(r: random.Random) -> Arguments:
    kind = dtype(r)
    return tensor(r, [2, 2], kind), tensor(r, [2, 2], mostly(r, kind)), r.choice([0, 1, 2])


# --- padding, convolution, interpolation, normalization -------------------------------------------


def padded(r: random.Random) -> tuple[torch.Tensor, list[int]]:
    space = [r.choice([3, 4]) for _ in range(r.choice([1, 2, 3]))]
    x = tensor(r, [r.choice([1, 2]) for _ in range(r.choice([1, 2]))] + space, dtype(r))
    count = len(space) if r.random() < 0.85 else r.choice([1, 2, 3])
    return x, [r.choice([0, 1, 2, -1]) for _ in range(2 * min(count, x.dim()))]


def pad_enum(r: random.Random) -> tuple[torch.Tensor, list[int], int, float | None]:
    x, amounts = padded(r)
    mode = r.choice([0, 1, 2, 3])
    if mode == 2:  # with negative amounts, torch leaves a part of the result as it found it
        amounts = [max(amount, 0) for amount in amounts]
    return x, amounts, mode, r.choice([None, None, 0.0, 1.5])


def pad(r: random.Random) -> Arguments:
    x, amounts, mode, value = pad_enum(r)
    return x, amounts, ("reflect", "replicate", "circular", "constant")[mode], value


def convolution(dims: int) -> Draw:
    def draw(r: random.Random) -> Arguments:
        kind, groups = dtype(r), r.choice([1, 2])
        batch = [r.choice([1, 2])] if r.random() < 0.7 else []
        x = tensor(r, [*batch, 2, *(r.choice([3, 4, 5]) for _ in range(dims))], kind)
        weight = tensor(r, [2, 2 // groups, *(r.choice([1, 2, 3]) for _ in range(dims))], kind)
        bias = r.choice([None, tensor(r, [2], kind)])
        padding = r.choice(["same", "valid", "same"])
        return x, weight, bias, [1], padding, [r.choice([1, 1, 2])], groups

    return draw


def transposed_convolution(r: random.Random) -> Arguments:
    kind, groups = dtype(r), r.choice([1, 2])
    batch = [r.choice([1, 2])] if r.random() < 0.7 else []
    x = tensor(r, [*batch, 2, *(r.choice([1, 2, 3]) for _ in range(3))], kind)
    weight = tensor(r, [2, 2 // groups, *(r.choice([1, 2, 3]) for _ in range(3))], kind)
    bias = r.choice([None, tensor(r, [2], kind)])
    stride, output_padding = r.choice([([1], [0]), ([2], [0]), ([2, 3, 2], [1, 0, 1])])
    padding, dilation = r.choice([[0], [1, 0, 1]]), [r.choice([1, 1, 2])]
    return x, weight, bias, stride, padding, output_padding, groups, dilation


def interpolate(dims: int, *, aligned: bool) -> Draw:
    def draw(r: random.Random) -> Arguments:
        shape = [r.choice([1, 2]), r.choice([1, 2]), *(r.choice([2, 3, 4]) for _ in range(dims))]
        x = tensor(r, shape, dtype(r))
        size, scales = None, None
        if r.random() < 0.5:
            size = [r.choice([1, 2, 5]) for _ in range(dims)]
        else:
            scales = [r.choice([0.5, 1.0, 1.7, 2.0]) for _ in range(dims)]
        return (x, size, r.random() < 0.5, scales) if aligned else (x, size, scales)

    return draw


def instance_norm(r: random.Random) -> Arguments:
    kind = r.choice(FLOATS)
    affine = (tensor(r, [3], kind), tensor(r, [3], kind)) if r.random() < 0.5 else (None, None)
    stats: tuple[object, object] = (None, None)
    if r.random() < 0.5:
        stats = (tensor(r, [3], kind), tensor(r, [3], kind).abs() + 0.5)
    by_input = stats[0] is None or r.random() < 0.5
    return (tensor(r, [2, 3, 4], kind), *affine, *stats, by_input, 0.1, 1e-5, False)


# --- element by element ---------------------------------------------------------------------------


def one(r: random.Random) -> Arguments:
    return (tensor(r, sizes(r, 2), dtype(r)),)


def two(r: random.Random) -> Arguments:
    kind = dtype(r)
    return tensor(r, [2, 3], kind), tensor(r, r.choice([[2, 3], [3], []]), mostly(r, kind))


def mvlgamma(r: random.Random) -> Arguments:
    return tensor(r, sizes(r, 2), r.choice([*FLOATS, torch.float64])) + 3, r.choice([1, 2, 3])


def sum_to_size(r: random.Random) -> Arguments:
    shape = sizes(r, 3, empty=0)
    kept = shape[r.randint(0, len(shape)) :]
    return tensor(r, shape, dtype(r)), [size if r.random() < 0.6 else 1 for size in kept]


def trapezoid(r: random.Random) -> tuple[torch.Tensor, torch.Tensor, int]:
    shape = [r.choice([1, 2, 3, 4]) for _ in range(r.choice([1, 2, 3]))]
    dim = r.randrange(-len(shape), len(shape))
    kind = dtype(r)
    x = r.choice([[shape[dim]], shape, shape[-1:]])
    return tensor(r, shape, kind), tensor(r, x, mostly(r, kind)), dim


def trapezoid_of_step(r: random.Random) -> Arguments:
    y, _, dim = trapezoid(r)
    return y, r.choice([1.0, 0.5]), dim


def powers(r: random.Random) -> Arguments:
    return tensor(r, [3], dtype(r)), r.choice([None, 0, 1, 4]), r.random() < 0.5


def pairwise_distance(r: random.Random) -> Arguments:
    kind = dtype(r)
    a, b = tensor(r, r.choice([[2, 3], [3]]), kind), tensor(r, [2, 3], mostly(r, kind))
    return a, b, r.choice([2.0, 1.0]), 1e-6, r.random() < 0.5


def norm_except_dim(r: random.Random) -> Arguments:
    x = tensor(r, [r.choice([1, 2, 3]) for _ in range(r.choice([1, 2, 3]))], dtype(r))
    return x, 2, r.randrange(-1, x.dim())


def weight_norm(r: random.Random) -> Arguments:
    kind, dim = dtype(r), r.choice([0, 1, 2])
    v = tensor(r, [2, 3, 2], kind)
    return v, tensor(r, [size if i == dim else 1 for i, size in enumerate(v.shape)], kind), dim


# --- recurrent ------------------------------------------------------------------------------------

_GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


def recurrent(name: str, *, packed: bool) -> Draw:
    gates = _GATES[name]

    def draw(r: random.Random) -> Arguments:
        kind = r.choice(FLOATS)
        features, hidden = r.choice([1, 3]), r.choice([1, 2, 4])
        layers, directions = r.choice([1, 2]), r.choice([1, 2])
        batch, time, biases = r.choice([1, 3]), r.choice([1, 2, 4]), r.random() < 0.7
        projected = 1 if name == "lstm" and hidden > 1 and r.random() < 0.3 else 0
        width = projected or hidden
        params = []
        for layer in range(layers):
            for _ in range(directions):
                into = features if layer == 0 else width * directions
                params += [tensor(r, [gates * hidden, n], kind) for n in (into, width)]
                params += [tensor(r, [gates * hidden], kind) for _ in range(2 * biases)]
                params += [tensor(r, [width, hidden], kind) for _ in range(projected)]
        state: object = tensor(r, [layers * directions, batch, width], kind)
        if name == "lstm":
            state = [state, tensor(r, [layers * directions, batch, hidden], kind)]
        options = (state, params, biases, layers, 0.0, r.random() < 0.5, directions == 2)
        if packed:
            lengths = sorted([batch, *(r.randint(1, batch) for _ in range(time - 1))], reverse=True)
            return (tensor(r, [sum(lengths), features], kind), torch.tensor(lengths), *options)
        batch_first = r.random() < 0.5
        shape = [batch, time, features] if batch_first else [time, batch, features]
        return (tensor(r, shape, kind), *options, batch_first)

    return draw


def cell(name: str) -> Draw:
    gates = _GATES[name]

    def draw(r: random.Random) -> Arguments:
        kind = r.choice(FLOATS)
        features, hidden, batch = r.choice([1, 3]), r.choice([1, 2, 4]), r.choice([1, 2, 0])
        state: object = tensor(r, [batch, hidden], kind)
        if name == "lstm":
            state = [state, tensor(r, [batch, hidden], kind)]
        weights = [tensor(r, [gates * hidden, n], kind) for n in (features, hidden)]
        biases = [r.choice([None, tensor(r, [gates * hidden], kind)]) for _ in range(2)]
        return (tensor(r, [batch, features], r.choice(FLOATS)), state, *weights, *biases)

    return draw


def encoder_layer(r: random.Random) -> Arguments:
    kind = torch.float32
    heads, width, inner_width = 2, 4, 6
    shapes = [[3 * width, width], [3 * width], [width, width], [width]]
    norms = [[width]] * 4
    feed = [[inner_width, width], [inner_width], [width, inner_width], [width]]
    src = tensor(r, [r.choice([1, 2]), r.choice([1, 3]), width], kind)
    attention = [tensor(r, shape, kind) for shape in shapes]
    rest = [tensor(r, shape, kind) for shape in [*norms, *feed]]
    flags = (r.random() < 0.5, r.random() < 0.5, 1e-5)
    return (src, width, heads, *attention, *flags, *rest, None, None)


# --- sparse ---------------------------------------------------------------------------------------


def sparse_mm(r: random.Random) -> Arguments:
    dense = tensor(r, [3, 3], torch.float32)
    sparse = tensor(r, [3, 3], torch.float32).relu().to_sparse()
    return r.choice([(sparse, dense), (dense, sparse), (sparse, sparse)])


def sparse_addmm(r: random.Random) -> Arguments:
    a, b = tensor(r, [3, 3], torch.float32), tensor(r, [3, 3], torch.float32)
    return a, b.relu().to_sparse(), a, r.choice([0, 1]), r.choice([1, 2])


# --- into a given tensor --------------------------------------------------------------------------


def into(draw: Draw) -> Draw:
    """The same arguments and an output, most often of the first tensor's dtype."""

    def with_output(r: random.Random) -> Arguments:
        arguments = draw(r)
        first = arguments[0][0] if isinstance(arguments[0], list) else arguments[0]
        assert isinstance(first, torch.Tensor)
        kind = first.dtype if r.random() < 0.5 else r.choice(FLOATS)
        return (*arguments, torch.empty([0], dtype=kind))

    return with_output


def matrix_2x2(*rest: object) -> Draw:
    return lambda r: (tensor(r, [2, 2], dtype(r)), *rest)


def positive(*rest: object) -> Draw:
    return lambda r: ((torch.eye(2) * 2 + 0.1).to(r.choice([*FLOATS, torch.float64])), *rest)


def vectors(*rest: object) -> Draw:
    return lambda r: (tensor(r, [2], kind := dtype(r)), tensor(r, [2], mostly(r, kind)), *rest)


def matmul(r: random.Random) -> Arguments:
    kind = dtype(r)
    return tensor(r, r.choice([[2], [2, 2]]), kind), tensor(r, r.choice([[2], [2, 2]]), kind)


def logits(r: random.Random) -> Arguments:
    target = tensor(r, [2, 2], torch.float32).sigmoid().to(r.choice(FLOATS))
    return tensor(r, [2, 2], r.choice(FLOATS)), target, None, None, r.choice([0, 1, 2])


def convolved(*rest: object) -> Draw:
    def draw(r: random.Random) -> Arguments:
        kind = r.choice(FLOATS)
        return (tensor(r, [1, 2, 3], kind), tensor(r, [2, 2, 1], kind), None, [1], [0], [1], *rest)

    return draw


def conv_tbc(r: random.Random) -> Arguments:
    kind = r.choice(FLOATS)
    return tensor(r, [3, 1, 2], kind), tensor(r, [1, 2, 2], kind), tensor(r, [2], kind), 0


def grid(dims: int) -> Draw:
    def draw(r: random.Random) -> Arguments:
        kind = r.choice(FLOATS)
        x, where = tensor(r, [1, 1, *[2] * dims], kind), tensor(r, [1, *[2] * dims, dims], kind)
        return x, where, 0, 0, False

    return draw


def cholesky_solve(r: random.Random) -> Arguments:
    return tensor(r, [2, 2], torch.float32), torch.eye(2) * 2 + 0.1, False


def tensorsolve(r: random.Random) -> Arguments:
    return torch.eye(2) * 2 + 0.1, tensor(r, [2], torch.float32), None


def affine_grid(r: random.Random) -> Arguments:
    dims, batch = r.choice([2, 3]), r.choice([1, 2])
    theta = tensor(r, [batch, dims, dims + 1], r.choice([*FLOATS, torch.float64]))
    return theta, [batch, 1, *(r.choice([1, 2, 3]) for _ in range(dims))], r.random() < 0.5


ARGUMENTS: dict[str, Draw] = {
    "aten::_convolution_mode": lambda r: _batched(convolution(2)(r)),
    "aten::_convolution.out": into(convolved(False, [0], 1, False, False, True, True)),
    "aten::_pad_enum": pad_enum,
    "aten::_sparse_addmm": sparse_addmm,
    "aten::_sparse_mm": sparse_mm,
    "aten::_transformer_encoder_layer_fwd": encoder_layer,
    "aten::_trilinear": trilinear,
    "aten::_weight_norm": weight_norm,
    "aten::affine_grid_generator": affine_grid,
    "aten::bilinear": bilinear,
    "aten::binary_cross_entropy_with_logits.out": into(logits),
    "aten::chain_matmul": matrices,
    "aten::chain_matmul.out": into(matrices),
    "aten::cholesky.out": into(positive(False)),
    "aten::cholesky_solve.out": into(cholesky_solve),
    "aten::conv1d.padding": convolution(1),
    "aten::conv2d.padding": convolution(2),
    "aten::conv3d.padding": convolution(3),
    "aten::conv_transpose3d.input": transposed_convolution,
    "aten::conv_tbc.out": into(conv_tbc),
    "aten::convolution.out": into(convolved(False, [0], 1)),
    "aten::corrcoef": corrcoef,
    "aten::cov": cov,
    "aten::cross_entropy_loss": cross_entropy,
    "aten::cumulative_trapezoid.dx": trapezoid_of_step,
    "aten::cumulative_trapezoid.x": trapezoid,
    "aten::dist.out": into(vectors(2.0)),
    "aten::dot.out": into(vectors()),
    "aten::einsum": einsum,
    "aten::grid_sampler_2d.out": into(grid(2)),
    "aten::grid_sampler_3d.out": into(grid(3)),
    "aten::gru.data": recurrent("gru", packed=True),
    "aten::gru.input": recurrent("gru", packed=False),
    "aten::gru_cell": cell("gru"),
    "aten::inner": inner,
    "aten::inner.out": into(inner),
    "aten::instance_norm": instance_norm,
    "aten::ldexp.Tensor": two,
    "aten::ldexp.out": into(two),
    "aten::ldexp_": two,
    "aten::linalg_cond.out": into(positive(None)),
    "aten::linalg_cond.p_str_out": into(positive("fro")),
    "aten::linalg_matrix_exp": matrix_exp,
    "aten::linalg_matrix_norm.out": into(matrix_2x2(1.0, [0, 1], False, None)),
    "aten::linalg_matrix_norm.str_ord_out": into(matrix_2x2("fro", [0, 1], False, None)),
    "aten::linalg_matrix_power": matrix_power,
    "aten::linalg_matrix_power.out": into(matrix_power),
    "aten::linalg_multi_dot": matrices,
    "aten::linalg_multi_dot.out": into(matrices),
    "aten::linalg_norm": norm,
    "aten::linalg_norm.ord_str": norm_in_words,
    "aten::linalg_norm.ord_str_out": into(norm_in_words),
    "aten::linalg_norm.out": into(norm),
    "aten::linalg_pinv": pinv,
    "aten::linalg_pinv.atol_rtol_float": pinv_floats,
    "aten::linalg_pinv.atol_rtol_float_out": into(pinv_floats),
    "aten::linalg_pinv.atol_rtol_tensor": pinv_tensors,
    "aten::linalg_pinv.atol_rtol_tensor_out": into(pinv_tensors),
    "aten::linalg_pinv.out": into(pinv),
    "aten::linalg_pinv.out_rcond_tensor": into(pinv_rcond),
    "aten::linalg_pinv.rcond_tensor": pinv_rcond,
    "aten::linalg_polar": polar,
    "aten::linalg_polar.out": polar_out,
    "aten::linalg_tensorinv.out": into(positive(1)),
    "aten::linalg_tensorsolve.out": into(tensorsolve),
    "aten::linalg_vander": vander,
    "aten::linalg_vecdot": vecdot,
    "aten::lstm.data": recurrent("lstm", packed=True),
    "aten::lstm.input": recurrent("lstm", packed=False),
    "aten::lstm_cell": cell("lstm"),
    "aten::matmul.out": into(matmul),
    "aten::matrix_exp": matrix_exp,
    "aten::matrix_power": matrix_power,
    "aten::matrix_power.out": into(matrix_power),
    "aten::mvlgamma": mvlgamma,
    "aten::mvlgamma.out": into(mvlgamma),
    "aten::mvlgamma_": mvlgamma,
    "aten::nll_loss_nd": nll_loss,
    "aten::norm.Scalar_out": into(matrix_2x2(2.0)),
    "aten::norm_except_dim": norm_except_dim,
    "aten::nuclear_norm.dim_out": into(matrix_2x2([0, 1], True)),
    "aten::nuclear_norm.out": into(matrix_2x2(True)),
    "aten::pad": pad,
    "aten::pairwise_distance": pairwise_distance,
    "aten::pinverse": pinverse,
    "aten::prod.out": into(matrix_2x2(None)),
    "aten::rnn_relu.data": recurrent("rnn_relu", packed=True),
    "aten::rnn_relu.input": recurrent("rnn_relu", packed=False),
    "aten::rnn_relu_cell": cell("rnn_relu"),
    "aten::rnn_tanh.data": recurrent("rnn_tanh", packed=True),
    "aten::rnn_tanh.input": recurrent("rnn_tanh", packed=False),
    "aten::rnn_tanh_cell": cell("rnn_tanh"),
    "aten::soft_margin_loss.out": into(soft_margin),
    "aten::special_multigammaln": mvlgamma,
    "aten::square": one,
    "aten::sum.out": into(matrix_2x2(None)),
    "aten::sum_to_size": sum_to_size,
    "aten::tensordot": tensordot,
    "aten::tensordot.out": into(tensordot),
    "aten::trace.out": into(matrix_2x2()),
    "aten::trapezoid.dx": trapezoid_of_step,
    "aten::trapezoid.x": trapezoid,
    "aten::trapz.dx": trapezoid_of_step,
    "aten::trapz.x": trapezoid,
    "aten::upsample_bilinear2d.vec_out": into(interpolate(2, aligned=True)),
    "aten::upsample_nearest2d.vec_out": into(interpolate(2, aligned=False)),
    "aten::vander": powers,
}
ARGUMENTS |= {
    f"aten::{name}.vec": interpolate(dims, aligned=True)
    for name, dims in interpolation.ALIGNED.items()
}
ARGUMENTS |= {
    f"aten::{name}.vec": interpolate(dims, aligned=False)
    for name, dims in interpolation.NEAREST.items()
}


def _batched(arguments: Arguments) -> Arguments:
    x, *rest = arguments
    assert isinstance(x, torch.Tensor)
    return (x if x.dim() == 4 else x.unsqueeze(0), *rest)
