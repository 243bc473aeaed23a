"""Recurrent layers over whole sequences: LSTM, GRU, and RNN with tanh or relu.

Each layer and direction is one function node, in which PyTorch's autograd computes the gradient.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import chainer
import chainer.functions as F
import numpy as np
import torch
from chainer import FunctionNode, Variable
from chainer.functions.rnn import n_step_gru, n_step_lstm
from chainer.functions.rnn.n_step_rnn import _one_directional_loop

from chainer_compat.torch_kernels.arrays import array, tensors
from chainer_compat.torch_kernels.dispatch import Unsupported


class Cell(NamedTuple):
    """A kind of recurrent layer."""

    #: PyTorch's function.
    torch: Callable[..., tuple[torch.Tensor, ...]]
    #: Chainer's function for one step.
    step: Callable[..., tuple[Variable, Variable | None]]
    #: Number of weights for the input; the same number of weights is for the state.
    gates: int
    has_cell: bool = False


LSTM = Cell(torch.lstm, n_step_lstm._lstm, 4, has_cell=True)
GRU = Cell(torch.gru, n_step_gru._gru, 3)


def _rnn_step(activation: Callable[[Variable], Variable]) -> Callable[..., tuple[Variable, None]]:
    def step(x: Variable, h: Variable, c: None, w: Sequence[Variable], b: Sequence[Variable]
             ) -> tuple[Variable, None]:
        return activation(F.linear(x, w[0], b[0]) + F.linear(h, w[1], b[1])), None

    return step


RNN = {'tanh': Cell(torch.rnn_tanh, _rnn_step(F.tanh), 1),
       'relu': Cell(torch.rnn_relu, _rnn_step(F.relu), 1)}

Weights = Sequence[Sequence[Variable]]


def lstm(n_layers: int, dropout_ratio: float, hx: Variable, cx: Variable, ws: Weights, bs: Weights,
         xs: Sequence[Variable], use_bi_direction: bool, **kwargs: object
         ) -> tuple[Variable, Variable, tuple[Variable, ...]]:
    """Compute ``n_step_lstm`` or ``n_step_bilstm``."""
    return _layers(LSTM, n_layers, dropout_ratio, hx, cx, ws, bs, xs, use_bi_direction, kwargs)


def gru(n_layers: int, dropout_ratio: float, hx: Variable, ws: Weights, bs: Weights,
        xs: Sequence[Variable], use_bi_direction: bool, **kwargs: object
        ) -> tuple[Variable, tuple[Variable, ...]]:
    """Compute ``n_step_gru`` or ``n_step_bigru``."""
    hy, _, ys = _layers(GRU, n_layers, dropout_ratio, hx, None, ws, bs, xs, use_bi_direction,
                        kwargs)
    return hy, ys


def rnn(n_layers: int, dropout_ratio: float, hx: Variable, ws: Weights, bs: Weights,
        xs: Sequence[Variable], activation: str, use_bi_direction: bool, **kwargs: object
        ) -> tuple[Variable, tuple[Variable, ...]]:
    """Compute ``n_step_rnn`` or ``n_step_birnn``."""
    if activation not in RNN:
        raise Unsupported
    hy, _, ys = _layers(RNN[activation], n_layers, dropout_ratio, hx, None, ws, bs, xs,
                        use_bi_direction, kwargs)
    return hy, ys


def _layers(cell: Cell, n_layers: int, dropout_ratio: float, hx: Variable, cx: Variable | None,
            ws: Weights, bs: Weights, xs: Sequence[Variable], use_bi_direction: bool, kwargs: object
            ) -> tuple[Variable, Variable | None, tuple[Variable, ...]]:
    lengths = [len(x) for x in xs]
    sequences = Sequences.of(lengths)
    arrays = [getattr(v, 'array', v) for v in itertools.chain(xs, *ws, *bs, [hx])]
    is_supported = (
        not kwargs and len(hx) and all(a.dtype == arrays[0].dtype for a in arrays)
        and xs[0].shape[1] == ws[0][0].shape[1] and hx.shape[1] == lengths[0]
        and (cx is None or cx.shape == hx.shape)
        and all(type(a) is type(arrays[0]) for a in arrays))
    if not is_supported:
        raise Unsupported
    tensors(arrays[0])  # raises Unsupported for other dtypes and devices
    directions = 2 if use_bi_direction else 1
    x = F.concat(xs, axis=0)
    hs, cs = [], []
    for layer in range(n_layers):
        ys = []
        for direction in range(directions):
            i = layer * directions + direction
            # Each direction has its own dropout mask, as in Chainer.
            entry = x if layer == 0 else F.dropout(x, dropout_ratio)
            state = [hx[i]] if cx is None else [hx[i], cx[i]]
            node = Layer(cell, sequences, is_reversed=direction == 1)
            y, h, *c = node.apply([entry, *state, *ws[i], *bs[i]])
            ys.append(y)
            hs.append(h)
            cs += c
        x = ys[0] if directions == 1 else F.concat(ys, axis=1)
    outputs = F.split_axis(x, np.cumsum(lengths[:-1]), axis=0) if len(lengths) > 1 else (x,)
    return F.stack(hs), F.stack(cs) if cs else None, tuple(outputs)


class Sequences(NamedTuple):
    """Sequences of one batch, sorted by length, whose elements are stored by time step."""

    #: Number of sequences that have an element at each time step.
    batch_sizes: tuple[int, ...]
    #: Where each element is, if every sequence is reversed.
    reverse: np.ndarray

    @classmethod
    def of(cls, batch_sizes: Sequence[int]) -> Sequences:
        """Return the sequences for batch sizes, which must not increase."""
        sizes = np.array(batch_sizes)
        if not len(sizes) or sizes[-1] < 1 or (np.diff(sizes) > 0).any():
            raise Unsupported
        starts = np.cumsum(sizes) - sizes
        lengths = (sizes[:, None] > np.arange(sizes[0])).sum(axis=0)
        return cls(tuple(batch_sizes), np.concatenate([
            starts[lengths[:size] - 1 - step] + np.arange(size)
            for step, size in enumerate(sizes)]))


class Layer(FunctionNode):
    """One layer in one direction.

    Its inputs are the elements of the sequences, the initial state (``h``, for LSTM also ``c``),
    the weights and the biases; its outputs the elements and the final state.
    """

    def __init__(self, cell: Cell, sequences: Sequences, is_reversed: bool) -> None:
        self.cell = cell
        self.sequences = sequences
        self.is_reversed = is_reversed

    def forward(self, inputs: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
        """Compute the outputs, and keep PyTorch's graph of the computation."""
        self.retain_inputs(tuple(range(len(inputs))))
        self._tensors = tensors(*inputs)
        with torch.set_grad_enabled(chainer.config.enable_backprop):
            if chainer.config.enable_backprop:
                self._tensors = [t.detach().requires_grad_() for t in self._tensors]
            self._results = self._compute(*self._tensors)
        return tuple(array(result.detach()) for result in self._results)

    def _compute(self, x: torch.Tensor, *others: torch.Tensor) -> tuple[torch.Tensor, ...]:
        state, weights, biases = self._separate(others)
        states = [s[None] for s in state]
        n = self.cell.gates
        parameters = [torch.cat(tuple(part))
                      for part in (weights[:n], weights[n:], biases[:n], biases[n:])]
        order = torch.from_numpy(self.sequences.reverse)
        if self.is_reversed:
            x = x[order]
        entry: tuple[torch.Tensor, ...]
        sizes = self.sequences.batch_sizes
        if sizes[0] == sizes[-1]:  # no padding is needed, which is faster
            entry = x.view(len(sizes), sizes[0], -1),
        else:
            entry = x, torch.tensor(sizes)
        options = [True, 1, 0., False, False]  # biases, layers, dropout, train, bidirectional
        if len(entry) == 1:
            options.append(False)  # batch_first
        y, *final = self.cell.torch(*entry, states if self.cell.has_cell else states[0], parameters,
                                    *options)
        y = y.reshape(len(x), -1)
        return y[order] if self.is_reversed else y, *(s[0] for s in final)

    def _separate(self, others: Sequence[torch.Tensor]) -> tuple[Sequence[torch.Tensor], ...]:
        """Split the inputs after the first into state, weights and biases."""
        n_states, n_weights = 1 + self.cell.has_cell, 2 * self.cell.gates
        return (others[:n_states], others[n_states:n_states + n_weights],
                others[n_states + n_weights:])

    def backward(self, indexes: tuple[int, ...], grad_outputs: tuple[Variable | None, ...]
                 ) -> tuple[Variable, ...]:
        """Return the gradients of inputs, computed by PyTorch, or by Chainer if differentiable."""
        if chainer.config.enable_backprop:
            return self._differentiable_gradients(indexes, grad_outputs)
        pairs = [(result, grad.array) for result, grad
                 in zip(self._results, grad_outputs, strict=True) if grad is not None]
        gradients = torch.autograd.grad(
            [result for result, _ in pairs], [self._tensors[i] for i in indexes],
            tensors(*(grad for _, grad in pairs)), retain_graph=True)
        return tuple(chainer.as_variable(array(gradient)) for gradient in gradients)

    def _differentiable_gradients(
        self, indexes: tuple[int, ...], grad_outputs: tuple[Variable | None, ...]
    ) -> tuple[Variable, ...]:
        """Compute the layer again with Chainer's functions, step by step."""
        inputs = self.get_retained_inputs()
        x, *others = inputs
        state, weights, biases = self._separate(others)
        sections = np.cumsum(self.sequences.batch_sizes)[:-1]
        xs = F.split_axis(x, sections, axis=0) if len(sections) else (x,)
        h, c, ys = _one_directional_loop(
            self.cell.step, xs[::-1] if self.is_reversed else xs, *state,
            *([] if self.cell.has_cell else [None]), weights, biases)
        outputs = [F.concat(ys[::-1] if self.is_reversed else ys, axis=0), h, c]
        # Only LSTM has a cell, the last of the outputs.
        pairs = [(y, gy) for y, gy in zip(outputs, grad_outputs, strict=False) if gy is not None]
        return tuple(chainer.grad(
            [y for y, _ in pairs], [inputs[i] for i in indexes], [gy for _, gy in pairs],
            enable_double_backprop=True))
