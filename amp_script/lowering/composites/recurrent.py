"""Recurrent cells and layers: ``lstm``, ``gru``, ``rnn_tanh``, ``rnn_relu``.

A state is a list of tensors: ``[h]`` or, for an LSTM, ``[h, c]``. The weights of one layer in one
direction are ``w_ih``, ``w_hh`` and, where an LSTM projects its output, ``w_hr``; its biases are
``b_ih`` and ``b_hh``. A kind is ``"lstm"``, ``"gru"``, ``"tanh"`` or ``"relu"``.

Where cuDNN does the whole layer, autocast casts what goes in, under the name of an internal operator;
the layer is then called as it is on what was cast.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from .probing import half_where_on
from .registry import decomposes


def _yes() -> bool:
    return True


def _no() -> bool:
    return False


def _packed_lstm_uses_onednn() -> bool:
    """Whether packed sequences that are all of one length go to oneDNN, as padded ones do.

    True in torch 2.13, False in 2.6, where the cell state stays in float32 on the way.
    """
    one, state = torch.ones(1, 1), torch.ones(1, 1, 1)
    weights = [torch.ones(4, 1), torch.ones(4, 1)]
    sizes = torch.ones(1, dtype=torch.int64)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        try:
            cell = torch.lstm(one, sizes, [state, state], weights, False, 1, 0.0, False, False)[2]
        except RuntimeError:  # oneDNN has no such kernel for this processor
            return True
    return cell.dtype == torch.bfloat16


# Whether oneDNN may be used is a setting of the process, which TorchScript cannot ask: a program
# keeps the answer of the process that lowered it.
_has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call] # torch's
_onednn_enabled = _yes if _has_onednn else _no


_packed_onednn = _yes if _packed_lstm_uses_onednn() else _no


def _uses_onednn(input: Tensor) -> bool:
    """Whether a whole LSTM layer runs in oneDNN, decided on its input as it comes."""
    if not (_onednn_enabled() and input.is_cpu and input.numel() != 0):
        return False
    if input.dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if input.dtype == torch.float16:
        supported = torch.ops.mkldnn._is_mkldnn_fp16_supported()
        return supported and not torch.is_grad_enabled()
    return input.dtype == torch.float32


def _has_fused_cells(input: Tensor) -> bool:
    """CUDA, XPU and private backends, whose name can be any, fuse what follows the products."""
    plain = ["cpu", "mps", "mtia", "maia", "meta", "hpu", "ipu", "xla", "vulkan", "lazy"]
    return input.device.type not in plain


def _fused_cell(
    kind: str,
    input: Tensor,
    state: list[Tensor],
    weights: list[Tensor],
    biases: list[Tensor | None],
) -> list[Tensor]:
    input_gates = torch.matmul(input, weights[0].t())
    hidden_gates = torch.matmul(state[0], weights[1].t())
    if kind == "gru":
        h, _ = torch.ops.aten._thnn_fused_gru_cell(
            input_gates, hidden_gates, state[0], biases[0], biases[1]
        )
        return [h]
    h, c, _ = torch.ops.aten._thnn_fused_lstm_cell(
        input_gates, hidden_gates, state[1], biases[0], biases[1]
    )
    return [h, c]


def _lstm_cell_parts(gates: Tensor, c: Tensor) -> list[Tensor]:
    chunks = gates.unsafe_chunk(4, 1)
    input_gate = chunks[0].sigmoid_()
    forget_gate = chunks[1].sigmoid_()
    cell_gate = chunks[2].tanh_()
    output_gate = chunks[3].sigmoid_()
    new = (forget_gate * c).add_(input_gate * cell_gate)
    return [output_gate * new.tanh(), new]


def _gru_cell_parts(
    input_gates: Tensor, h: Tensor, weights: list[Tensor], biases: list[Tensor | None]
) -> Tensor:
    input_chunks = input_gates.unsafe_chunk(3, 1)
    hidden_chunks = linear(h, weights[1], biases[1]).unsafe_chunk(3, 1)
    reset_gate = hidden_chunks[0].add_(input_chunks[0]).sigmoid_()
    update_gate = hidden_chunks[1].add_(input_chunks[1]).sigmoid_()
    new = input_chunks[2].add(hidden_chunks[2].mul_(reset_gate)).tanh_()
    return (h - new).mul_(update_gate).add_(new)


def _cell(
    kind: str,
    input: Tensor,
    state: list[Tensor],
    weights: list[Tensor],
    biases: list[Tensor | None],
    multiplied: bool,
) -> list[Tensor]:
    """One step. ``multiplied``: the input is already the product with ``w_ih``, bias added."""
    if (kind == "lstm" or kind == "gru") and _has_fused_cells(input):
        new = _fused_cell(kind, input, state, weights, biases)
    elif kind == "gru":
        input_gates = input if multiplied else linear(input, weights[0], biases[0])
        new = [_gru_cell_parts(input_gates, state[0], weights, biases)]
    else:
        hidden_gates = linear(state[0], weights[1], biases[1])
        gates = hidden_gates.add_(input if multiplied else linear(input, weights[0], biases[0]))
        if kind == "lstm":
            new = _lstm_cell_parts(gates, state[1])
        else:
            new = [torch.tanh(gates) if kind == "tanh" else torch.relu(gates)]
    if len(weights) > 2:
        new[0] = torch.matmul(new[0], weights[2].t())
    return new


def _padded_layer(
    kind: str,
    input: Tensor,
    state: list[Tensor],
    weights: list[Tensor],
    biases: list[Tensor | None],
    backwards: bool,
) -> tuple[Tensor, list[Tensor]]:
    """One layer in one direction over a tensor of time, batch, features."""
    multiplied = input.is_cpu
    steps = (linear(input, weights[0], biases[0]) if multiplied else input).unbind(0)
    assert len(steps) > 0, "Expected sequence length to be larger than 0 in RNN"
    outputs: list[Tensor] = []
    for i in range(len(steps)):
        step = steps[len(steps) - 1 - i] if backwards else steps[i]
        state = _cell(kind, step, state, weights, biases, multiplied)
        outputs.append(state[0])
    if backwards:
        outputs.reverse()
    return torch.stack(outputs, 0), state


def _narrowed(state: list[Tensor], start: int, end: int) -> list[Tensor]:
    return [part.narrow(0, start, end - start) for part in state]


def _joined(states: list[list[Tensor]]) -> list[Tensor]:
    joined: list[Tensor] = []
    for i in range(len(states[0])):
        joined.append(torch.cat([state[i] for state in states], 0))
    return joined


def _packed_layer(
    kind: str,
    input: Tensor,
    sizes: list[int],
    state: list[Tensor],
    weights: list[Tensor],
    biases: list[Tensor | None],
) -> tuple[Tensor, list[Tensor]]:
    """One layer over a packed sequence: some sequences end at each step where the size drops."""
    multiplied = input.is_cpu
    steps = linear(input, weights[0], biases[0]) if multiplied else input
    offset = 0
    last_size = sizes[0]
    outputs: list[Tensor] = []
    ended: list[list[Tensor]] = []
    for size in sizes:
        step = steps.narrow(0, offset, size)
        offset += size
        if size < last_size:
            ended.append(_narrowed(state, size, last_size))
            state = _narrowed(state, 0, size)
        last_size = size
        state = _cell(kind, step, state, weights, biases, multiplied)
        outputs.append(state[0])
    ended.append(state)
    ended.reverse()
    return torch.cat(outputs, 0), _joined(ended)


def _packed_layer_backwards(
    kind: str,
    input: Tensor,
    sizes: list[int],
    first_state: list[Tensor],
    weights: list[Tensor],
    biases: list[Tensor | None],
) -> tuple[Tensor, list[Tensor]]:
    """The same from the last step to the first: sequences join where the size grows."""
    multiplied = input.is_cpu
    steps = linear(input, weights[0], biases[0]) if multiplied else input
    offset = input.size(0)
    last_size = sizes[-1]
    state = _narrowed(first_state, 0, last_size)
    outputs: list[Tensor] = []
    for i in range(len(sizes) - 1, -1, -1):
        size = sizes[i]
        if size > last_size:
            state = _joined([state, _narrowed(first_state, last_size, size)])
        step = steps.narrow(0, offset - size, size)
        offset -= size
        last_size = size
        state = _cell(kind, step, state, weights, biases, multiplied)
        outputs.append(state[0])
    outputs.reverse()
    return torch.cat(outputs, 0), state


def _one_direction(
    kind: str,
    input: Tensor,
    sizes: list[int],
    state: list[Tensor],
    weights: list[Tensor],
    biases: list[Tensor | None],
    backwards: bool,
) -> tuple[Tensor, list[Tensor]]:
    """One layer in one direction. ``sizes`` is empty for a padded input."""
    if len(sizes) == 0:
        return _padded_layer(kind, input, state, weights, biases, backwards)
    if backwards:
        return _packed_layer_backwards(kind, input, sizes, state, weights, biases)
    return _packed_layer(kind, input, sizes, state, weights, biases)


def _split(params: list[Tensor], has_biases: bool) -> tuple[list[Tensor], list[Tensor | None]]:
    """Weights and biases of one layer in one direction."""
    biases: list[Tensor | None] = [None, None]
    if not has_biases:
        return params, biases
    biases[0], biases[1] = params[2], params[3]
    return params[:2] + params[4:], biases


def _layers(
    kind: str,
    input: Tensor,
    sizes: list[int],
    states: list[Tensor],
    params: list[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
) -> tuple[Tensor, list[Tensor]]:
    """Every layer.

    Args:
        states: ``h`` of all layers and directions in one tensor and, for an LSTM, ``c``.

    Returns:
        The output and the last states, joined in the same way.
    """
    directions = 2 if bidirectional else 1
    per_layer = 4 if has_biases else 2
    if len(states) > 1 and states[0].size(2) != states[1].size(2):
        per_layer += 1
    assert len(params) == num_layers * directions * per_layer, "an incorrect number of parameters"
    unbound: list[list[Tensor]] = []
    last: list[list[Tensor]] = []
    for joined in states:
        unbound.append(list(joined.unbind(0)))
        none_yet: list[Tensor] = []
        last.append(none_yet)
        assert len(unbound[-1]) == num_layers * directions, "Expected more hidden states"
    for layer in range(num_layers):
        outputs: list[Tensor] = []
        for direction in range(directions):
            index = layer * directions + direction
            weights, biases = _split(
                params[index * per_layer : (index + 1) * per_layer], has_biases
            )
            output, state = _one_direction(
                kind,
                input,
                sizes,
                [parts[index] for parts in unbound],
                weights,
                biases,
                direction == 1,
            )
            outputs.append(output)
            for i in range(len(state)):
                last[i].append(state[i])
        input = torch.cat(outputs, outputs[0].dim() - 1) if bidirectional else outputs[0]
        if dropout != 0 and train and layer < num_layers - 1:
            input = torch.dropout(input, dropout, True)
    return input, [torch.stack(parts, 0) for parts in last]


def _padded(
    kind: str,
    input: Tensor,
    states: list[Tensor],
    params: list[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, list[Tensor]]:
    if batch_first:
        input = input.transpose(0, 1)
    output, last = _layers(
        kind, input, [], states, params, has_biases, num_layers, dropout, train, bidirectional
    )
    return output.transpose(0, 1) if batch_first else output, last


def _onednn_lstm(
    input: Tensor,
    hx: list[Tensor],
    params: list[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    directions = 2 if bidirectional else 1
    stride = 4 if has_biases else 2
    h, c = hx[0].contiguous(), hx[1].contiguous()
    layer_input = (input.transpose(0, 1) if batch_first else input).contiguous()
    last_h: list[Tensor] = []
    last_c: list[Tensor] = []
    for layer in range(num_layers):
        outputs: list[Tensor] = []
        for direction in range(directions):
            index = layer * directions + direction
            weights = params[index * stride : (index + 1) * stride]
            if not has_biases:
                weights = weights + [torch.zeros_like(weights[0]), torch.zeros_like(weights[1])]
            output, new_h, new_c, _ = torch.ops.aten.mkldnn_rnn_layer(
                layer_input,
                weights[0],
                weights[1],
                weights[2],
                weights[3],
                h[index],
                c[index],
                direction == 1,
                [],
                2,
                h.size(2),
                num_layers,
                has_biases,
                bidirectional,
                batch_first,
                train,
            )
            outputs.append(output)
            last_h.append(new_h)
            last_c.append(new_c)
        layer_input = torch.cat(outputs, -1) if bidirectional else outputs[0]
        if dropout != 0 and train and layer < num_layers - 1:
            layer_input = torch.dropout(layer_input, dropout, True)
    output = layer_input.transpose(0, 1) if batch_first else layer_input
    return output, torch.stack(last_h, 0), torch.stack(last_c, 0)


@decomposes("aten::lstm.input")
def _lstm(
    input: Tensor,
    hx: list[Tensor],
    params: list[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    assert len(hx) == 2, "lstm expects two hidden states"
    if input.device.type == "mps":
        return torch.lstm(
            input, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first
        )
    if torch.cudnn_is_acceptable(input):
        return torch.lstm(
            half_where_on([input], input)[0],
            half_where_on(hx, input),
            half_where_on(params, input),
            has_biases,
            num_layers,
            dropout,
            train,
            bidirectional,
            batch_first,
        )
    if _uses_onednn(input) and hx[0].size(2) == hx[1].size(2):
        return _onednn_lstm(
            input, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first
        )
    output, last = _padded(
        "lstm",
        input,
        hx,
        params,
        has_biases,
        num_layers,
        dropout,
        train,
        bidirectional,
        batch_first,
    )
    return output, last[0], last[1]


@decomposes("aten::lstm.data")
def _lstm_data(
    data: Tensor,
    batch_sizes: Tensor,
    hx: list[Tensor],
    params: list[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    assert len(hx) == 2, "lstm expects two hidden states"
    if torch.cudnn_is_acceptable(data):
        return torch.lstm(
            half_where_on([data], data)[0],
            batch_sizes,
            half_where_on(hx, data),
            half_where_on(params, data),
            has_biases,
            num_layers,
            dropout,
            train,
            bidirectional,
        )
    sizes: list[int] = batch_sizes.tolist()
    one_length = sizes[0] == sizes[-1] and hx[0].size(2) == hx[1].size(2)
    if one_length and _packed_onednn() and _uses_onednn(data):
        padded, h, c = _onednn_lstm(
            data.reshape([len(sizes), sizes[0], data.size(-1)]),
            hx,
            params,
            has_biases,
            num_layers,
            dropout,
            train,
            bidirectional,
            False,
        )
        return padded.reshape([data.size(0), padded.size(-1)]), h, c
    output, last = _layers(
        "lstm", data, sizes, hx, params, has_biases, num_layers, dropout, train, bidirectional
    )
    return output, last[0], last[1]


@decomposes("aten::gru.input")
def _gru(
    input: Tensor,
    hx: Tensor,
    params: list[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor]:
    if torch.cudnn_is_acceptable(input):
        return torch.gru(
            half_where_on([input], input)[0],
            half_where_on([hx], input)[0],
            half_where_on(params, input),
            has_biases,
            num_layers,
            dropout,
            train,
            bidirectional,
            batch_first,
        )
    output, last = _padded(
        "gru",
        input,
        [hx],
        params,
        has_biases,
        num_layers,
        dropout,
        train,
        bidirectional,
        batch_first,
    )
    return output, last[0]


@decomposes("aten::gru.data")
def _gru_data(
    data: Tensor,
    batch_sizes: Tensor,
    hx: Tensor,
    params: list[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
) -> tuple[Tensor, Tensor]:
    if torch.cudnn_is_acceptable(data):
        return torch.gru(
            half_where_on([data], data)[0],
            batch_sizes,
            half_where_on([hx], data)[0],
            half_where_on(params, data),
            has_biases,
            num_layers,
            dropout,
            train,
            bidirectional,
        )
    sizes: list[int] = batch_sizes.tolist()
    output, last = _layers(
        "gru", data, sizes, [hx], params, has_biases, num_layers, dropout, train, bidirectional
    )
    return output, last[0]


@decomposes("aten::rnn_tanh.input")
def _rnn_tanh(
    input: Tensor,
    hx: Tensor,
    params: list[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor]:
    if torch.cudnn_is_acceptable(input):
        return torch.rnn_tanh(
            half_where_on([input], input)[0],
            half_where_on([hx], input)[0],
            half_where_on(params, input),
            has_biases,
            num_layers,
            dropout,
            train,
            bidirectional,
            batch_first,
        )
    output, last = _padded(
        "tanh",
        input,
        [hx],
        params,
        has_biases,
        num_layers,
        dropout,
        train,
        bidirectional,
        batch_first,
    )
    return output, last[0]


@decomposes("aten::rnn_tanh.data")
def _rnn_tanh_data(
    data: Tensor,
    batch_sizes: Tensor,
    hx: Tensor,
    params: list[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
) -> tuple[Tensor, Tensor]:
    if torch.cudnn_is_acceptable(data):
        return torch.rnn_tanh(
            half_where_on([data], data)[0],
            batch_sizes,
            half_where_on([hx], data)[0],
            half_where_on(params, data),
            has_biases,
            num_layers,
            dropout,
            train,
            bidirectional,
        )
    sizes: list[int] = batch_sizes.tolist()
    output, last = _layers(
        "tanh", data, sizes, [hx], params, has_biases, num_layers, dropout, train, bidirectional
    )
    return output, last[0]


@decomposes("aten::rnn_relu.input")
def _rnn_relu(
    input: Tensor,
    hx: Tensor,
    params: list[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor]:
    if torch.cudnn_is_acceptable(input):
        return torch.rnn_relu(
            half_where_on([input], input)[0],
            half_where_on([hx], input)[0],
            half_where_on(params, input),
            has_biases,
            num_layers,
            dropout,
            train,
            bidirectional,
            batch_first,
        )
    output, last = _padded(
        "relu",
        input,
        [hx],
        params,
        has_biases,
        num_layers,
        dropout,
        train,
        bidirectional,
        batch_first,
    )
    return output, last[0]


@decomposes("aten::rnn_relu.data")
def _rnn_relu_data(
    data: Tensor,
    batch_sizes: Tensor,
    hx: Tensor,
    params: list[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
) -> tuple[Tensor, Tensor]:
    if torch.cudnn_is_acceptable(data):
        return torch.rnn_relu(
            half_where_on([data], data)[0],
            batch_sizes,
            half_where_on([hx], data)[0],
            half_where_on(params, data),
            has_biases,
            num_layers,
            dropout,
            train,
            bidirectional,
        )
    sizes: list[int] = batch_sizes.tolist()
    output, last = _layers(
        "relu", data, sizes, [hx], params, has_biases, num_layers, dropout, train, bidirectional
    )
    return output, last[0]


@decomposes("aten::lstm_cell")
def _lstm_cell(
    input: Tensor,
    hx: list[Tensor],
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None,
    b_hh: Tensor | None,
) -> tuple[Tensor, Tensor]:
    assert len(hx) == 2, "lstm_cell expects two hidden states"
    state = _cell("lstm", input, hx, [w_ih, w_hh], [b_ih, b_hh], False)
    return state[0], state[1]


@decomposes("aten::gru_cell")
def _gru_cell(
    input: Tensor,
    hx: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None,
    b_hh: Tensor | None,
) -> Tensor:
    return _cell("gru", input, [hx], [w_ih, w_hh], [b_ih, b_hh], False)[0]


@decomposes("aten::rnn_tanh_cell")
def _rnn_tanh_cell(
    input: Tensor,
    hx: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None,
    b_hh: Tensor | None,
) -> Tensor:
    return _cell("tanh", input, [hx], [w_ih, w_hh], [b_ih, b_hh], False)[0]


@decomposes("aten::rnn_relu_cell")
def _rnn_relu_cell(
    input: Tensor,
    hx: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None,
    b_hh: Tensor | None,
) -> Tensor:
    return _cell("relu", input, [hx], [w_ih, w_hh], [b_ih, b_hh], False)[0]
