"""Compares the calls of all ranks and exchanges small data with the same messages.

In step k, each rank sends all data it has to the rank 2**k below and receives from the rank 2**k
above, so that after log2(size) steps it has the data of all ranks (Bruck et al. 1997). Every
exchange sends the same messages between the same ranks; only their contents differ. Hence ranks
that call different operations do not block each other, and all of them notice.

If all ranks are on one node, they switch to shared memory after some exchanges, because the
allocation does not pay off in scripts that make few calls. All ranks switch before the same
exchange, regardless of their calls.
"""
from __future__ import annotations

import os
import struct
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from chainermn._consistency import tags
from chainermn._operations.call_signature import IDENTIFIER_SIZE
from chainermn._process.mpi import MPI
from chainermn._timeline import activities, recorder

#: A rank that knows of a mismatch sends this instead of the identifier of its call.
MISMATCH = bytes(IDENTIFIER_SIZE)

_LENGTH = struct.Struct('=I')
_HEADER_SIZE = IDENTIFIER_SIZE + _LENGTH.size
_MAX_BYTES = 1 << 12  # of data per rank
_MAX_TOTAL = 1 << 15  # bytes of data of all ranks together

#: The number of exchanges by messages before shared memory is allocated.
_MESSAGES = 64

#: Polls before the first one that yields the core: about 10 microseconds if each rank has its own
#: core. After yielding a core to another process, a rank may wait long to get it back.
SPINS, SPINS_IF_OVERSUBSCRIBED = 50, 1
_POLLS = 100  # about 100 microseconds on a free core; other threads can hardly run in that time

#: Received data.
Data: TypeAlias = 'bytes | bytearray'


#: A number that can be changed in place: the first element.
Counter: TypeAlias = 'list[int] | memoryview[int]'


class MessageMemory(Protocol):
    """Shared memory in which the ranks exchange messages."""

    @property
    def published(self) -> Counter:
        """The number of exchanges of this rank.

        It changes at the moment when the other ranks can read the message.
        """

    def exchange(self, call: bytes, message: bytes, is_wanted: bool) -> Sequence[Data] | None:
        """Return the messages of all ranks if they are wanted; ``None`` on a mismatch."""

    def settle(self) -> bool:
        """Complete the last exchange if it was interrupted; return whether all calls match."""

    def free(self) -> None:
        """Free the memory. Collective: every rank calls it once."""


#: Function that allocates shared memory for messages of the given size, on all ranks or on none.
Share: TypeAlias = 'Callable[[MPI.Intracomm, int], MessageMemory | None]'


class SignatureExchange:
    """Exchanges small messages between all ranks of a communicator.

    All methods are collective: each rank calls one of them, with the identifier of its call. Calls
    with the same identifier use the same method.

    Args:
        mpi_comm: The communicator. No other message uses the tag ``tags.reserved().check``.
        largest_header: The maximum size of a message in bytes, without data.
        share: Function that allocates shared memory for later exchanges; ``None`` if the ranks
            cannot share memory.
        spins: The number of polls before the first one that yields the core.
    """

    def __init__(self, mpi_comm: MPI.Intracomm, largest_header: int, share: Share | None = None,
                 spins: int = SPINS_IF_OVERSUBSCRIBED) -> None:
        rank, size = mpi_comm.rank, mpi_comm.size
        #: The maximum size, in bytes, of the data of one rank.
        self.capacity = min(_MAX_BYTES, _MAX_TOTAL // size)
        # For each step: the receiver, the sender, and the number of ranks whose data is received.
        self._steps: list[tuple[int, int, int]] = []
        distance = 1
        while distance < size:
            self._steps.append(((rank - distance) % size, (rank + distance) % size,
                                min(distance, size - distance)))
            distance *= 2
        self._rank, self._tag, self._spins = rank, tags.reserved().check, spins
        self._send, self._irecv = mpi_comm.Send, mpi_comm.Irecv
        self._received = bytearray(
            IDENTIFIER_SIZE + size * (_LENGTH.size + largest_header + self.capacity))
        self._mpi_comm, self._largest = mpi_comm, largest_header + self.capacity
        self._share = share if size > 1 else None
        self._count = 0  # number of exchanges by messages
        self._memory: MessageMemory | None = None
        #: A number that has increased by the time another rank can learn of a call.
        self.published: Counter = [0]
        #: The value of that number when the current operation of this rank began.
        self.before = 0
        self._complete = 0  # completed steps of exchanges by messages
        self._last: Data = b''  # the message of the last step
        self._interruption: BaseException | None = None
        self._failure: BaseException | None = None

    def free(self) -> None:
        """Free the shared memory. Collective: every rank calls it, at the end."""
        if self._memory is not None:
            self.published = [0]
            self._memory.free()

    def settle(self, error: BaseException) -> bool:
        """Complete an exchange that an exception interrupted, because other ranks wait for it.

        If this is impossible, all later exchanges raise an error.

        Args:
            error: The exception.

        Returns:
            Whether the calls of all ranks match, as far as this rank knows.
        """
        if self._memory is not None:
            return self._memory.settle()
        if self.published[0] != self._complete or self._complete % len(self._steps):
            self._failure = error
            return True
        return not self._last.startswith(MISMATCH) and (
            self._last[:IDENTIFIER_SIZE] == self._received[:IDENTIFIER_SIZE])

    def matches(self, call: bytes) -> bool:
        """Return whether the calls of all ranks are identical."""
        if self._is_shared():
            return self._exchange(call, b'', False) is not None
        received = self._received
        for dest, source, _ in self._steps:
            self._swap(call, dest, source)
            if not received.startswith(call):
                call = MISMATCH
        return call is not MISMATCH

    def gather_equal(self, call: bytes, block: bytes) -> Sequence[Data] | None:
        """Return the blocks of all ranks, which have the same length; ``None`` on a mismatch."""
        if self._is_shared():
            return self._exchange(call, block)
        received, length = self._received, len(block)
        blocks: list[Data] = [block]  # of this rank and the ranks above, modulo the size
        message = call + block
        for dest, source, count in self._steps:
            if len(blocks) > 1:
                message = b''.join([call, *blocks[:count]])
            self._swap(message, dest, source)
            if not received.startswith(call) or call is MISMATCH:
                call = message = MISMATCH
                blocks = [b'']
                continue
            end = IDENTIFIER_SIZE
            for _ in range(count):
                start, end = end, end + length
                blocks.append(received[start:end])
        return None if call is MISMATCH else self._by_rank(blocks)

    def gather(self, call: bytes, message: bytes) -> Sequence[Data] | None:
        """Return the messages of all ranks, of any length; ``None`` on a mismatch."""
        if self._is_shared():
            return self._exchange(call, message)
        received = self._received
        found: list[Data] = [message]  # as in gather_equal
        sent = b''.join((call, _LENGTH.pack(len(message)), message))
        for dest, source, count in self._steps:
            if len(found) > 1:
                parts: list[Data] = [call]
                for each in found[:count]:
                    parts += _LENGTH.pack(len(each)), each
                sent = b''.join(parts)
            self._swap(sent, dest, source)
            if not received.startswith(call) or call is MISMATCH:
                call = sent = MISMATCH
                found = [b'']
                continue
            end = IDENTIFIER_SIZE
            for _ in range(count):
                length, = _LENGTH.unpack_from(received, end)
                start, end = end + _LENGTH.size, end + _LENGTH.size + length
                found.append(received[start:end])
        return None if call is MISMATCH else self._by_rank(found)

    def bcast(self, call: bytes, message: bytes, root: int) -> Data | None:
        """Return the message of the root, which must not be empty; ``None`` on a mismatch."""
        if self._is_shared():
            messages = self._exchange(call, message if self._rank == root else b'')
            return None if messages is None else messages[root]
        received = self._received
        known: Data = message if self._rank == root else b''
        sent = b''.join((call, _LENGTH.pack(len(known)), known))
        for dest, source, _ in self._steps:
            self._swap(sent, dest, source)
            if not received.startswith(call) or call is MISMATCH:
                call = sent = MISMATCH
            elif not known:
                length, = _LENGTH.unpack_from(received, IDENTIFIER_SIZE)
                end = _HEADER_SIZE + length
                known = received[_HEADER_SIZE:end]
                sent = bytes(received[:end])
        return None if call is MISMATCH else known

    def _is_shared(self) -> bool:
        """Return whether this exchange uses shared memory.

        Collective: every rank calls it in each exchange, even if the calls differ.
        """
        if self._memory is not None:
            return True
        if self._failure is not None:
            raise RuntimeError(
                'the communicator is unusable: an exception (for example, in a signal handler) '
                'interrupted an earlier operation on this rank: '
                f'{type(self._failure).__name__}') from self._failure
        self._count += 1
        if self._count != _MESSAGES + 1 or self._share is None:
            return False
        self.published[0] += 1  # in case the allocation is interrupted
        self._memory = self._share(self._mpi_comm, self._largest)
        self._complete += 1
        if self._memory is None:
            return False
        self.published, self.before = self._memory.published, 0
        return True

    def _exchange(self, call: bytes, message: bytes, is_wanted: bool = True
                  ) -> Sequence[Data] | None:
        """Return the messages of all ranks in shared memory; ``None`` on a mismatch."""
        assert self._memory is not None
        with activities.span('wait', 'wait'):
            found = self._memory.exchange(call, message, is_wanted)
        return None if call is MISMATCH else found

    def _swap(self, message: Data, dest: int, source: int) -> None:
        """Send a message and receive one.

        The other ranks need all messages of this rank, so an exception from a signal handler is
        raised only after the last message.
        """
        self.published[0] += 1
        self._last = message
        request = self._irecv(self._received, source, self._tag)
        self._send(message, dest, self._tag)
        try:
            wait(request, None, self._spins)
        except MPI.Exception:
            raise
        except BaseException as error:
            self._interruption = error
        self._complete += 1
        if self._interruption is not None and not self._complete % len(self._steps):
            interruption, self._interruption = self._interruption, None
            raise interruption

    def _by_rank(self, found: list[Data]) -> list[Data]:
        return found[-self._rank:] + found[:-self._rank] if self._rank else found


def wait(request: MPI.Request, status: MPI.Status | None = None,
         spins: int = SPINS_IF_OVERSUBSCRIBED) -> None:
    """Wait for a message that arrives soon: poll first, then block.

    Within a node, a message often takes less time than MPI needs to block for it. If ranks share a
    core, each poll lets another rank run.

    Args:
        request: The request.
        status: The status to fill.
        spins: The number of polls before the first one that yields the core.
    """
    test = request.Test
    try:
        for _ in range(spins):
            if test(status):
                return
        with activities.span('wait', 'wait'):
            for _ in range(_POLLS):
                if test(status) or test(status):  # a poll takes less time than yielding
                    return
                os.sched_yield()
    except BaseException:  # raised by a signal handler; MPI still writes into the buffer
        request.Wait()
        raise
    with activities.span('wait', 'wait'):
        request.Wait(status)


class TracedSignatureExchange(SignatureExchange):
    """Records on the timeline how long each exchange takes, until the last rank has entered it."""

    def matches(self, call: bytes) -> bool:
        with recorder.span('wait', 'wait'):
            return super().matches(call)

    def gather_equal(self, call: bytes, block: bytes) -> Sequence[Data] | None:
        with recorder.span('wait', 'wait'):
            return super().gather_equal(call, block)

    def gather(self, call: bytes, message: bytes) -> Sequence[Data] | None:
        with recorder.span('wait', 'wait'):
            return super().gather(call, message)

    def bcast(self, call: bytes, message: bytes, root: int) -> Data | None:
        with recorder.span('wait', 'wait'):
            return super().bcast(call, message, root)
