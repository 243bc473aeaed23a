"""A model whose parts live on several ranks and pass their outputs on."""
from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import chainer

from chainermn import functions

Ranks = int | Sequence[int] | None


class MultiNodeChainList(chainer.ChainList):
    """A chain list of parts, each with the ranks its inputs come from and its outputs go to.

    Every rank makes its own list of the parts it computes; together they are one model.  An MLP
    whose first half is on rank 0 and second half on rank 1:

    >>> class First(chainermn.MultiNodeChainList):              # on rank 0
    ...     def __init__(self, comm):
    ...         super().__init__(comm)
    ...         self.add_link(Half(), rank_in=None, rank_out=1)
    >>> class Second(chainermn.MultiNodeChainList):             # on rank 1
    ...     def __init__(self, comm):
    ...         super().__init__(comm)
    ...         self.add_link(Half(), rank_in=0, rank_out=None)

    The parts of a rank run in the order in which they were added.  Backward takes exactly the
    opposite way, so it cannot come to wait in a circle where forward did not.

    Args:
        comm: ChainerMN communicator.
    """

    def __init__(self, comm: Any) -> None:
        super().__init__()
        self._comm = comm
        self._ranks: list[tuple[list[int] | None, list[int] | None]] = []

    def add_link(self, link: Any, rank_in: Ranks = None, rank_out: Ranks = None) -> None:
        """Adds a part.

        Args:
            link: The link that computes it.  It gets one argument for each rank in ``rank_in`` (a
                tuple where a tuple was sent), or what the model is called with.
            rank_in: Rank or ranks that send its inputs, in their order; this rank for what an
                earlier part on it gave to it.  ``None`` if its inputs are the model's.
            rank_out: Rank or ranks that receive its output.  ``None`` if its output is the
                model's, which one part of a rank may have at most.

        Raises:
            ValueError: If another part has the output of the model already.
        """
        if rank_out is None and any(ranks_out is None for _, ranks_out in self._ranks):
            raise ValueError('two parts on this rank have rank_out=None, but the model has one '
                             'output; send that of the first to the rank that uses it')
        self.append(link)
        self._ranks.append((_as_list(rank_in), _as_list(rank_out)))

    def forward(self, *inputs: Any) -> Any:
        """Runs the parts of this rank.

        Returns:
            The output of the part with ``rank_out=None``; if there is none, an empty Variable.
            Call ``backward()`` on it either way.
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
    """Chains the communication of a rank, each to the one before, so that backward undoes it."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self._last: chainer.Variable | None = None
        self._to_itself: deque[Any] = deque()

    def recv(self, rank: int) -> Any:
        if rank == self._comm.rank:
            if not self._to_itself:
                raise ValueError(f'a part on rank {rank} takes an input from its own rank, but no '
                                 'part before it sent one')
            return self._to_itself.popleft()
        received = functions.recv(self._comm, rank, self._last)
        self._last = received[0] if isinstance(received, tuple) else received
        return received

    def send(self, y: Any, rank: int) -> None:
        if rank == self._comm.rank:
            self._to_itself.append(y)
        else:
            self._last = functions.send(self._connected(y), self._comm, rank)

    def close(self, output: Any) -> Any:
        """Returns the output, tied to all communication."""
        if self._to_itself:
            raise ValueError(f'a part on rank {self._comm.rank} sent an output to its own rank, '
                             'but no part after it takes it')
        return self._last if output is None else self._connected(output)

    def _connected(self, y: Any) -> Any:
        if self._last is None:
            return y
        ys = functions.pseudo_connect(self._last, *_as_tuple(y))
        return ys if isinstance(y, (tuple, list)) else ys[0]


def _as_list(ranks: Ranks) -> list[int] | None:
    if ranks is None:
        return None
    return [ranks] if isinstance(ranks, int) else list(ranks)


def _as_tuple(y: Any) -> tuple[Any, ...]:
    return tuple(y) if isinstance(y, (tuple, list)) else (y,)
