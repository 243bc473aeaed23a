"""A stacked RNN over several ranks: the final states of one are the initial states of the next."""
from __future__ import annotations

from typing import Any

import chainer
from chainer.links.rnn import n_step_rnn

from chainermn import functions


def create_multi_node_n_step_rnn(actual_link: Any, communicator: Any, rank_in: int | None = None,
                                 rank_out: int | None = None) -> _MultiNodeNStepRNN:
    """Makes an n-step RNN take its initial states from one rank and give its final ones to another.

    Each rank makes its own; nothing is exchanged before it runs.

    Args:
        actual_link: ``chainer.links.NStepLSTM``, ``NStepGRU``, ``NStepRNNTanh`` or another of them.
        communicator: ChainerMN communicator.
        rank_in: Rank that sends the initial states; ``None`` if they are zeros.
        rank_out: Rank that receives the final states; ``None`` if nobody does.

    Returns:
        A link.  It is called without states, with the sequences only, and returns what
        ``actual_link`` returns and after it the delegate variable (``None`` without
        ``rank_out``), for :func:`chainermn.functions.pseudo_connect`.

    Raises:
        ValueError: If ``actual_link`` is no n-step RNN.
    """
    if not isinstance(actual_link, n_step_rnn.NStepRNNBase):
        raise ValueError('expected an n-step RNN such as chainer.links.NStepLSTM, not '
                         f'{type(actual_link)}')
    return _MultiNodeNStepRNN(actual_link, communicator, rank_in, rank_out)


class _MultiNodeNStepRNN(chainer.Chain):
    def __init__(self, link: Any, communicator: Any, rank_in: int | None, rank_out: int | None
                 ) -> None:
        super().__init__()
        with self.init_scope():
            self.actual_rnn = link
        self.communicator = communicator
        self.rank_in = rank_in
        self.rank_out = rank_out
        self.n_cells = link.n_cells

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        states: tuple[Any, ...] = (None,) * self.n_cells
        if self.rank_in is not None:
            states = functions.recv(
                self.communicator, self.rank_in, force_tuple=True)
        outputs = self.actual_rnn(*states, *inputs)
        if self.rank_out is None:
            return (*outputs, None)
        delegate = functions.send(
            outputs[:self.n_cells], self.communicator, self.rank_out)
        return (*outputs, delegate)
