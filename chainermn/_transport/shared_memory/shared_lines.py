"""Exchanges small messages between all ranks of a node through shared memory.

Each rank writes its message to its own slot and waits until all other ranks have written theirs.
Each rank has two slots, for even and odd exchanges: when a rank has finished an exchange, all other
ranks have started it, so they have read all messages of the previous exchange.
"""
from __future__ import annotations

import struct

from chainermn._consistency.signature_exchange import MISMATCH, Data
from chainermn._operations.call_signature import IDENTIFIER_SIZE
from chainermn._process import runtime
from chainermn._process.mpi import MPI
from chainermn._transport.shared_memory.window import Window, check_space, failures

_HEAD = struct.Struct(f'={IDENTIFIER_SIZE}sI')  # of a message: the identifier and the length
_START = _HEAD.size  # offset of the data in a slot
_LINE = 64  # bytes of a cache line
_MEMORIES = 64  # at most; each one uses one of MPI's communicators, of which there are about 2,000


class _Memories(runtime.ProcessState):
    """The number of shared memory windows of this process."""

    def __init__(self) -> None:
        self.count = 0


class SharedLines:
    """Exchanges small messages between the ranks of a node.

    Collective: every rank creates it and frees it.

    Args:
        mpi_comm: Communicator of the ranks of the node.
        capacity: Maximum size of a message in bytes.

    Raises:
        MPI.Exception: If no shared memory is available. MPI libraries raise it on all ranks.
    """

    def __init__(self, mpi_comm: MPI.Intracomm, capacity: int) -> None:
        size = _slot_size(capacity)
        self._window = Window(mpi_comm, 2 * size, f'rank {mpi_comm.rank}', detects_ends=False)
        # Write to all pages now. The first write to a page kills the process if /dev/shm is full,
        # and it may be full later.
        self._window.segments[mpi_comm.rank][:] = 0
        runtime.get(_Memories).count += 1
        self._rank = mpi_comm.rank
        #: Its first element is the number of exchanges that this rank has started. It changes when
        #: the others can read the message.
        self.published = self._window.published
        self._complete = 0  # exchanges that all ranks have started
        #: By the parity of the exchange and by rank.
        self._slots = [[segment[start:start + size].data for segment in self._window.segments]
                       for start in (0, size)]

    def exchange(self, call: bytes, message: bytes, is_wanted: bool) -> list[Data] | None:
        """Return the messages of all ranks; ``None`` if their identifiers differ.

        Args:
            call: The identifier of this rank's call.
            message: The message of this rank.
            is_wanted: Whether the messages are needed. If not, the list that is returned is
                incomplete.
        """
        window = self._window
        step = self.published[0]
        if self._complete != step:  # a signal handler interrupted this rank's last exchange
            window.wait(step)
        step += 1
        slots = self._slots[step & 1]
        own = slots[self._rank]
        _HEAD.pack_into(own, 0, call, len(message))
        if message:
            own[_START:_START + len(message)] = message
        window.publish(step)
        window.wait(step)
        self._complete = step
        found: list[Data] = []
        for slot in slots:
            if slot is own:
                found.append(message)
                continue
            identifier, length = _HEAD.unpack_from(slot)
            if identifier != call:
                return None
            if is_wanted:
                found.append(bytearray(slot[_START:_START + length]))
        return found

    def settle(self) -> bool:
        """Complete the last exchange if it was interrupted; return whether all calls match."""
        step = self.published[0]
        self._window.wait(step)
        self._complete = step
        slots = self._slots[step & 1]
        own = slots[self._rank][:IDENTIFIER_SIZE]
        return own != MISMATCH and all(slot[:IDENTIFIER_SIZE] == own for slot in slots)

    def free(self) -> None:
        """Free the memory. Collective: every rank calls it, once."""
        del self.published
        self._slots.clear()
        self._window.free()
        runtime.get(_Memories).count -= 1


def create(mpi_comm: MPI.Intracomm, capacity: int) -> SharedLines | None:
    """Allocate shared memory for messages; return ``None`` on all ranks if that is impossible.

    Collective: every rank calls it.

    Args:
        mpi_comm: Communicator of the ranks of one node.
        capacity: Maximum size of a message in bytes.
    """
    made: list[SharedLines] = []

    def check() -> None:
        if runtime.get(_Memories).count >= _MEMORIES:
            raise RuntimeError(f'this process already has {_MEMORIES} shared memory windows')
        check_space(mpi_comm.size * (2 * _slot_size(capacity) + 2 * 4096))

    for attempt in check, lambda: made.append(SharedLines(mpi_comm, capacity)):
        if failures(mpi_comm, attempt):
            for each in made:
                each.free()
            return None
    return made[0]


def _slot_size(capacity: int) -> int:
    return -(-(_HEAD.size + capacity) // _LINE) * _LINE
