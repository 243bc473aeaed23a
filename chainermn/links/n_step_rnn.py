"""An RNN over several ranks: the final states of one rank are the initial states of the next."""
from __future__ import annotations

import chainer
from chainer.links.rnn import n_step_rnn

from chainermn import functions
from chainermn._operations.arguments import is_integer
from chainermn._types import Model, Variable
from chainermn.communicators._recognize import as_communicator
from chainermn.communicators.communicator_base import CommunicatorBase


def create_multi_node_n_step_rnn(
    actual_link: Model, communicator: CommunicatorBase, rank_in: int | None = None,
    rank_out: int | None = None,
) -> _MultiNodeNStepRNN:
    """Create an n-step RNN that receives its initial states and sends its final states.

    Each rank creates its own link. Nothing is sent until the link is called.

    Args:
        actual_link: ``chainer.links.NStepLSTM``, ``NStepGRU``, ``NStepRNNTanh`` or a similar link.
        communicator: ChainerMN communicator.
        rank_in: Rank that sends the initial states; ``None`` for zeros.
        rank_out: Rank that receives the final states; ``None`` if they are not sent.

    Returns:
        A link. Call it with the sequences only, without states. It returns the outputs of
        ``actual_link`` and a delegate variable for :func:`chainermn.functions.pseudo_connect`
        (``None`` without ``rank_out``).

    Raises:
        ValueError: If ``actual_link`` is not an n-step RNN, or if a rank is this rank or does not
            exist.
        TypeError: If a rank is not an integer.

    Example:
        >>> lstm = L.NStepLSTM(n_layers=1, in_size=3, out_size=4, dropout=0)
        >>> rnn = chainermn.links.create_multi_node_n_step_rnn(
        ...     lstm, comm, rank_in=None if comm.rank == 0 else 0,
        ...     rank_out=1 if comm.rank == 0 else None)
        >>> *states, ys, delegate = rnn([np.ones((5, 3), np.float32)])
        >>> ys[0].shape
        (5, 4)
    """
    if not isinstance(actual_link, n_step_rnn.NStepRNNBase):
        raise ValueError('create_multi_node_n_step_rnn: actual_link must be an n-step RNN such as '
                         f'chainer.links.NStepLSTM, not {type(actual_link).__name__}')
    communicator = as_communicator(
        communicator, 'create_multi_node_n_step_rnn(actual_link, communicator)')
    for name, rank in (('rank_in', rank_in), ('rank_out', rank_out)):
        if rank is None:
            continue
        if not is_integer(rank):
            raise TypeError(f'create_multi_node_n_step_rnn: {name} must be a rank or None, not '
                            f'{rank!r}')
        if not 0 <= rank < communicator.size or rank == communicator.rank:
            raise ValueError(
                f'create_multi_node_n_step_rnn: {name} must be another rank, from 0 to '
                f'{communicator.size - 1}, or None, but is {rank} on rank {communicator.rank}')
    return _MultiNodeNStepRNN(actual_link, communicator, rank_in, rank_out)


class _MultiNodeNStepRNN(chainer.Chain):
    def __init__(self, link: Model, communicator: CommunicatorBase, rank_in: int | None,
                 rank_out: int | None) -> None:
        super().__init__()
        with self.init_scope():
            self.actual_rnn = link
        self.communicator = communicator
        self.rank_in = rank_in
        self.rank_out = rank_out
        self.n_cells: int = link.n_cells

    def __call__(self, *inputs: list[Variable]) -> tuple[Variable | list[Variable] | None, ...]:
        states: tuple[Variable | None, ...] = (None,) * self.n_cells
        if self.rank_in is not None:
            states = functions.recv(
                self.communicator, self.rank_in, force_tuple=True)
        outputs = self.actual_rnn(*states, *inputs)
        if self.rank_out is None:
            return (*outputs, None)
        delegate = functions.send(
            outputs[:self.n_cells], self.communicator, self.rank_out)
        return (*outputs, delegate)
