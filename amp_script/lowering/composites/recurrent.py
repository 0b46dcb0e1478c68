"""Recurrent cells and layers: ``lstm``, ``gru``, ``rnn_tanh``, ``rnn_relu``.

The parameters of one layer in one direction are ``w_ih``, ``w_hh``, then ``b_ih`` and ``b_hh``
where there are biases, then ``w_hr`` where an LSTM projects its output. A kind is ``"gru"``,
``"tanh"`` or ``"relu"``; an LSTM, which has two states, stands apart.

The loops over layers have a constant length in nearly every program, and are then unrolled, so that
each parameter stands, and is cast, on its own. Those over time stay loops.

Where cuDNN does all layers, autocast casts what goes in, under the name of an internal operator;
the operator is then called as it is on what was cast.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from .probing import half_where_on
from .registry import decomposes, decomposes_text


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
    name = input.device.type
    return not (
        name == "cpu"
        or name == "mps"
        or name == "mtia"
        or name == "maia"
        or name == "meta"
        or name == "hpu"
        or name == "ipu"
        or name == "xla"
    )


# --- steps ----------------------------------------------------------------------------------------


def _gru_step(input_gates: Tensor, h: Tensor, w_hh: Tensor, b_hh: Tensor | None) -> Tensor:
    input_chunks = input_gates.unsafe_chunk(3, 1)
    hidden_chunks = linear(h, w_hh, b_hh).unsafe_chunk(3, 1)
    reset_gate = hidden_chunks[0].add_(input_chunks[0]).sigmoid_()
    update_gate = hidden_chunks[1].add_(input_chunks[1]).sigmoid_()
    new = input_chunks[2].add(hidden_chunks[2].mul_(reset_gate)).tanh_()
    return (h - new).mul_(update_gate).add_(new)


def _step(
    kind: str,
    input: Tensor,
    h: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None,
    b_hh: Tensor | None,
    multiplied: bool,
) -> Tensor:
    """One step. ``multiplied``: the input is already the product with ``w_ih``, bias added."""
    if kind == "gru":
        if _has_fused_cells(input):
            return torch.ops.aten._thnn_fused_gru_cell(
                torch.matmul(input, w_ih.t()), torch.matmul(h, w_hh.t()), h, b_ih, b_hh
            )[0]
        return _gru_step(input if multiplied else linear(input, w_ih, b_ih), h, w_hh, b_hh)
    gates = linear(h, w_hh, b_hh)
    gates = gates.add_(input if multiplied else linear(input, w_ih, b_ih))
    return torch.tanh(gates) if kind == "tanh" else torch.relu(gates)


def _lstm_step(
    input: Tensor,
    h: Tensor,
    c: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None,
    b_hh: Tensor | None,
    w_hr: Tensor | None,
    multiplied: bool,
) -> tuple[Tensor, Tensor]:
    if _has_fused_cells(input):
        new_h, new_c, _ = torch.ops.aten._thnn_fused_lstm_cell(
            torch.matmul(input, w_ih.t()), torch.matmul(h, w_hh.t()), c, b_ih, b_hh
        )
    else:
        gates = linear(h, w_hh, b_hh)
        gates = gates.add_(input if multiplied else linear(input, w_ih, b_ih))
        chunks = gates.unsafe_chunk(4, 1)
        input_gate = chunks[0].sigmoid_()
        forget_gate = chunks[1].sigmoid_()
        cell_gate = chunks[2].tanh_()
        output_gate = chunks[3].sigmoid_()
        new_c = (forget_gate * c).add_(input_gate * cell_gate)
        new_h = output_gate * new_c.tanh()
    return new_h if w_hr is None else torch.matmul(new_h, w_hr.t()), new_c


# --- one layer in one direction -------------------------------------------------------------------


def _layer(
    kind: str,
    input: Tensor,
    sizes: list[int] | None,
    h: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None,
    b_hh: Tensor | None,
    backwards: bool,
) -> tuple[Tensor, Tensor]:
    """Run over a tensor of time, batch, features or, with ``sizes``, over a packed sequence."""
    multiplied = input.is_cpu
    if multiplied:
        input = linear(input, w_ih, b_ih)
    outputs: list[Tensor] = []
    if sizes is None:
        steps = input.unbind(0)
        assert len(steps) > 0, "Expected sequence length to be larger than 0 in RNN"
        for i in range(len(steps)):
            step = steps[len(steps) - 1 - i] if backwards else steps[i]
            h = _step(kind, step, h, w_ih, w_hh, b_ih, b_hh, multiplied)
            outputs.append(h)
        if backwards:
            outputs.reverse()
        return torch.stack(outputs, 0), h
    if backwards:
        first, offset, last_size = h, input.size(0), sizes[-1]
        h = first.narrow(0, 0, last_size)
        for i in range(len(sizes)):
            size = sizes[len(sizes) - 1 - i]
            if size > last_size:
                h = torch.cat([h, first.narrow(0, last_size, size - last_size)], 0)
            offset -= size
            last_size = size
            step = input.narrow(0, offset, size)
            h = _step(kind, step, h, w_ih, w_hh, b_ih, b_hh, multiplied)
            outputs.append(h)
        outputs.reverse()
        return torch.cat(outputs, 0), h
    offset, last_size = 0, sizes[0]
    ended: list[Tensor] = []
    for size in sizes:
        step = input.narrow(0, offset, size)
        if size < last_size:
            ended.append(h.narrow(0, size, last_size - size))
            h = h.narrow(0, 0, size)
        offset += size
        last_size = size
        h = _step(kind, step, h, w_ih, w_hh, b_ih, b_hh, multiplied)
        outputs.append(h)
    ended.append(h)
    ended.reverse()
    return torch.cat(outputs, 0), torch.cat(ended, 0)


def _lstm_layer(
    input: Tensor,
    sizes: list[int] | None,
    h: Tensor,
    c: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None,
    b_hh: Tensor | None,
    w_hr: Tensor | None,
    backwards: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The same for an LSTM."""
    multiplied = input.is_cpu
    if multiplied:
        input = linear(input, w_ih, b_ih)
    outputs: list[Tensor] = []
    if sizes is None:
        steps = input.unbind(0)
        assert len(steps) > 0, "Expected sequence length to be larger than 0 in RNN"
        for i in range(len(steps)):
            step = steps[len(steps) - 1 - i] if backwards else steps[i]
            h, c = _lstm_step(step, h, c, w_ih, w_hh, b_ih, b_hh, w_hr, multiplied)
            outputs.append(h)
        if backwards:
            outputs.reverse()
        return torch.stack(outputs, 0), h, c
    if backwards:
        first_h, first_c, offset, last_size = h, c, input.size(0), sizes[-1]
        h, c = first_h.narrow(0, 0, last_size), first_c.narrow(0, 0, last_size)
        for i in range(len(sizes)):
            size = sizes[len(sizes) - 1 - i]
            if size > last_size:
                h = torch.cat([h, first_h.narrow(0, last_size, size - last_size)], 0)
                c = torch.cat([c, first_c.narrow(0, last_size, size - last_size)], 0)
            offset -= size
            last_size = size
            step = input.narrow(0, offset, size)
            h, c = _lstm_step(step, h, c, w_ih, w_hh, b_ih, b_hh, w_hr, multiplied)
            outputs.append(h)
        outputs.reverse()
        return torch.cat(outputs, 0), h, c
    offset, last_size = 0, sizes[0]
    ended_h: list[Tensor] = []
    ended_c: list[Tensor] = []
    for size in sizes:
        step = input.narrow(0, offset, size)
        if size < last_size:
            ended_h.append(h.narrow(0, size, last_size - size))
            ended_c.append(c.narrow(0, size, last_size - size))
            h, c = h.narrow(0, 0, size), c.narrow(0, 0, size)
        offset += size
        last_size = size
        h, c = _lstm_step(step, h, c, w_ih, w_hh, b_ih, b_hh, w_hr, multiplied)
        outputs.append(h)
    ended_h.append(h)
    ended_c.append(c)
    ended_h.reverse()
    ended_c.reverse()
    return torch.cat(outputs, 0), torch.cat(ended_h, 0), torch.cat(ended_c, 0)


def _onednn_layer(
    input: Tensor,
    h: Tensor,
    c: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None,
    b_hh: Tensor | None,
    backwards: bool,
    num_layers: int,
    bidirectional: bool,
    batch_first: bool,
    train: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The same for an LSTM that oneDNN runs as a whole."""
    output, new_h, new_c, _ = torch.ops.aten.mkldnn_rnn_layer(
        input,
        w_ih,
        w_hh,
        torch.zeros_like(w_ih) if b_ih is None else b_ih,
        torch.zeros_like(w_hh) if b_hh is None else b_hh,
        h,
        c,
        backwards,
        [],
        2,
        h.size(-1),
        num_layers,
        b_ih is not None,
        bidirectional,
        batch_first,
        train,
    )
    return output, new_h, new_c


# --- all layers -----------------------------------------------------------------------------------


def _layers(
    kind: str,
    input: Tensor,
    sizes: list[int] | None,
    hx: Tensor,
    params: list[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
) -> tuple[Tensor, Tensor]:
    directions = 2 if bidirectional else 1
    stride = 4 if has_biases else 2
    assert len(params) == num_layers * directions * stride, "an incorrect number of RNN parameters"
    assert hx.size(0) == num_layers * directions, "Expected more hidden states in stacked_rnn"
    states = hx.unbind(0)
    last: list[Tensor] = []
    for layer in range(num_layers):
        at = layer * directions * stride
        output, h = _layer(
            kind,
            input,
            sizes,
            states[layer * directions],
            params[at],
            params[at + 1],
            params[at + 2] if has_biases else None,
            params[at + 3] if has_biases else None,
            False,
        )
        last.append(h)
        if bidirectional:
            at += stride
            other, h = _layer(
                kind,
                input,
                sizes,
                states[layer * directions + 1],
                params[at],
                params[at + 1],
                params[at + 2] if has_biases else None,
                params[at + 3] if has_biases else None,
                True,
            )
            last.append(h)
            output = torch.cat([output, other], output.dim() - 1)
        if dropout != 0.0 and train and layer < num_layers - 1:
            output = torch.dropout(output, dropout, True)
        input = output
    return input, torch.stack(last, 0)


def _is_projected(
    params: list[Tensor], has_biases: bool, num_layers: int, bidirectional: bool
) -> bool:
    """Whether an LSTM projects its output: whether it has parameters for that."""
    return len(params) > num_layers * (2 if bidirectional else 1) * (4 if has_biases else 2)


def _lstm_layers(
    input: Tensor,
    sizes: list[int] | None,
    hx: list[Tensor],
    params: list[Tensor],
    has_biases: bool,
    projected: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    directions = 2 if bidirectional else 1
    stride = (4 if has_biases else 2) + (1 if projected else 0)
    assert len(params) == num_layers * directions * stride, "an incorrect number of RNN parameters"
    assert hx[0].size(0) == num_layers * directions, "Expected more hidden states in stacked_rnn"
    states_h, states_c = hx[0].unbind(0), hx[1].unbind(0)
    last_h: list[Tensor] = []
    last_c: list[Tensor] = []
    for layer in range(num_layers):
        at = layer * directions * stride
        output, h, c = _lstm_layer(
            input,
            sizes,
            states_h[layer * directions],
            states_c[layer * directions],
            params[at],
            params[at + 1],
            params[at + 2] if has_biases else None,
            params[at + 3] if has_biases else None,
            params[at + stride - 1] if projected else None,
            False,
        )
        last_h.append(h)
        last_c.append(c)
        if bidirectional:
            at += stride
            other, h, c = _lstm_layer(
                input,
                sizes,
                states_h[layer * directions + 1],
                states_c[layer * directions + 1],
                params[at],
                params[at + 1],
                params[at + 2] if has_biases else None,
                params[at + 3] if has_biases else None,
                params[at + stride - 1] if projected else None,
                True,
            )
            last_h.append(h)
            last_c.append(c)
            output = torch.cat([output, other], output.dim() - 1)
        if dropout != 0.0 and train and layer < num_layers - 1:
            output = torch.dropout(output, dropout, True)
        input = output
    return input, torch.stack(last_h, 0), torch.stack(last_c, 0)


def _onednn_layers(
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
    states_h, states_c = hx[0].contiguous(), hx[1].contiguous()
    last_h: list[Tensor] = []
    last_c: list[Tensor] = []
    for layer in range(num_layers):
        at = layer * directions * stride
        output, h, c = _onednn_layer(
            input,
            states_h[layer * directions],
            states_c[layer * directions],
            params[at],
            params[at + 1],
            params[at + 2] if has_biases else None,
            params[at + 3] if has_biases else None,
            False,
            num_layers,
            bidirectional,
            batch_first,
            train,
        )
        last_h.append(h)
        last_c.append(c)
        if bidirectional:
            at += stride
            other, h, c = _onednn_layer(
                input,
                states_h[layer * directions + 1],
                states_c[layer * directions + 1],
                params[at],
                params[at + 1],
                params[at + 2] if has_biases else None,
                params[at + 3] if has_biases else None,
                True,
                num_layers,
                bidirectional,
                batch_first,
                train,
            )
            last_h.append(h)
            last_c.append(c)
            output = torch.cat([output, other], -1)
        if dropout != 0.0 and train and layer < num_layers - 1:
            output = torch.dropout(output, dropout, True)
        input = output
    return input, torch.stack(last_h, 0), torch.stack(last_c, 0)


# --- the operators --------------------------------------------------------------------------------


@decomposes("aten::lstm.input", unroll=True)
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
    projected = _is_projected(params, has_biases, num_layers, bidirectional)
    steps = input.transpose(0, 1) if batch_first else input
    if _uses_onednn(input) and not projected:
        output, h, c = _onednn_layers(
            steps.contiguous(),
            hx,
            params,
            has_biases,
            num_layers,
            dropout,
            train,
            bidirectional,
            batch_first,
        )
    elif projected:
        output, h, c = _lstm_layers(
            steps, None, hx, params, has_biases, True, num_layers, dropout, train, bidirectional
        )
    else:
        output, h, c = _lstm_layers(
            steps, None, hx, params, has_biases, False, num_layers, dropout, train, bidirectional
        )
    return output.transpose(0, 1) if batch_first else output, h, c


@decomposes("aten::lstm.data", unroll=True)
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
    projected = _is_projected(params, has_biases, num_layers, bidirectional)
    if projected:
        return _lstm_layers(
            data, sizes, hx, params, has_biases, True, num_layers, dropout, train, bidirectional
        )
    if sizes[0] == sizes[-1] and _packed_onednn() and _uses_onednn(data):
        output, h, c = _onednn_layers(
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
        return output.reshape([data.size(0), output.size(-1)]), h, c
    return _lstm_layers(
        data, sizes, hx, params, has_biases, False, num_layers, dropout, train, bidirectional
    )


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
    return _lstm_step(input, hx[0], hx[1], w_ih, w_hh, b_ih, b_hh, None, False)


_LAYERS = """
def layers(
    input: Tensor,
    hx: Tensor,
    params: List[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> Tuple[Tensor, Tensor]:
    if torch.cudnn_is_acceptable(input):
        return torch.{name}(
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
    steps = input.transpose(0, 1) if batch_first else input
    output, h = run(
        "{kind}", steps, None, hx, params, has_biases, num_layers, dropout, train, bidirectional
    )
    return output.transpose(0, 1) if batch_first else output, h
"""
_PACKED_LAYERS = """
def packed_layers(
    data: Tensor,
    batch_sizes: Tensor,
    hx: Tensor,
    params: List[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
) -> Tuple[Tensor, Tensor]:
    if torch.cudnn_is_acceptable(data):
        return torch.{name}(
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
    sizes: List[int] = batch_sizes.tolist()
    return run(
        "{kind}", data, sizes, hx, params, has_biases, num_layers, dropout, train, bidirectional
    )
"""
_CELL = """
def cell(
    input: Tensor,
    hx: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Optional[Tensor],
    b_hh: Optional[Tensor],
) -> Tensor:
    return step("{kind}", input, hx, w_ih, w_hh, b_ih, b_hh, False)
"""
_NAMES = {"torch": torch, "half_where_on": half_where_on, "run": _layers, "step": _step}

for _name, _kind in {"gru": "gru", "rnn_tanh": "tanh", "rnn_relu": "relu"}.items():
    for _operator, _text in {
        f"aten::{_name}.input": _LAYERS,
        f"aten::{_name}.data": _PACKED_LAYERS,
        f"aten::{_name}_cell": _CELL,
    }.items():
        decomposes_text(_operator, _text.format(name=_name, kind=_kind), _NAMES, unroll=True)
