"""Links of recurrent layers: sequences become one array, without a variable for each time step."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence

import chainer
import chainer.links as L
import numpy as np
from chainer import FunctionNode, Variable
from chainer.functions import permutate
from chainer.links.rnn.n_step_rnn import NStepRNNBase, argsort_list_descent

from chainer_compat.pytorch.kernels import n_step_rnn
from chainer_compat.pytorch.unsupported import Unsupported

#: Cells of Chainer's links, and whether they are bidirectional, by their method ``rnn``.
_LINKS: dict[Callable[..., object], tuple[n_step_rnn.Cell, bool]] = {
    L.NStepLSTM.rnn: (n_step_rnn.LSTM, False), L.NStepBiLSTM.rnn: (n_step_rnn.LSTM, True),
    L.NStepGRU.rnn: (n_step_rnn.GRU, False), L.NStepBiGRU.rnn: (n_step_rnn.GRU, True),
    L.NStepRNNTanh.rnn: (n_step_rnn.RNN['tanh'], False),
    L.NStepBiRNNTanh.rnn: (n_step_rnn.RNN['tanh'], True),
    L.NStepRNNReLU.rnn: (n_step_rnn.RNN['relu'], False),
    L.NStepBiRNNReLU.rnn: (n_step_rnn.RNN['relu'], True),
}


def call(link: NStepRNNBase, hs: Sequence[Variable | None], xs: Sequence[Variable],
         **kwargs: object) -> tuple[list[Variable], list[Variable]]:
    """Compute a link: return its final states and the outputs of each sequence."""
    found = _LINKS.get(getattr(link.rnn, '__func__', link.rnn))  # a subclass may have another one
    if found is None or kwargs or not isinstance(xs, (list, tuple)) or not xs:
        raise Unsupported
    if not all(x.ndim == 2 and x.shape[1] == xs[0].shape[1] for x in xs):
        raise Unsupported
    cell, is_bidirectional = found
    layout = SequenceLayout(xs)
    states = [_initial(link, xs) if h is None else layout.sort(h) for h in hs]
    hx, cx = states if cell.has_cell else (states[0], None)
    n_step_rnn.check(layout.sizes, xs, hx, cx, link.ws, link.bs)
    y, hy, cy = n_step_rnn.stacked(
        cell, layout.sizes, link.n_layers, link.dropout, hx, cx, link.ws, link.bs,
        _ByTime(layout).apply(xs)[0], is_bidirectional)
    return ([layout.restore(h) for h in (hy, cy) if h is not None],
            list(_BySequence(layout).apply((y,))))


def _initial(link: NStepRNNBase, xs: Sequence[Variable]) -> Variable:
    """Return an initial state; zeros need no gradient, because user code cannot access them."""
    state = link.init_hx(xs)
    if type(link).init_hx is NStepRNNBase.init_hx and 'init_hx' not in vars(link):
        return Variable(state.array, requires_grad=False)
    return state


class SequenceLayout:
    """The positions of the elements of sequences, ordered by sequence and by time step.

    Within a time step, the longest sequence comes first.

    Args:
        xs: The sequences.
    """

    def __init__(self, xs: Sequence[Variable]) -> None:
        lengths = [len(x) for x in xs]
        #: The beginning of each sequence and the end of the last one, one sequence after another.
        self.bounds: list[int] = [0, *itertools.accumulate(lengths)]
        self._order: np.ndarray = np.arange(len(xs))
        #: Number of sequences and of time steps, if all sequences have the same length.
        self._shape = (len(xs), lengths[0]) if lengths.count(lengths[0]) == len(xs) else None
        if self._shape is None:
            self._order = argsort_list_descent(xs)
        self._is_sorted: bool = (
            self._shape is not None or (self._order == np.arange(len(xs))).all().item())
        #: Number of sequences that have an element at each time step.
        self.sizes: list[int] = (
            [len(xs)] * lengths[0] if self._shape else self._exists.sum(axis=1).tolist())

    def sort(self, state: Variable) -> Variable:
        """Put the states of sequences, along the second axis, in the order by time step.

        The result is a copy, so user code may change its state before the backward pass.
        """
        return permutate(state, self._order, axis=1)

    def restore(self, state: Variable) -> Variable:
        """Undo :meth:`sort`, for states that nothing else uses."""
        return state if self._is_sorted else permutate(state, self._order, axis=1, inv=True)

    def by_time(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """Put the elements of sequences into one array, in the order by time step."""
        xp = chainer.backend.get_array_module(*arrays)
        if self._shape:
            return xp.stack(arrays, axis=1).reshape(-1, *arrays[0].shape[1:])
        return xp.concatenate(arrays).take(xp.asarray(self._by_time), axis=0)

    def by_sequence(self, array: np.ndarray) -> np.ndarray:
        """Undo :meth:`by_time`: return a copy with one sequence after another."""
        if self._shape:
            n, length = self._shape
            return array.reshape(length, n, -1).swapaxes(0, 1).copy().reshape(array.shape)
        return array.take(chainer.backend.get_array_module(array).asarray(
            self._by_sequence), axis=0)

    @functools.cached_property
    def _exists(self) -> np.ndarray:
        """Whether a sequence has an element, by time step and sequence."""
        lengths = np.diff(self.bounds)[self._order]
        return np.arange(lengths[0])[:, None] < lengths

    @functools.cached_property
    def _by_time(self) -> np.ndarray:
        starts = np.array(self.bounds[:-1])[self._order]
        return (starts + np.arange(len(self._exists))[:, None])[self._exists]

    @functools.cached_property
    def _by_sequence(self) -> np.ndarray:
        return np.argsort(self._by_time)


class _ByTime(FunctionNode):
    """Puts the elements of sequences into one array, by time step."""

    def __init__(self, layout: SequenceLayout) -> None:
        self.layout = layout

    def forward(self, inputs: tuple[np.ndarray, ...]) -> tuple[np.ndarray]:
        return self.layout.by_time(inputs),

    def backward(self, indexes: tuple[int, ...], grad_outputs: tuple[Variable]
                 ) -> tuple[Variable, ...]:
        gradients = _BySequence(self.layout).apply(grad_outputs)
        return tuple(gradients[i] for i in indexes)


class _BySequence(FunctionNode):
    """Separates the elements of sequences, which are sorted by time step."""

    def __init__(self, layout: SequenceLayout) -> None:
        self.layout = layout

    def forward(self, inputs: tuple[np.ndarray]) -> tuple[np.ndarray, ...]:
        x = self.layout.by_sequence(inputs[0])
        return tuple(x[start:end] for start, end in itertools.pairwise(self.layout.bounds))

    def backward(self, indexes: tuple[int, ...], grad_outputs: tuple[Variable | None, ...]
                 ) -> tuple[Variable, ...]:
        known = next(gradient for gradient in grad_outputs if gradient is not None)
        gradients = [
            known.xp.zeros((end - start, known.shape[1]), known.dtype) if gradient is None
            else gradient for gradient, (start, end) in zip(
                grad_outputs, itertools.pairwise(self.layout.bounds), strict=True)]
        return _ByTime(self.layout).apply(gradients)
