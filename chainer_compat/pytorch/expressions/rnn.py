"""Cells of recurrent networks, whose gates are interleaved in Chainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def lstm(f: Any, c: Any, x: Any) -> Any:
    """``a, i, f, o = x.unflatten(1, (-1, 4)).unbind(2)``, then the cell of an LSTM."""
    a, i, forget, o = _gates(x)
    states, batch = f.in_shapes[0][0], f.in_shapes[1][0]
    is_partial = states is not batch and f.sizes(0) != f.sizes(1)
    rest = c[batch:] if is_partial else None
    if is_partial:
        c = c[:batch]
    c = torch.tanh(a) * torch.sigmoid(i) + torch.sigmoid(forget) * c
    h = torch.sigmoid(o) * torch.tanh(c)
    return (c if rest is None else torch.cat([c, rest], 0)), h


def slstm(f: Any, c1: Any, c2: Any, x1: Any, x2: Any) -> Any:
    """The cell of an S-LSTM, with gates as in ``lstm``."""
    (a1, i1, f1, o1), (a2, i2, f2, o2) = _gates(x1), _gates(x2)
    c = (torch.tanh(a1) * torch.sigmoid(i1) + torch.tanh(a2) * torch.sigmoid(i2)
         + torch.sigmoid(f1) * c1 + torch.sigmoid(f2) * c2)
    return c, torch.sigmoid(o1 + o2) * torch.tanh(c)


def tree_lstm(f: Any, *inputs: Any) -> Any:
    """The cell of a tree LSTM, with the gates ``torch.chunk(x, n + 3, 1)``."""
    *cs, x = inputs
    gates = torch.chunk(x, len(cs) + 3, 1)
    a, i, o = gates[0], gates[1], gates[2]
    c = torch.tanh(a) * torch.sigmoid(i)
    for k, each in enumerate(cs):
        c = c + torch.sigmoid(gates[3 + k]) * each
    return c, torch.sigmoid(o) * torch.tanh(c)


def _gates(x: Any) -> list[Any]:
    gates = x.unflatten(1, (-1, 4))
    return [gates.select(2, i) for i in range(4)]


EXPRESSIONS: dict[str, Callable[..., Any]] = {
    'rnn.lstm.LSTM': lstm,
    'rnn.slstm.SLSTM': slstm,
    'rnn.tree_lstm.TreeLSTM': tree_lstm,
}
