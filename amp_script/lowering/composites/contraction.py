"""Sums of products: ``tensordot``, ``inner``, ``einsum``, ``bilinear``, chains of matrices."""

from __future__ import annotations

import torch
from torch import Tensor

from ...undeprecated import compile_function
from .gradients import with_value
from .registry import Known, compiled_text, decomposes


def _dot_for_one_element() -> bool:
    """Whether ``tensordot`` gives a result of one element by ``dot``, which CPU autocast leaves.

    True in torch 2.13, False in 2.6, where it is a matrix product like any other.
    """
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return torch.tensordot(torch.ones(2), torch.ones(2), 1).dtype == torch.float32


def _swaps_operands() -> bool:
    """Whether ``einsum`` swaps two operands so that their product has the output's layout.

    True in torch 2.13, False in 2.6.
    """
    return torch.einsum("jk,ik->ij", torch.ones(3, 2), torch.ones(4, 2)).is_contiguous()


def _matrix_product(
    left: Tensor, right: Tensor, dims_left: list[int], dims_right: list[int]
) -> tuple[Tensor, Tensor, list[int], int, int, int]:
    """Order both operands' dimensions as for a matrix product.

    Returns:
        The operands with permuted dimensions, the shape of the result, and the number of rows,
        contracted elements and columns.
    """
    assert len(dims_left) == len(dims_right), "both dimension lists should have same length"
    assert left.dtype == right.dtype, "both inputs should have same dtype"
    rows, contracted, columns = 1, 1, 1
    summed_left, summed_right = left, right
    in_left: list[bool] = [False] * left.dim()
    in_right: list[bool] = [False] * right.dim()
    for i in range(len(dims_left)):
        dim_left, dim_right = dims_left[i], dims_right[i]
        size_left, size_right = left.size(dim_left), right.size(dim_right)
        if size_right == 1:
            summed_left = torch.sum(summed_left, [dim_left], True, dtype=summed_left.dtype)
        elif size_left == 1:
            summed_right = torch.sum(summed_right, [dim_right], True, dtype=summed_right.dtype)
        else:
            assert size_left == size_right, "contracted dimensions need to match"
            contracted *= size_left
        assert not in_left[dim_left], "a dimension appears twice"
        assert not in_right[dim_right], "a dimension appears twice"
        in_left[dim_left] = True
        in_right[dim_right] = True
    shape: list[int] = []
    order_left: list[int] = []
    order_right: list[int] = []
    for dim in range(left.dim()):
        if not in_left[dim]:
            order_left.append(dim)
            rows *= summed_left.size(dim)
            shape.append(summed_left.size(dim))
    order_left.extend(dims_left)
    order_right.extend(dims_right)
    for dim in range(right.dim()):
        if not in_right[dim]:
            order_right.append(dim)
            columns *= summed_right.size(dim)
            shape.append(summed_right.size(dim))
    return (
        summed_left.permute(order_left),
        summed_right.permute(order_right),
        shape,
        rows,
        contracted,
        columns,
    )


@decomposes("aten::tensordot", when=_dot_for_one_element)
def _tensordot(self: Tensor, other: Tensor, dims_self: list[int], dims_other: list[int]) -> Tensor:
    left, right, shape, rows, contracted, columns = _matrix_product(
        self, other, dims_self, dims_other
    )
    if rows != 1 or columns != 1:
        product = torch.mm(left.reshape([rows, contracted]), right.reshape([contracted, columns]))
    elif left.is_contiguous() and right.is_contiguous():
        product = torch.dot(left.flatten(), right.flatten())
    else:
        product = torch.sum(left.squeeze() * right.squeeze(), dtype=left.dtype)
    return product.reshape(shape)


@decomposes("aten::tensordot", when=lambda: not _dot_for_one_element())
def _tensordot_without_dot(
    self: Tensor, other: Tensor, dims_self: list[int], dims_other: list[int]
) -> Tensor:
    left, right, shape, rows, contracted, columns = _matrix_product(
        self, other, dims_self, dims_other
    )
    product = torch.mm(left.reshape([rows, contracted]), right.reshape([contracted, columns]))
    return product.reshape(shape)


@decomposes("aten::inner")
def _inner(self: Tensor, other: Tensor) -> Tensor:
    if self.dim() == 0 or other.dim() == 0:
        return self * other
    assert self.size(-1) == other.size(-1), "inner() the last dimension must match"
    return torch.ops.aten.tensordot(self, other, [-1], [-1])


def _right_comes_first(only_left: list[int], only_right: list[int]) -> bool:
    return len(only_left) > 0 and len(only_right) > 0 and only_right[-1] < only_left[0]


def _never(only_left: list[int], only_right: list[int]) -> bool:
    return False


_swap = _right_comes_first if _swaps_operands() else _never


def _sum_of_products(left: Tensor, right: Tensor, sum_dims: list[int]) -> Tensor:
    """Multiply and sum over dimensions, which stay with size 1, by way of one ``bmm``."""
    if len(sum_dims) == 0:
        return left * right
    shared: list[int] = []
    only_left: list[int] = []
    only_right: list[int] = []
    batches, rows, columns, contracted = 1, 1, 1, 1
    for dim in range(left.dim()):
        in_left = left.size(dim) != 1
        in_right = right.size(dim) != 1
        if dim in sum_dims:
            if in_left and in_right:
                assert left.size(dim) == right.size(dim), "non-broadcast dimensions must match"
                contracted *= left.size(dim)
            elif in_left:
                left = left.sum([dim], True)
            elif in_right:
                right = right.sum([dim], True)
        elif in_left and in_right:
            assert left.size(dim) == right.size(dim), "non-broadcast dimensions must match"
            shared.append(dim)
            batches *= left.size(dim)
        elif in_left:
            only_left.append(dim)
            rows *= left.size(dim)
        else:
            only_right.append(dim)
            columns *= right.size(dim)
    if _swap(only_left, only_right):
        left, right = right, left
        only_left, only_right = only_right, only_left
        rows, columns = columns, rows
    shape: list[int] = []
    for dim in shared:
        shape.append(left.size(dim))
    for dim in only_left:
        shape.append(left.size(dim))
    for _ in sum_dims:
        shape.append(1)
    for dim in only_right:
        shape.append(right.size(dim))
    order = shared + only_left + sum_dims + only_right
    back: list[int] = [0] * len(order)
    for position in range(len(order)):
        back[order[position]] = position
    left = left.permute(order).reshape([batches, rows, contracted])
    right = right.permute(shared + sum_dims + only_right + only_left).reshape(
        [batches, contracted, columns]
    )
    return torch.bmm(left, right).view(shape).permute(back)


def _subscripts(text: str) -> list[int]:
    """Labels of one operand, or of the output."""
    labels: list[int] = []
    position = 0
    while position < len(text):
        character = text[position]
        if character == ".":
            assert 52 not in labels, "einsum(): an operand has more than one ellipsis"
            assert text[position : position + 3] == "...", "einsum(): found '.' outside an ellipsis"
            labels.append(52)
            position += 2
        elif character != " ":
            assert character.isalpha(), "einsum(): subscripts must be in [a-zA-Z]"
            labels.append(ord(character) - (71 if character.islower() else 65))
        position += 1
    return labels


def _operands(equation: str) -> list[list[int]]:
    """Labels of each operand."""
    operands: list[list[int]] = []
    for text in equation.split("->")[0].split(","):
        operands.append(_subscripts(text))
    return operands


def _plan(equation: str, ranks: list[int]) -> tuple[list[list[int]], int, int]:
    """Give every dimension of every operand its place in one common shape.

    Returns:
        The place of each dimension, an operand a list; the number of dimensions of the output,
        which stand first in the common shape; the number of all its dimensions.
    """
    operands = _operands(equation)
    assert len(operands) == len(ranks), "einsum(): the equation has another number of operands"
    count: list[int] = [0] * 52
    ellipsis_dims = 0
    for labels, rank in zip(operands, ranks):
        assert 52 in labels or len(labels) == rank, "einsum(): a subscript for each dimension"
        if 52 in labels:
            assert len(labels) - 1 <= rank, "einsum(): more subscripts than dimensions"
            ellipsis_dims = max(ellipsis_dims, rank - len(labels) + 1)
        for label in labels:
            if label != 52:
                count[label] += 1

    place: list[int] = [-1] * 53
    dims = 0
    sides = equation.split("->")
    if len(sides) == 1:
        place[52] = 0
        dims = ellipsis_dims
        for label in range(52):
            if count[label] == 1:
                place[label] = dims
                dims += 1
    else:
        for label in _subscripts(sides[1]):
            assert place[label] == -1, "einsum(): a subscript appears twice in the output"
            place[label] = dims
            if label == 52:
                dims += ellipsis_dims
            else:
                assert count[label] > 0, "einsum(): an output subscript is in no operand"
                dims += 1
    output_dims = dims
    if place[52] == -1:
        place[52] = dims
        dims += ellipsis_dims
    for label in range(52):
        if count[label] > 0 and place[label] == -1:
            place[label] = dims
            dims += 1

    places: list[list[int]] = []
    for labels, rank in zip(operands, ranks):
        of_operand: list[int] = []
        for label in labels:
            if label == 52:
                covered = rank - len(labels) + 1
                for i in range(ellipsis_dims - covered, ellipsis_dims):
                    of_operand.append(place[52] + i)
            else:
                of_operand.append(place[label])
        places.append(of_operand)
    return places, output_dims, dims


def _align(operand: Tensor, places: list[int], dims: int) -> Tensor:
    """Bring an operand into the common shape; a place named twice takes the diagonal."""
    order: list[int] = [-1] * dims
    dim = 0
    for place in places:
        if order[place] == -1:
            order[place] = dim
            dim += 1
        else:
            assert operand.size(dim) == operand.size(order[place]), "einsum(): not a square"
            operand = operand.diagonal(0, order[place], dim).movedim(-1, order[place])
    for place in range(dims):
        if order[place] == -1:
            operand = operand.unsqueeze(dim)
            order[place] = dim
            dim += 1
    return operand.permute(order)


def _contract(
    tensors: list[Tensor],
    places: list[list[int]],
    output_dims: int,
    dims: int,
    path: list[int] | None,
) -> Tensor:
    """Multiply operands two at a time, summing over a dimension as soon as no other has it."""
    operands: list[Tensor] = []
    for tensor, of_tensor in zip(tensors, places):
        operands.append(_align(tensor, of_tensor, dims))
    if len(operands) == 1:
        if dims == output_dims:
            return operands[0]
        return operands[0].sum([dim for dim in range(output_dims, dims)])

    uses: list[int] = [0] * dims
    for operand in operands:
        for dim in range(dims):
            if operand.size(dim) != 1:
                uses[dim] += 1
    step = 0
    while len(operands) > 1:
        first, second = 0, 1
        if path is not None:
            first, second = min(path[step], path[step + 1]), max(path[step], path[step + 1])
            assert first != second, "einsum(): cannot contract an operand with itself"
            step += 2
        right = operands.pop(second)
        left = operands.pop(first)
        sum_both: list[int] = []
        sum_left: list[int] = []
        sum_right: list[int] = []
        for dim in range(output_dims, dims):
            if left.size(dim) != 1 and right.size(dim) != 1:
                uses[dim] -= 1
                if uses[dim] == 1:
                    sum_both.append(dim)
                    uses[dim] = 0
            elif uses[dim] == 1:
                if left.size(dim) != 1:
                    sum_left.append(dim)
                    uses[dim] = 0
                elif right.size(dim) != 1:
                    sum_right.append(dim)
                    uses[dim] = 0
        if len(sum_left) > 0:
            left = left.sum(sum_left, True)
        if len(sum_right) > 0:
            right = right.sum(sum_right, True)
        product = _sum_of_products(left, right, sum_both)
        operands.insert(0 if path is None else len(operands), product)
    if dims == output_dims:
        return operands[0]
    return operands[0].view(operands[0].shape[:output_dims])


def _contract_two(left: Tensor, right: Tensor, output_dims: int) -> Tensor:
    """The same for two operands in one common shape."""
    sum_both: list[int] = []
    sum_left: list[int] = []
    sum_right: list[int] = []
    for dim in range(output_dims, left.dim()):
        if left.size(dim) != 1 and right.size(dim) != 1:
            sum_both.append(dim)
        elif left.size(dim) != 1:
            sum_left.append(dim)
        elif right.size(dim) != 1:
            sum_right.append(dim)
    if len(sum_left) > 0:
        left = left.sum(sum_left, True)
    if len(sum_right) > 0:
        right = right.sum(sum_right, True)
    product = _sum_of_products(left, right, sum_both)
    return product.view(product.shape[:output_dims])


_EINSUM_OF_TWO = """
def einsum(equation: str, tensors: List[Tensor], path: Optional[List[int]]) -> Tensor:
    {one}, {other} = tensors[0], tensors[1]
    assert left.dim() == {rank_left} and right.dim() == {rank_right}
    if {same_sizes} and 1 not in left.shape and 1 not in right.shape:
        product = torch.bmm(
            left.permute({order_left}).reshape([{batches}, {rows}, {contracted}]),
            right.permute({order_right}).reshape([{batches}, {contracted}, {columns}]),
        )
        return product.view([{sizes}]).permute({back})
    return contract_two({aligned_one}, {aligned_other}, {output_dims})
"""


def _einsum_of_two(known: Known) -> object:
    """Code for the product of two operands whose equation is a constant.

    Where no dimension has size 1, the equation tells everything that :func:`_contract` finds out.
    """
    equation, _, path = known
    if not isinstance(equation, str) or "." in equation or path is not None:
        return None
    operands = _operands(equation)
    if len(operands) != 2 or any(len(set(labels)) != len(labels) for labels in operands):
        return None
    places, output_dims, dims = _plan(equation, list(map(len, operands)))
    of_left, of_right = places
    in_both = sorted(set(of_left) & set(of_right))
    shared = [place for place in in_both if place < output_dims]
    summed = [place for place in in_both if place >= output_dims]
    only_left = sorted(set(of_left) - set(in_both))
    only_right = sorted(set(of_right) - set(in_both))
    if not summed or any(place >= output_dims for place in only_left + only_right):
        return None
    one, other = "left", "right"
    if _swap(only_left, only_right):
        one, other = other, one
        of_left, of_right = of_right, of_left
        only_left, only_right = only_right, only_left

    def sizes(of: list[int]) -> list[str]:
        return [
            f"left.size({of_left.index(place)})"
            if place in of_left
            else f"right.size({of_right.index(place)})"
            for place in of
        ]

    def product(of: list[int]) -> str:
        return " * ".join(sizes(of)) or "1"

    def aligned(name: str, of: list[int]) -> str:
        missing = [place for place in range(dims) if place not in of]
        order = [(of + missing).index(place) for place in range(dims)]
        return name + ".unsqueeze(-1)" * len(missing) + f".permute({order})"

    result = shared + only_left + only_right
    source = _EINSUM_OF_TWO.format(
        one=one,
        other=other,
        rank_left=len(of_left),
        rank_right=len(of_right),
        same_sizes=" and ".join(
            f"left.size({of_left.index(place)}) == right.size({of_right.index(place)})"
            for place in in_both
        ),
        order_left=[of_left.index(place) for place in shared + only_left + summed],
        order_right=[of_right.index(place) for place in shared + summed + only_right],
        batches=product(shared),
        rows=product(only_left),
        contracted=product(summed),
        columns=product(only_right),
        sizes=", ".join(sizes(result)),
        back=[result.index(place) for place in range(output_dims)],
        aligned_one=aligned(one, places[0]),
        aligned_other=aligned(other, places[1]),
        output_dims=output_dims,
    )
    return compiled_text(source, {"torch": torch, "contract_two": compile_function(_contract_two)})


@decomposes("aten::einsum", special=_einsum_of_two)
def _einsum(equation: str, tensors: list[Tensor], path: list[int] | None) -> Tensor:
    ranks: list[int] = []
    for tensor in tensors:
        ranks.append(tensor.dim())
    places, output_dims, dims = _plan(equation, ranks)
    return _contract(tensors, places, output_dims, dims, path)


def _trilinear_parts(
    i1: Tensor,
    i2: Tensor,
    i3: Tensor,
    expand1: list[int],
    expand2: list[int],
    expand3: list[int],
    sumdim: list[int],
    unroll_dim: int,
) -> Tensor:
    shape: list[int] = []
    sum_first: list[int] = []
    sum_second: list[int] = []
    for dim in range(i1.dim() + len(expand1)):
        size = 0
        if dim in expand1:
            i1 = i1.unsqueeze(dim)
        else:
            size = i1.size(dim)
        if dim in expand2:
            i2 = i2.unsqueeze(dim)
        else:
            size = i2.size(dim)
        if dim in expand3:
            i3 = i3.unsqueeze(dim)
            if dim in sumdim and dim != unroll_dim:
                sum_first.append(dim)
        else:
            size = i3.size(dim)
            if dim in sumdim and dim != unroll_dim:
                sum_second.append(dim)
        shape.append(size)
    steps = shape[unroll_dim]
    for dim in sumdim:
        shape[dim] = 1
    output = torch.zeros(shape, dtype=i1.dtype, device=i1.device)
    if i1.numel() != 0 and i2.numel() != 0 and i3.numel() != 0:
        for step in range(steps):
            product = _sum_of_products(
                i1.narrow(unroll_dim, 0 if unroll_dim in expand1 else step, 1),
                i2.narrow(unroll_dim, 0 if unroll_dim in expand2 else step, 1),
                sum_first,
            )
            product = _sum_of_products(
                product,
                i3.narrow(unroll_dim, 0 if unroll_dim in expand3 else step, 1),
                sum_second,
            )
            if unroll_dim in sumdim:
                output.add_(product)
            else:
                output.narrow(unroll_dim, step, 1).add_(product)
    for dim in range(len(shape) - 1, -1, -1):
        if dim in sumdim:
            output = output.squeeze(dim)
    return output


@decomposes("aten::_trilinear")
def _trilinear(
    i1: Tensor,
    i2: Tensor,
    i3: Tensor,
    expand1: list[int],
    expand2: list[int],
    expand3: list[int],
    sumdim: list[int],
    unroll_dim: int,
) -> Tensor:
    if torch.is_grad_enabled() and (i1.requires_grad or i2.requires_grad or i3.requires_grad):
        exact = _trilinear_parts(
            i1.detach(), i2.detach(), i3.detach(), expand1, expand2, expand3, sumdim, unroll_dim
        )
        result = torch.ops.aten._trilinear(
            i1, i2, i3, expand1, expand2, expand3, sumdim, unroll_dim
        )
        return with_value(result, exact)
    return _trilinear_parts(i1, i2, i3, expand1, expand2, expand3, sumdim, unroll_dim)


@decomposes("aten::bilinear")
def _bilinear(input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    assert input1.dtype == input2.dtype and input1.dtype == weight.dtype
    assert bias is None or bias.dtype == weight.dtype, "All tensors must have the same dtype"
    assert input1.shape[:-1] == input2.shape[:-1], "bilinear(): input dimensions do not match"
    assert input1.size(-1) == weight.size(1), "bilinear(): input1 size does not match weight"
    assert input2.size(-1) == weight.size(2), "bilinear(): input2 size does not match weight"
    output = torch.ops.aten._trilinear(
        input1.reshape([-1, input1.size(-1)]),
        weight,
        input2.reshape([-1, input2.size(-1)]),
        [1, 3],
        [0],
        [1, 2],
        [2, 3],
    ).reshape(list(input1.shape[:-1]) + [weight.size(0)])
    if bias is not None:
        assert bias.size(0) == weight.size(0), "bilinear(): bias size does not match weight"
        output = output + bias
    return output


def _chain_order(sizes: list[int]) -> list[list[int]]:
    """Where to split each span of a chain of matrices so that the fewest products are needed.

    Args:
        sizes: matrix i has sizes[i] rows and sizes[i + 1] columns.
    """
    count = len(sizes) - 1
    cost: list[list[int]] = []
    split: list[list[int]] = []
    for _ in range(count):
        cost.append([0] * count)
        split.append([0] * count)
    for length in range(1, count):
        for first in range(count - length):
            last = first + length
            cost[first][last] = 9223372036854775807
            for middle in range(first, last):
                total = (
                    cost[first][middle]
                    + cost[middle + 1][last]
                    + sizes[first] * sizes[middle + 1] * sizes[last + 1]
                )
                if total < cost[first][last]:
                    cost[first][last] = total
                    split[first][last] = middle
    return split


def _chain_factors(matrices: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The two factors whose product is the chain's."""
    sizes: list[int] = [matrices[0].size(0)]
    for matrix in matrices:
        sizes.append(matrix.size(1))
    split = _chain_order(sizes)
    count = len(matrices)
    whole = count - 1
    products: dict[int, Tensor] = {}
    pending: list[int] = [whole]
    while len(pending) > 0:
        span = pending[-1]
        first, last = span // count, span % count
        left = first * count + split[first][last]
        right = (split[first][last] + 1) * count + last
        if first == last:
            products[pending.pop()] = matrices[first]
        elif right not in products:
            pending.append(right)
        elif left not in products:
            pending.append(left)
        elif span == whole:
            pending.pop()
        else:
            products[pending.pop()] = torch.mm(products[left], products[right])
    middle = split[0][whole]
    return products[middle], products[(middle + 1) * count + whole]


def _factors(tensors: list[Tensor]) -> tuple[Tensor, Tensor, list[int]]:
    """Multiply a chain of matrices up to the last product.

    Returns:
        The last product's two factors, and the shape of the result.
    """
    count = len(tensors)
    assert count >= 2, "multi_dot(): expected at least 2 tensors"
    shape: list[int] = []
    matrices = tensors.copy()
    if tensors[0].dim() == 1:
        matrices[0] = tensors[0].unsqueeze(0)
    else:
        shape.append(tensors[0].size(0))
    if tensors[-1].dim() == 1:
        matrices[-1] = tensors[-1].unsqueeze(-1)
    else:
        shape.append(tensors[-1].size(1))
    for matrix in matrices:
        assert matrix.dim() == 2, "multi_dot(): only the first and last tensor may be 1D"
        assert matrix.dtype == matrices[0].dtype, "multi_dot(): all tensors must be the same dtype"
    if count == 2:
        return matrices[0], matrices[1], shape
    if count == 3:
        a, b = matrices[0].size(0), matrices[1].size(0)
        c, d = matrices[2].size(0), matrices[2].size(1)
        if (a * c) * (b + d) > (b * d) * (a + c):
            return matrices[0], torch.mm(matrices[1], matrices[2]), shape
        return torch.mm(matrices[0], matrices[1]), matrices[2], shape
    left, right = _chain_factors(matrices)
    return left, right, shape


@decomposes("aten::linalg_multi_dot")
def _multi_dot(tensors: list[Tensor]) -> Tensor:
    left, right, shape = _factors(tensors)
    return torch.mm(left, right).view(shape)


@decomposes("aten::linalg_multi_dot.out")
def _multi_dot_out(tensors: list[Tensor], out: Tensor) -> Tensor:
    assert out.dtype == tensors[0].dtype, "multi_dot(): expected out tensor of the same dtype"
    left, right, shape = _factors(tensors)
    if list(out.shape) != shape:
        out.resize_(shape)
    torch.mm(left, right, out=out.view([left.size(0), right.size(1)]))
    return out


@decomposes("aten::chain_matmul")
def _chain_matmul(matrices: list[Tensor]) -> Tensor:
    for matrix in matrices:
        assert matrix.dim() == 2, "chain_matmul(): expected matrices"
    return matrices[0].clone() if len(matrices) == 1 else _multi_dot(matrices)


@decomposes("aten::chain_matmul.out")
def _chain_matmul_out(matrices: list[Tensor], out: Tensor) -> Tensor:
    for matrix in matrices:
        assert matrix.dim() == 2, "chain_matmul(): expected matrices"
    if len(matrices) > 1:
        return _multi_dot_out(matrices, out)
    if out.shape != matrices[0].shape:
        out.resize_(matrices[0].shape)
    return out.copy_(matrices[0])
