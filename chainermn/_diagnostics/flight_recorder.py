"""The last operations of each communicator of this process, which a report of a hang shows.

Every call is kept, so keeping it has to cost next to nothing: what describes it is there already,
and goes into a ring.  What it says is worked out only when somebody asks.  Who called it costs
more, so that is kept only where somebody is looking for something: with a time limit or
``CHAINERMN_DEBUG`` in the environment.
"""
from __future__ import annotations

import collections
import itertools
import os
import sys
import weakref
from collections.abc import Callable, Iterable
from types import CodeType
from typing import Any, NamedTuple

from mpi4py import MPI

from chainermn import _environment, _signature
from chainermn._diagnostics import call_site
from chainermn._ranks import ranks_text

#: How many calls of a communicator are kept.
LENGTH = 64

# In the order in which they were made.
_everything: weakref.WeakValueDictionary[int, Calls] = weakref.WeakValueDictionary()
_numbers = itertools.count()
# How many communicators these ranks have made.
_made: collections.Counter[tuple[int, ...]] = collections.Counter()

#: How many calls of create_communicator these ranks have begun.
creations: collections.Counter[tuple[int, ...]] = collections.Counter()

#: Names the calls of a communicator on all of its ranks: their kind, the ranks, a number.
Key = tuple[str, tuple[int, ...], int]


class Calls:
    """The calls of one communicator, which are numbered from 1.

    Who begins one adds 1 to ``count`` and passes to ``keep`` the header as bytes; or of a message
    the operation, its peer, its tag, and a header or ``None``; or any text.

    Args:
        mpi_comm: The communicator.
    """

    __slots__ = ('__weakref__', 'count', 'keep', 'left', 'limit', 'number', 'ranks', 'ring')

    def __init__(self, mpi_comm: Any) -> None:
        #: As COMM_WORLD numbers them.
        self.ranks = world_ranks(mpi_comm)
        #: Which of the communicators of these ranks.
        self.number = 1
        #: Seconds that a call may take, 0 for any time; ``None`` is what the environment says.
        self.limit: float | None = None
        self.count = 0
        #: The count when this rank left an operation before that was complete.
        self.left = 0
        self.ring: collections.deque[Any] = collections.deque(maxlen=LENGTH)
        self.keep: Callable[[Any], None] = self.ring.append
        if _environment.text(_environment.TIMEOUT) or _environment.flag(_environment.DEBUG):
            self.keep = self._keep_with_site
        _everything[next(_numbers)] = self

    def _keep_with_site(self, what: Any) -> None:
        frame = sys._getframe(1)
        while frame.f_code.co_filename.startswith(call_site.LAYERS) and frame.f_back is not None:
            frame = frame.f_back
        self.ring.append(_Sited(what, frame.f_code, frame.f_lasti))

    @property
    def key(self) -> Key:
        return type(self).__name__, self.ranks, self.number

    @property
    def entered(self) -> int:
        """How many operations this rank has entered that need the others to enter them too."""
        return self.count

    @property
    def name(self) -> str:
        """Of the communicator."""
        number = f' {self.number}' if self.number > 1 else ''
        return f'communicator{number} of {ranks_text(self.ranks)}'

    @property
    def newest_kept(self) -> Any:
        """What was kept last, as it was passed to ``keep``; ``None`` if there is nothing."""
        what = self.ring[-1] if self.ring else None
        return what.what if isinstance(what, _Sited) else what

    @property
    def newest(self) -> Call | None:
        return next(iter(self.kept()[-1:]), None)

    def kept(self) -> list[Call]:
        """The calls that are kept, the newest last."""
        count, ring = self.count, list(self.ring)
        return [Call.of(what, count - len(ring) + n) for n, what in enumerate(ring, 1)]


class MessageCalls(Calls):
    """The messages of one communicator: ``sent`` and ``received`` count whole ones."""

    __slots__ = 'received', 'sent'

    def __init__(self, mpi_comm: Any) -> None:
        super().__init__(mpi_comm)
        #: By the other rank and the tag.
        self.sent: collections.defaultdict[tuple[int, int], int] = collections.defaultdict(int)
        self.received: collections.defaultdict[tuple[int, int], int] = collections.defaultdict(int)


class ServiceCalls(Calls):
    """The requests of a service, which ranks answer until all have closed it."""

    __slots__ = ()


class BackgroundCalls(Calls):
    """The waits for a queue of exchanges; what the ranks enter are the exchanges."""

    __slots__ = 'exchanges',

    def __init__(self, mpi_comm: Any) -> None:
        super().__init__(mpi_comm)
        self.exchanges = 0

    @property
    def entered(self) -> int:
        return self.exchanges


class _Sited(NamedTuple):
    what: Any
    code: CodeType
    instruction: int

    @property
    def text(self) -> str:
        """File and line; nothing if no program called it, as at its end."""
        if self.code.co_filename.startswith(call_site.LAYERS):
            return ''
        line = next((line for start, end, line in self.code.co_lines()
                     if start <= self.instruction < end), None)
        return f'{os.path.basename(self.code.co_filename)}:{line or self.code.co_firstlineno}'


class Call(NamedTuple):
    """A call that was kept."""

    number: int
    verb: str
    details: str
    peer: int | None  # the other rank of a message, negative for any
    site: str

    @classmethod
    def of(cls, what: Any, number: int) -> Call:
        site, peer = '', None
        if isinstance(what, _Sited):
            what, site = what.what, what.text
        if isinstance(what, tuple):
            verb, peer, tag, header = what
            details = 'to ' if 'send' in verb else 'from '
            details += 'any rank' if peer < 0 else f'rank {peer}'
            details += ' any tag' if tag < 0 else f' tag {tag}'
            if header is not None:
                details += f' {str(_signature.unpack(header)).partition(" ")[2]}'
        else:
            text = str(_signature.unpack(what)) if isinstance(what, bytes) else what
            verb, details = (text, '') if text == _signature.END else text.partition(' ')[::2]
        return cls(number, verb, details, peer, site)

    @property
    def text(self) -> str:
        return f'{self.verb} #{self.number} {self.details}'.rstrip()


def number(communicator: Iterable[Calls]) -> None:
    """Numbers the communicators of the same ranks, in the order in which they are made."""
    for n, calls in enumerate(communicator):
        _made[calls.ranks] += n == 0
        calls.number = _made[calls.ranks]


def everything() -> list[Calls]:
    """The calls of all communicators that are there, in the order in which those were made."""
    return list(_everything.values())


def summary(kept: Iterable[Call]) -> str:
    """Calls in short: one text for each run of calls that differ only in their number."""
    runs: list[tuple[Call, int]] = []
    for call in kept:
        first, last = runs[-1] if runs else (None, 0)
        if first is not None and call[1:] == first[1:] and call.number == last + 1:
            runs[-1] = first, call.number
        else:
            runs.append((call, call.number))
    return '; '.join(
        f'{first.verb} #{first.number}{f"-{last}" if last > first.number else ""} {first.details}'
        .rstrip() + (f', called at {first.site}' if first.site else '') for first, last in runs)


def world_ranks(mpi_comm: Any) -> tuple[int, ...]:
    """The ranks of a communicator, as COMM_WORLD numbers them."""
    group, world = mpi_comm.Get_group(), MPI.COMM_WORLD.Get_group()
    try:
        return tuple(MPI.Group.Translate_ranks(group, range(group.size), world))
    finally:
        group.Free()
        world.Free()
