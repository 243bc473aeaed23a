"""Small messages of all ranks of a node to all others, through shared memory.

Each rank writes its message to its own place, and waits until all others have written theirs.
There are two places of each rank, for even and odd exchanges: a rank that has finished an exchange
knows that all others have begun it, so they have read all messages of the previous one.
"""
from __future__ import annotations

import struct

from chainermn._consistency.signature_exchange import MISMATCH, Data
from chainermn._operations.call_signature import IDENTIFIER_SIZE
from chainermn._process import runtime
from chainermn._process.mpi import MPI
from chainermn._transport.shared_memory.window import Window, check_space, failures

_HEAD = struct.Struct(f'={IDENTIFIER_SIZE}sI')  # of a message: the identifier and the length
_START = _HEAD.size  # where the data begins
_LINE = 64  # bytes of a cache line
_MEMORIES = 64  # at most; each takes one of the 2,000 communicators of MPI


class _Memories(runtime.ProcessState):
    """The number of memories that this process has."""

    def __init__(self) -> None:
        self.count = 0


class SharedLines:
    """The messages of the ranks of a node. Collective: every rank creates one, and frees it.

    Args:
        mpi_comm: The ranks of the node.
        capacity: The largest size of a message in bytes.

    Raises:
        MPI.Exception: If no shared memory is available. MPI libraries raise it on all ranks.
    """

    def __init__(self, mpi_comm: MPI.Intracomm, capacity: int) -> None:
        size = _place_size(capacity)
        self._window = Window(mpi_comm, 2 * size, f'rank {mpi_comm.rank}', detects_ends=False)
        # Written to now: later, /dev/shm may be full, which would kill the process.
        self._window.segments[mpi_comm.rank][:] = 0
        runtime.get(_Memories).count += 1
        self._rank = mpi_comm.rank
        #: The number of exchanges of this rank; it changes when the others can read the message.
        self.published = self._window.published
        self._complete = 0  # exchanges that all ranks have begun
        #: By the parity of the exchange, and by rank.
        self._places = [[segment[start:start + size].data for segment in self._window.segments]
                        for start in (0, size)]

    def exchange(self, call: bytes, message: bytes, is_wanted: bool) -> list[Data] | None:
        """Return the messages of all ranks; ``None`` if their identifiers differ.

        Args:
            call: The identifier of this rank's call.
            message: Its message.
            is_wanted: Whether to return the messages; otherwise the list has no meaning.
        """
        window = self._window
        step = self.published[0]
        if self._complete != step:  # a signal handler has interrupted this rank
            window.wait(step)
        step += 1
        places = self._places[step & 1]
        own = places[self._rank]
        _HEAD.pack_into(own, 0, call, len(message))
        if message:
            own[_START:_START + len(message)] = message
        window.publish(step)
        window.wait(step)
        self._complete = step
        found: list[Data] = []
        for place in places:
            if place is own:
                found.append(message)
                continue
            identifier, length = _HEAD.unpack_from(place)
            if identifier != call:
                return None
            if is_wanted:
                found.append(bytearray(place[_START:_START + length]))
        return found

    def settle(self) -> bool:
        """Complete the last exchange, if it was interrupted; return whether all calls match."""
        step = self.published[0]
        self._window.wait(step)
        self._complete = step
        places = self._places[step & 1]
        own = places[self._rank][:IDENTIFIER_SIZE]
        return own != MISMATCH and all(place[:IDENTIFIER_SIZE] == own for place in places)

    def free(self) -> None:
        """Free the memory. Collective: every rank calls it, once."""
        del self.published
        self._places.clear()
        self._window.free()
        runtime.get(_Memories).count -= 1


def create(mpi_comm: MPI.Intracomm, capacity: int) -> SharedLines | None:
    """Allocate the memory, or return ``None`` on all ranks. Collective: every rank calls it.

    Args:
        mpi_comm: Ranks of one node.
        capacity: The largest size of a message in bytes.
    """
    made: list[SharedLines] = []

    def check() -> None:
        if runtime.get(_Memories).count >= _MEMORIES:
            raise RuntimeError(f'the limit of {_MEMORIES} shared memories is reached')
        check_space(mpi_comm.size * (2 * _place_size(capacity) + 2 * 4096))

    for attempt in check, lambda: made.append(SharedLines(mpi_comm, capacity)):
        if failures(mpi_comm, attempt):
            for each in made:
                each.free()
            return None
    return made[0]


def _place_size(capacity: int) -> int:
    return -(-(_HEAD.size + capacity) // _LINE) * _LINE
