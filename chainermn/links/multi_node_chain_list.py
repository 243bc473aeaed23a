"""A model whose parts run on several ranks and send their outputs to each other."""
from __future__ import annotations

import contextlib
import operator
import reprlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import chainer

from chainermn import functions
from chainermn._operations.arguments import is_integer
from chainermn._operations.common_error import add_note
from chainermn._types import Model, Object, Variable
from chainermn.communicators._recognize import as_communicator
from chainermn.communicators.communicator_base import CommunicatorBase

Ranks = int | Sequence[int] | None

#: A Variable, or a tuple or list of Variables.
Value = Variable | Sequence[Variable]


class MultiNodeChainList(chainer.ChainList):
    """A model whose parts run on several ranks and send their outputs to each other.

    Every rank creates a list of the parts that it computes. Together, the lists form one model.

    The parts of a rank run in the order in which they were added. Backward runs in exactly the
    reverse order, so it cannot deadlock if forward does not.

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

    #: Whether this list is the model of a Pipeline.
    _is_pipelined = False

    def __init__(self, comm: CommunicatorBase) -> None:
        super().__init__()
        self._comm = as_communicator(comm, 'MultiNodeChainList(comm)')
        self._ranks: list[tuple[list[int] | None, list[int] | None]] = []
        self._replacement: Callable[..., Value] | None = None

    def add_link(self, link: Model, rank_in: Ranks = None, rank_out: Ranks = None) -> None:
        """Add a part.

        Args:
            link: The link that computes the part. It gets one argument for each rank in ``rank_in``
                (a tuple if a tuple was sent), or the arguments of the model.
            rank_in: Rank or ranks that send the inputs of the part, in the order of the arguments.
                Pass the rank itself to use the output of an earlier part on this rank. ``None`` if
                the part gets the inputs of the model.
            rank_out: Rank or ranks that receive the output of the part. ``None`` if it is the
                output of the model. At most one part on each rank may have ``None``.

        Raises:
            ValueError: If another part has ``rank_out=None``, or a rank does not exist.
            TypeError: If ``link`` cannot be called, or a rank is not an integer.

        Example:
            >>> model = chainermn.MultiNodeChainList(comm)
            >>> if comm.rank == 0:
            ...     model.add_link(L.Linear(3, 4), rank_in=None, rank_out=1)
            ... else:
            ...     model.add_link(L.Linear(4, 2), rank_in=0, rank_out=None)
        """
        if not callable(link) or isinstance(link, type):
            raise TypeError('add_link: link must be a chainer.Link, not ' + repr(link)
                            if not isinstance(link, type) else
                            f'add_link: link must be an instance, not the class {link.__name__}. '
                            f'Pass an instance: {link.__name__}(...)')
        ranks_in, ranks_out = _as_list('rank_in', rank_in), _as_list('rank_out', rank_out)
        new = _described(link, len(self._ranks), ranks_in, ranks_out)
        for rank in (*(ranks_in or ()), *(ranks_out or ())):
            if not 0 <= rank < self._comm.size:
                raise ValueError(f'add_link: {new} refers to rank {rank}, but ranks are 0 to '
                                 f'{self._comm.size - 1}.')
        if rank_out is None and any(ranks_out is None for _, ranks_out in self._ranks):
            raise ValueError(f'add_link: {new} is the second link on this rank with '
                             'rank_out=None, but a model has only one output. Set rank_out of the '
                             'first link to the rank that uses its output.')
        self.append(link)
        self._ranks.append((ranks_in, ranks_out))

    def forward(self, *inputs: Value, **kwds: Object) -> Value:
        """Run the parts of this rank.

        Args:
            inputs: The inputs of the model.
            kwds: The keyword inputs of the model, such as the items of a batch that is a dict.

        Returns:
            The output of the part with ``rank_out=None``, or an empty Variable if there is no such
            part. Call ``backward()`` on it in both cases. ``None`` on a rank without parts.

        Raises:
            ValueError: On all ranks, if a part sends to its own rank, but no later part receives
                the output; or if a part receives from its own rank, but no earlier part sent an
                output. The message shows the part. If parts of several ranks wait for each other,
                the job is aborted instead, with a report that shows them.

        Example:
            >>> model = chainermn.MultiNodeChainList(comm)
            >>> if comm.rank == 0:
            ...     model.add_link(L.Linear(3, 4), rank_out=1)
            ...     model(np.ones((5, 3), np.float32)).backward()
            ... else:
            ...     model.add_link(L.Linear(4, 2), rank_in=0)
            ...     F.sum(model()).backward()
        """
        if self._replacement is not None:
            return self._replacement(*inputs, **kwds)
        graph = _Graph(self._comm)
        output = None
        for n, (part, (ranks_in, ranks_out)) in enumerate(zip(self, self._ranks, strict=True)):
            graph.part = _described(part, n, ranks_in, ranks_out)
            args, named = (inputs, kwds) if ranks_in is None else (
                tuple(map(graph.recv, ranks_in)), {})
            y = self._call(n, args, named)
            if ranks_out is None:
                output = y
            else:
                for rank in ranks_out:
                    graph.send(y, rank)
        return graph.close(output)

    def _call(self, n: int, args: Sequence[Value], kwds: dict[str, Object]) -> Value:
        """Call a part. Add a note to its errors, which may mention only a Chainer function."""
        try:
            return self[n](*args, **kwds)
        except Exception as error:
            part, _, _ = self._described_parts()[n]
            inputs = ', '.join(
                f'{x.dtype} {x.shape}' if hasattr(x, 'shape') and hasattr(x, 'dtype') else
                type(x).__name__ for each in args for x in as_tuple(each))
            add_note(error, f'in {part} on rank {self._comm.rank}, with inputs {inputs}')
            if self._is_pipelined:
                add_note(error, 'The model was called directly, not through its Pipeline. To '
                                'train, pass the Pipeline: optimizer.update(pipeline, *batch).')
            raise

    def _described_parts(self) -> list[tuple[str, list[int] | None, list[int] | None]]:
        """Return a description of each part and its ranks."""
        return [(_described(part, n, *ranks), *ranks)
                for n, (part, ranks) in enumerate(zip(self, self._ranks, strict=True))]

    @contextlib.contextmanager
    def _replaced(self, function: Callable[..., Value]) -> Iterator[None]:
        """Make calls of this list call ``function``, which may run the parts elsewhere."""
        self._replacement = function
        try:
            yield
        finally:
            self._replacement = None


class _Graph:
    """Connects each send and receive of a rank to the previous one, for backward."""

    def __init__(self, comm: CommunicatorBase) -> None:
        self._comm = comm
        self._last: chainer.Variable | None = None
        self._to_itself: deque[tuple[Value, str]] = deque()  # each with the part that sent it
        self.part = ''  # the current part, for error messages

    def recv(self, rank: int) -> Value:
        if rank == self._comm.rank:
            if not self._to_itself:
                self._comm.refuse('MultiNodeChainList', ValueError(
                    f'{self.part} on rank {rank} receives from its own rank, but no earlier link '
                    'sends to this rank. Add the sending link before this one.'))
            return self._to_itself.popleft()[0]
        with self._comm.called_by(f'{self.part}, from a link with '
                                  f'rank_out={self._comm.rank} on rank {rank}'):
            received = functions.recv(self._comm, rank, self._last)
        self._last = received[0] if isinstance(received, tuple) else received
        return received

    def send(self, y: Value, rank: int) -> None:
        if rank == self._comm.rank:
            # As with functions.send, a tuple with one element arrives as the element.
            ys = as_tuple(y)
            self._to_itself.append((ys[0] if len(ys) == 1 else y, self.part))
            return
        with self._comm.called_by(f'{self.part}, to a link with '
                                  f'rank_in={self._comm.rank} on rank {rank}'):
            self._last = functions.send(self._connected(y), self._comm, rank)

    def close(self, output: Value | None) -> Value:
        """Return the output, connected to all sends and receives."""
        if self._to_itself:
            _, part = self._to_itself[0]
            self._comm.refuse('MultiNodeChainList', ValueError(
                f'{part} on rank {self._comm.rank} sends to its own rank, but no later link '
                f'receives it. Add a later link with rank_in={self._comm.rank}.'))
        return self._last if output is None else self._connected(output)

    def _connected(self, y: Value) -> Value:
        if self._last is None:
            return y
        ys = functions.pseudo_connect(self._last, *as_tuple(y))
        return ys if isinstance(y, (tuple, list)) else ys[0]


def _as_list(name: str, ranks: Ranks) -> list[int] | None:
    if ranks is None:
        return None
    found: list[Object] = [ranks]
    if isinstance(ranks, Iterable) and not is_integer(ranks):
        found = [*ranks]
    if not all(map(is_integer, found)) or (name == 'rank_in' and not found):
        raise TypeError(f'add_link: {name} must be a rank, a list of ranks or None, not {ranks!r}')
    return [*map(operator.index, found)]


def _described(part: Model, number: int, ranks_in: list[int] | None, ranks_out: list[int] | None
               ) -> str:
    """Describe a part for errors, such as ``link 0 (Linear, rank_in=None, rank_out=1) of ...``."""
    rank_in, rank_out = (
        ranks[0] if ranks is not None and len(ranks) == 1 else reprlib.repr(ranks)
        for ranks in (ranks_in, ranks_out))
    return (f'link {number} ({type(part).__name__}, rank_in={rank_in}, rank_out={rank_out}) of '
            'MultiNodeChainList')


def as_tuple(y: Value) -> tuple[Variable, ...]:
    """Return one or several Variables as a tuple."""
    return tuple(y) if isinstance(y, (tuple, list)) else (y,)
