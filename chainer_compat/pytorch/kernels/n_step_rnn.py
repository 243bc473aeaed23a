"""Recurrent layers over whole sequences: LSTM, GRU, and RNN with tanh or relu.

Each layer and direction is one function node, in which PyTorch's autograd computes the gradient.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple

import chainer
import chainer.functions as F
import numpy as np
import torch
from chainer import FunctionNode, Variable
from chainer.functions.rnn import n_step_gru, n_step_lstm
from chainer.functions.rnn.n_step_rnn import _one_directional_loop

from chainer_compat.graph import nodes
from chainer_compat.graph.settings import raises_errors
from chainer_compat.pytorch import runs
from chainer_compat.pytorch.tensors.arrays import multiplies_bfloat16, operands, product, tensors
from chainer_compat.pytorch.tensors.gpu_arrays import precision
from chainer_compat.pytorch.unsupported import Unsupported

# PyTorch warns because cuDNN copies the weights into one array. A copy by torch.cat in `_compute`
# would be as large. The filter is set only once, because catch_warnings in each call would make
# Python show all other warnings again.
warnings.filterwarnings('ignore', 'RNN module weights are not part of single')


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

#: Minimum number of time steps for which a separate call is faster.
MIN_STEPS = 4


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
    """Compute the layers for the elements of each time step."""
    sizes = [len(x) for x in xs]
    if kwargs:
        raise Unsupported
    check(sizes, xs, hx, cx, ws, bs)
    y, hy, cy = stacked(cell, sizes, n_layers, dropout_ratio, hx, cx, ws, bs, F.concat(xs, axis=0),
                        use_bi_direction)
    outputs = F.split_axis(y, np.cumsum(sizes[:-1]), axis=0) if len(sizes) > 1 else (y,)
    return hy, cy, tuple(outputs)


def check(sizes: Sequence[int], xs: Sequence[Variable], hx: Variable, cx: Variable | None,
          ws: Weights, bs: Weights) -> None:
    """Check whether PyTorch can compute layers.

    Args:
        sizes: Number of sequences that have an element at each time step.
        xs: The inputs, in any order.
        hx: The initial states.
        cx: The initial cells of LSTM.
        ws: The weights of the layers.
        bs: The biases of the layers.

    Raises:
        Unsupported: If it cannot.
    """
    arrays = [getattr(v, 'array', v) for v in itertools.chain(xs, *ws, *bs, [hx])]
    is_supported = (
        len(hx) and sizes and sizes[-1] > 0 and sorted(sizes, reverse=True) == sizes
        and all(a.dtype == arrays[0].dtype for a in arrays)
        and all(a.ndim == 2 for a in itertools.chain(xs, *ws)) and hx.ndim == 3
        and all(b.ndim == 1 for b in itertools.chain(*bs))
        and xs[0].shape[1:] == ws[0][0].shape[1:] and hx.shape[1] == sizes[0]
        and (cx is None or cx.shape == hx.shape)
        and all(type(a) is type(arrays[0]) for a in arrays))
    if not is_supported:
        raise Unsupported
    tensors(arrays[0])  # raises Unsupported for other dtypes and devices


def stacked(cell: Cell, sizes: Sequence[int], n_layers: int, dropout_ratio: float, hx: Variable,
            cx: Variable | None, ws: Weights, bs: Weights, x: Variable, use_bi_direction: bool
            ) -> tuple[Variable, Variable, Variable | None]:
    """Compute layers that passed :func:`check`, for the elements of all time steps in one array.

    Returns:
        The outputs, the final states, and the final cells of LSTM.
    """
    orders = [None, reversing(sizes)] if use_bi_direction else [None]
    hs, cs = [], []
    for layer in range(n_layers):
        ys = []
        for direction, order in enumerate(orders):
            i = layer * len(orders) + direction
            # Each direction has its own dropout mask, as in Chainer.
            entry = x if layer == 0 else F.dropout(x, dropout_ratio)
            state = [_element(hx, i)] if cx is None else [_element(hx, i), _element(cx, i)]
            y, h, *c = Layer(cell, sizes, order).apply([entry, *state, *ws[i], *bs[i]])
            ys.append(y)
            hs.append(h)
            cs += c
        x = F.concat(ys, axis=1) if use_bi_direction else y
    return x, F.stack(hs), F.stack(cs) if cs else None


def _element(state: Variable, i: int) -> Variable | np.ndarray:
    """Return the state of one layer; without a node of the graph if it needs no gradient."""
    is_constant = isinstance(state, Variable) and not state.requires_grad
    return state.array[i] if is_constant else state[i]


def reversing(sizes: Sequence[int]) -> np.ndarray:
    """Return where each element is if every sequence is reversed.

    Args:
        sizes: Number of sequences that have an element at each time step.
    """
    starts = np.cumsum(sizes) - sizes
    lengths = (np.array(sizes)[:, None] > np.arange(sizes[0])).sum(axis=0)
    return np.concatenate([starts[lengths[:size] - 1 - step] + np.arange(size)
                           for step, size in enumerate(sizes)])


def _has_fast_layer(cell: Cell, x: torch.Tensor) -> bool:
    """Return whether PyTorch uses oneDNN for sequences of equal length, which is twice as fast."""
    return cell is LSTM and not x.is_cuda and x.dtype == torch.float32


def _parts(sizes: Sequence[int]) -> list[list[int]]:
    """Split the time steps: long parts with a constant number of sequences, and the rest."""
    parts: list[list[int]] = []
    between: list[int] = []
    for _, group in itertools.groupby(sizes):
        run = [*group]
        if len(run) < MIN_STEPS:
            between += run
            continue
        parts += [between, run] if between else [run]
        between = []
    return [*parts, between] if between else parts


class Layer(FunctionNode):
    """One layer in one direction.

    Its inputs are the elements of the sequences by time step, the initial state (``h``, for LSTM
    also ``c``), the weights and the biases; its outputs the elements and the final state.

    Args:
        cell: The kind of layer.
        sizes: Number of sequences that have an element at each time step; it does not increase.
        order: Where each element is in the reversed sequences; ``None`` to go forward.
    """

    def __init__(self, cell: Cell, sizes: Sequence[int], order: np.ndarray | None) -> None:
        self.cell = cell
        self.sizes = sizes
        self.order = order

    def forward(self, inputs: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
        """Compute the outputs, and keep PyTorch's graph of the computation."""
        self.retain_inputs(tuple(range(len(inputs))))
        # Other cells compute step by step, and sum the gradients of the steps in bfloat16.
        sums_in_float32 = self.cell is LSTM and self._has_equal_lengths()
        x, *others = operands(*inputs, has_kernel=sums_in_float32)
        state, weights, biases = self._separate(others)
        n = self.cell.gates
        # Keep these out of PyTorch's graph: backward splits the gradients.
        self._tensors = [x, *state, *[torch.cat(tuple(part)) for part in (
            weights[:n], weights[n:], biases[:n], biases[n:])]]
        with torch.set_grad_enabled(chainer.config.enable_backprop):
            if chainer.config.enable_backprop:
                self._tensors = [t.detach().requires_grad_() for t in self._tensors]
            self._results = self._compute(*self._tensors)
        return tuple([product(result.detach()) for result in self._results])

    def _compute(self, x: torch.Tensor, *others: torch.Tensor) -> tuple[torch.Tensor, ...]:
        *state, w_of_x, w_of_h, b_of_x, b_of_h = others
        states, parameters = [s[None] for s in state], [w_of_x, w_of_h, b_of_x, b_of_h]
        order = None if self.order is None else torch.from_numpy(self.order)
        if order is not None:
            x = x[order]
        parts = _parts(self.sizes) if _has_fast_layer(self.cell, x) else [self.sizes]
        with precision(x, 'rnn'):
            y, *final = (self._steps if len(parts) == 1 else self._in_parts)(
                x, *parts, states=states, parameters=parameters)
        return y if order is None else y[order], *(s[0] for s in final)

    def _in_parts(self, x: torch.Tensor, *parts: Sequence[int], states: list[torch.Tensor],
                  parameters: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Compute the parts one after another, passing on the states."""
        ys, ended = [], []
        # For the other parts, PyTorch would sum the gradients of the steps in bfloat16.
        of_equal = torch.bfloat16 if multiplies_bfloat16(x) else x.dtype
        for elements, sizes in zip(x.split([*map(sum, parts)]), parts, strict=True):
            n = sizes[0]
            dtype = of_equal if n == sizes[-1] else x.dtype
            ended.append([s[:, n:] for s in states])  # sequences that have no more elements
            y, *states = [each.to(x.dtype) for each in self._steps(
                elements.to(dtype), sizes, states=[s[:, :n].to(dtype) for s in states],
                parameters=[each.to(dtype) for each in parameters])]
            ys.append(y)
        return torch.cat(ys), *[torch.cat(ends, 1) for ends in zip(
            states, *reversed(ended), strict=True)]

    def _steps(self, x: torch.Tensor, sizes: Sequence[int], *, states: list[torch.Tensor],
               parameters: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        # cuDNN keeps what backward needs only while training. There is no dropout.
        is_training = chainer.config.enable_backprop
        options = [True, 1, 0., is_training, False]  # biases, layers, dropout, train, bidirectional
        entry: tuple[torch.Tensor, ...]
        if sizes[0] == sizes[-1]:  # no padding, which is faster
            entry = x.view(len(sizes), sizes[0], -1),
            options.append(False)  # batch_first
        else:
            entry = x, torch.tensor(sizes)
        y, *final = self.cell.torch(
            *entry, states if self.cell.has_cell else states[0], parameters, *options)
        return y.reshape(len(x), -1), *final

    def _has_equal_lengths(self) -> bool:
        return self.sizes[0] == self.sizes[-1]

    def _separate(self, others: Sequence[torch.Tensor]) -> tuple[Sequence[torch.Tensor], ...]:
        """Split the inputs after the first into state, weights and biases."""
        n_states, n_weights = 1 + self.cell.has_cell, 2 * self.cell.gates
        return (others[:n_states], others[n_states:n_states + n_weights],
                others[n_states + n_weights:])

    def backward(self, indexes: tuple[int, ...], grad_outputs: tuple[Variable | None, ...]
                 ) -> tuple[Variable, ...]:
        """Return the gradients of inputs, computed by PyTorch, or by Chainer if differentiable."""
        if chainer.config.enable_backprop or raises_errors():
            return self._differentiable_gradients(indexes, grad_outputs)
        pairs = [(result, grad.array) for result, grad
                 in zip(self._results, grad_outputs, strict=True) if grad is not None]
        grads = tensors(*(grad for _, grad in pairs))
        places = [self._place(i) for i in indexes]
        needed = sorted({number for number, _ in places})
        with precision(grads[0], 'rnn'):
            gradients = runs.gradients(
                [result for result, _ in pairs],
                [grad.to(self._results[0].dtype) for grad in grads],
                [self._tensors[number] for number in needed])
        found = {number: gradient if number <= 1 + self.cell.has_cell
                 else gradient.chunk(self.cell.gates)
                 for number, gradient in zip(needed, gradients, strict=True)
                 if gradient is not None}
        return tuple([nodes.variable(product(
            found[number] if part is None else found[number][part]), False)
            for number, part in places])

    def _place(self, index: int) -> tuple[int, int | None]:
        """Return the index of the tensor that contains an input, and its part (``None``: all)."""
        first = 2 + self.cell.has_cell
        if index < first:
            return index, None
        number, part = divmod(index - first, self.cell.gates)
        return first + number, part

    def _differentiable_gradients(
        self, indexes: tuple[int, ...], grad_outputs: tuple[Variable | None, ...]
    ) -> tuple[Variable, ...]:
        """Compute the layer again with Chainer's functions, step by step."""
        inputs = self.get_retained_inputs()
        x, *others = inputs
        state, weights, biases = self._separate(others)
        sections = np.cumsum(self.sizes)[:-1]
        xs = F.split_axis(x, sections, axis=0) if len(sections) else (x,)
        h, c, ys = _one_directional_loop(
            self.cell.step, xs if self.order is None else xs[::-1], *state,
            *([] if self.cell.has_cell else [None]), weights, biases)
        outputs = [F.concat(ys if self.order is None else ys[::-1], axis=0), h, c]
        # Only LSTM has a cell, the last of the outputs.
        pairs = [(y, gy) for y, gy in zip(outputs, grad_outputs, strict=False) if gy is not None]
        return tuple(chainer.grad(
            [y for y, _ in pairs], [inputs[i] for i in indexes], [gy for _, gy in pairs],
            enable_double_backprop=True))
