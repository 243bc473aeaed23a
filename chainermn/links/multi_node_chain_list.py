"""A model whose parts are on several ranks and send their outputs to each other."""
from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import chainer

from chainermn import functions
from chainermn._types import Model, Variable
from chainermn.communicators.communicator_base import CommunicatorBase

Ranks = int | Sequence[int] | None

#: A Variable, or a tuple or list of Variables.
Value = Variable | Sequence[Variable]


class MultiNodeChainList(chainer.ChainList):
    """A model whose parts are on several ranks, which send each other their outputs.

    Every rank creates a list of the parts that it computes; together they are one model.

    The parts of a rank run in the order in which they were added.  Backward runs exactly in the
    opposite order, so it cannot deadlock if forward does not.

    Args:
        comm: ChainerMN communicator.

    Example:
        The first half of a model on rank 0, the second half on rank 1:

        >>> class FirstHalf(chainermn.MultiNodeChainList):
        ...     def __init__(self, comm):
        ...         super().__init__(comm)
        ...         self.add_link(L.Linear(3, 4), rank_in=None, rank_out=1)
        >>> class SecondHalf(chainermn.MultiNodeChainList):
        ...     def __init__(self, comm):
        ...         super().__init__(comm)
        ...         self.add_link(L.Linear(4, 2), rank_in=0, rank_out=None)
        >>> model = FirstHalf(comm) if comm.rank == 0 else SecondHalf(comm)
    """

    def __init__(self, comm: CommunicatorBase) -> None:
        super().__init__()
        self._comm = comm
        self._ranks: list[tuple[list[int] | None, list[int] | None]] = []

    def add_link(self, link: Model, rank_in: Ranks = None, rank_out: Ranks = None) -> None:
        """Add a part.

        Args:
            link: The link that computes it.  It gets one argument for each rank in ``rank_in`` (a
                tuple if a tuple was sent), or the arguments of the model.
            rank_in: Rank or ranks that send its inputs, in the order of the arguments; this rank
                for the output of an earlier part on it.  ``None`` for the inputs of the model.
            rank_out: Rank or ranks that receive its output.  ``None`` for the output of the model;
                at most one part on each rank.

        Raises:
            ValueError: If another part has ``rank_out=None``.

        Example:
            >>> model = chainermn.MultiNodeChainList(comm)
            >>> if comm.rank == 0:
            ...     model.add_link(L.Linear(3, 4), rank_in=None, rank_out=1)
            ... else:
            ...     model.add_link(L.Linear(4, 2), rank_in=0, rank_out=None)
        """
        if rank_out is None and any(ranks_out is None for _, ranks_out in self._ranks):
            raise ValueError('add_link: two parts on this rank have rank_out=None, but the model '
                             'has one output. Send the output of the first part to the rank that '
                             'uses it.')
        self.append(link)
        self._ranks.append((_as_list(rank_in), _as_list(rank_out)))

    def forward(self, *inputs: Value) -> Value:
        """Run the parts of this rank.

        Args:
            inputs: The inputs of the model.

        Returns:
            The output of the part with ``rank_out=None``; if there is none, an empty Variable.
            Call ``backward()`` on it in both cases.

        Raises:
            ValueError: If a part sends to its own rank and no later part uses it, or a part
                receives from its own rank and no earlier part has sent.

        Example:
            >>> model = chainermn.MultiNodeChainList(comm)
            >>> if comm.rank == 0:
            ...     model.add_link(L.Linear(3, 4), rank_out=1)
            ...     model(np.ones((5, 3), np.float32)).backward()
            ... else:
            ...     model.add_link(L.Linear(4, 2), rank_in=0)
            ...     F.sum(model()).backward()
        """
        graph = _Graph(self._comm)
        output = None
        for part, (ranks_in, ranks_out) in zip(self, self._ranks, strict=True):
            y = part(*inputs) if ranks_in is None else part(*map(graph.recv, ranks_in))
            if ranks_out is None:
                output = y
            else:
                for rank in ranks_out:
                    graph.send(y, rank)
        return graph.close(output)


class _Graph:
    """Connects each communication of a rank to the previous one, for backward."""

    def __init__(self, comm: CommunicatorBase) -> None:
        self._comm = comm
        self._last: chainer.Variable | None = None
        self._to_itself: deque[Value] = deque()

    def recv(self, rank: int) -> Value:
        if rank == self._comm.rank:
            if not self._to_itself:
                raise ValueError(f'a part on rank {rank} receives from its own rank, but no '
                                 'earlier part has sent to it. Add the part that sends first.')
            return self._to_itself.popleft()
        received = functions.recv(self._comm, rank, self._last)
        self._last = received[0] if isinstance(received, tuple) else received
        return received

    def send(self, y: Value, rank: int) -> None:
        if rank == self._comm.rank:
            self._to_itself.append(y)
        else:
            self._last = functions.send(self._connected(y), self._comm, rank)

    def close(self, output: Value | None) -> Value:
        """Return the output, connected to all communication."""
        if self._to_itself:
            raise ValueError(f'a part on rank {self._comm.rank} sends to its own rank, but no '
                             'later part receives it. Add a part with this rank in rank_in.')
        return self._last if output is None else self._connected(output)

    def _connected(self, y: Value) -> Value:
        if self._last is None:
            return y
        ys = functions.pseudo_connect(self._last, *_as_tuple(y))
        return ys if isinstance(y, (tuple, list)) else ys[0]


def _as_list(ranks: Ranks) -> list[int] | None:
    if ranks is None:
        return None
    return [ranks] if isinstance(ranks, int) else list(ranks)


def _as_tuple(y: Value) -> tuple[Variable, ...]:
    return tuple(y) if isinstance(y, (tuple, list)) else (y,)
