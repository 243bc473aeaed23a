"""States of many simulated ranks, in the form in which watchdogs send them to other ranks."""

import functools

from chainermn._diagnostics.deadlocks.rank_state import (
    Progress,
    RankState,
    ThreadState,
    Wait,
    WaitKind,
)
from chainermn._diagnostics.hang_report import Response, compressed
from chainermn._diagnostics.world_ranks import WorldRanks

STACK = '\n'.join([
    'Thread MainThread:',
    *(f'  File "train.py", line {n}, in f{n}\n    f{n + 1}()' for n in range(20)),
    '  File "train.py", line {}, in {}\n    wait()',
    'Thread loader:', '  File "loader.py", line 8, in load\n    read()'])


class SimulatedRank:
    """A rank of a job with a number of ranks.

    Args:
        size: The number of ranks.
        rank: The rank.
        operation: The name of the operation that the rank is in; '' outside of operations.
        details: The arguments of the call.
        number: The number of collectives that the rank has entered.
        wait: The event that the rank waits for, without the communicator.
        sent, received: The numbers of messages, by peer and tag.
        site: Line and function of the call.
    """

    def __init__(self, size, rank, operation, details='', number=7, wait=None, sent=None,
                 received=None, site=(8, 'main')):
        self.rank = rank
        ranks = _ranks(size)
        collectives, messages = ('FlightRecord', ranks, 1), ('MessageRecord', ranks, 1)
        call = f"{operation or 'barrier'} #{number} {details}".rstrip()
        line, function = site
        self.progress = Progress({collectives: number, messages: 0}, {ranks: 1},
                                 {messages: sent or {}}, {messages: received or {}}, {messages: {}})
        key = collectives if wait is None or wait[0] is WaitKind.COLLECTIVE else messages
        waits = () if wait is None else (Wait(wait[0], key, *wait[1:]),)
        self.thread = ThreadState(
            operation, call, '', f'train.py:{line} in {function}()', '', waits)
        self.state = RankState(self.progress, (self.thread,), False, False)
        self.response = Response(
            '', [(self.thread, 60 + rank / size)], _operations(size, number, call),
            _stack(line, function), self.progress)


@functools.cache
def _ranks(size):
    return WorldRanks.of(range(size))


@functools.cache
def _operations(size, number, newest):
    calls = '; '.join(f'{each} #{n} float32 (1000,), called at train.py:{n % 9}'
                      for n in range(1, number) for each in ('allreduce', 'bcast'))
    name = f'communicator of ranks 0-{size - 1}'
    return compressed(f'{name}: {calls}\n{name}: {newest}')


@functools.cache
def _stack(line, function):
    return compressed(STACK.format(line, function))


def in_collective(size, rank, number=7):
    """Return a rank that is in a collective."""
    return SimulatedRank(size, rank, 'allreduce', "float32 (1000,) op='sum'", number,
                         (WaitKind.COLLECTIVE, number))


def in_receive(size, rank, peer, **counts):
    """Return a rank that waits for a message."""
    return SimulatedRank(size, rank, 'recv', f'from rank {peer} tag 5', 1,
                         (WaitKind.RECEIVE, 0, peer, 5), **counts)


def computing(size, rank, number=6):
    """Return a rank that is outside of operations."""
    return SimulatedRank(size, rank, '', number=number, site=(30, 'load'))


def one_missing(size):
    """All ranks except one are in a collective."""
    return [computing(size, rank) if rank == size // 3 else in_collective(size, rank)
            for rank in range(size)]


def ring(size):
    """Each rank receives from the next one."""
    return [in_receive(size, rank, (rank + 1) % size) for rank in range(size)]


def chain(size):
    """Each rank receives from the next one; the last rank computes."""
    return [*ring(size)[:-1], computing(size, size - 1)]


def two_groups(size):
    """The first half receives from the second half, which waits in a collective."""
    return [in_receive(size, rank, rank + size // 2) if rank < size // 2 else
            in_collective(size, rank) for rank in range(size)]


def different(size):
    """Each rank is at a different line of the script."""
    return [SimulatedRank(size, rank, '', number=rank % 50, site=(rank, f'f{rank}'))
            for rank in range(size)]
