"""Links of recurrent layers: sequences become one array, without a variable for each time step."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import chainer
import chainer.links as L
import numpy as np
from chainer import FunctionNode, Variable
from chainer.functions import permutate
from chainer.links.rnn.n_step_rnn import NStepRNNBase, argsort_list_descent

from chainer_compat.torch_kernels import n_step_rnn
from chainer_compat.torch_kernels.dispatch import Unsupported

#: Cells of the links of Chainer, and whether they are bidirectional, by their method ``rnn``.
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
    indices = argsort_list_descent(xs)
    layout = SequenceLayout([len(x) for x in xs], indices)
    states = [_initial(link, xs) if h is None else permutate(h, indices, axis=1) for h in hs]
    hx, cx = states if cell.has_cell else (states[0], None)
    n_step_rnn.check(layout.sizes, xs, hx, cx, link.ws, link.bs)
    y, hy, cy = n_step_rnn.stacked(
        cell, layout.sizes, link.n_layers, link.dropout, hx, cx, link.ws, link.bs,
        _ByTime(layout).apply(xs)[0], is_bidirectional)
    return ([permutate(h, indices, axis=1, inv=True) for h in (hy, cy) if h is not None],
            list(_BySequence(layout).apply((y,))))


def _initial(link: NStepRNNBase, xs: Sequence[Variable]) -> Variable:
    """Return an initial state; zeros need no gradient, since the program cannot reach them."""
    state = link.init_hx(xs)
    if type(link).init_hx is NStepRNNBase.init_hx and 'init_hx' not in vars(link):
        return Variable(state.array, requires_grad=False)
    return state


class SequenceLayout:
    """Where the elements of sequences are, one sequence after another and by time step.

    Args:
        lengths: The lengths of the sequences.
        order: The sequences by length, the longest first.
    """

    def __init__(self, lengths: Sequence[int], order: np.ndarray) -> None:
        ends = np.cumsum(lengths)
        sorted_lengths = np.array(lengths)[order]
        steps = np.arange(sorted_lengths[0])[:, None]
        exists = steps < sorted_lengths
        #: Number of sequences that have an element at each time step.
        self.sizes: list[int] = exists.sum(axis=1).tolist()
        #: Which element of the sequences comes next by time step, and the inverse.
        self.by_time: np.ndarray = ((ends - lengths)[order] + steps)[exists]
        self.by_sequence = np.argsort(self.by_time)
        self.bounds: list[int] = [0, *ends.tolist()]


class _ByTime(FunctionNode):
    """Puts the elements of sequences into one array, by time step."""

    def __init__(self, layout: SequenceLayout) -> None:
        self.layout = layout

    def forward(self, inputs: tuple[np.ndarray, ...]) -> tuple[np.ndarray]:
        xp = chainer.backend.get_array_module(*inputs)
        return xp.concatenate(inputs).take(xp.asarray(self.layout.by_time), axis=0),

    def backward(self, indexes: tuple[int, ...], grad_outputs: tuple[Variable]
                 ) -> tuple[Variable, ...]:
        gradients = _BySequence(self.layout).apply(grad_outputs)
        return tuple(gradients[i] for i in indexes)


class _BySequence(FunctionNode):
    """Separates the elements of sequences, which are sorted by time step."""

    def __init__(self, layout: SequenceLayout) -> None:
        self.layout = layout

    def forward(self, inputs: tuple[np.ndarray]) -> tuple[np.ndarray, ...]:
        xp = chainer.backend.get_array_module(*inputs)
        x = inputs[0].take(xp.asarray(self.layout.by_sequence), axis=0)
        bounds = self.layout.bounds
        return tuple(x[start:end] for start, end in itertools.pairwise(bounds))

    def backward(self, indexes: tuple[int, ...], grad_outputs: tuple[Variable | None, ...]
                 ) -> tuple[Variable, ...]:
        known = next(gradient for gradient in grad_outputs if gradient is not None)
        gradients = [
            known.xp.zeros((end - start, known.shape[1]), known.dtype) if gradient is None
            else gradient for gradient, (start, end) in zip(
                grad_outputs, itertools.pairwise(self.layout.bounds), strict=True)]
        return _ByTime(self.layout).apply(gradients)
