"""Payloads: large arrays and objects, sent after their header on a separate MPI communicator.

If a rank cannot allocate memory for a payload, it still receives the payload, because the sender is
waiting, but discards it. Then it raises an error.
"""
from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from chainermn._collectives import message_parts
from chainermn._collectives.nonblocking import Receive, Receives, blocking
from chainermn._consistency import tags
from chainermn._operations import message_header
from chainermn._operations.message_header import IN_MESSAGE, MessageHeader
from chainermn._process.mpi import MPI
from chainermn._transport import array_buffers
from chainermn._transport.pickling import CHUNK, Pickled, load
from chainermn._types import Array, Object


class Payloads:
    """Receives payloads and exchanges objects in collective calls.

    Args:
        mpi_comm: A duplicate of the communicator.
    """

    def __init__(self, mpi_comm: MPI.Intracomm) -> None:
        self.mpi_comm = mpi_comm
        self._rank = mpi_comm.rank
        self._numbers = itertools.count()
        reserved = tags.reserved()
        self._collective = reserved.collective
        self._n_numbers = min(reserved)

    def new_number(self) -> int:
        """Return a tag that no other in-flight payload of this rank uses."""
        return next(self._numbers) % self._n_numbers

    def receive_array(self, header: MessageHeader, body: memoryview, source: int
                      ) -> Receives[Array]:
        """Receive an array, whose data follows its header in ``body`` if it is small."""
        shape = header.shape
        if header.payload == IN_MESSAGE:
            buffer = np.frombuffer(body, header.dtype, math.prod(shape)).copy()
        else:
            buffer = yield from self._receive_buffer(header, source)
        return array_buffers.from_buffer(buffer, shape, header.device)

    def receive_tuple(self, header: MessageHeader, body: memoryview, source: int
                      ) -> Receives[tuple[Array, ...]]:
        """Receive several arrays; the first ones may be in ``body``."""
        arrays, failure = [], None
        for n in range(header.n_arrays):
            if n < header.n_together:
                each, body = message_header.read(body)
            else:
                _, each, body = yield from message_parts.receive(
                    self.mpi_comm, source, header.payload, MPI.Status())
            n_bytes = math.prod(each.shape) * each.dtype.itemsize * (each.payload == IN_MESSAGE)
            data, body = body[:n_bytes], body[n_bytes:]
            try:
                arrays.append((yield from self.receive_array(each, data, source)))
            except MemoryError as error:  # receive the other arrays: the sender waits
                failure = failure or error
        if failure is not None:
            raise failure
        return tuple(arrays)

    def receive_object(self, source: int, number: int) -> Receives[Object]:
        """Receive an object that was sent as the messages of ``Pickled.messages``."""
        count = np.empty(1, int)
        yield Receive(self.mpi_comm, count, source, number)
        lengths = np.empty(int(count[0]), int)
        yield Receive(self.mpi_comm, lengths, source, number)
        parts, failure = [], None
        try:
            parts = [np.empty(length, np.uint8) for length in lengths.tolist()]
        except MemoryError as error:
            failure = error
        for i, length in enumerate(lengths.tolist()):
            for start in range(0, length, CHUNK):
                yield self._dropped(source, number) if failure else Receive(
                    self.mpi_comm, parts[i][start:start + CHUNK], source, number)
        if failure is not None:
            raise self._no_memory(source, failure) from failure
        return load(parts[0], parts[1:], source, self._rank)

    def exchange_objects(self, pickled: Mapping[int, Pickled], sources: Iterable[int],
                         wait: Callable[..., None]) -> list[Object]:
        """Exchange objects in a collective call.

        Args:
            pickled: The objects to send, by destination.
            sources: The ranks that send to this one.
            wait: Function that waits for an MPI request.

        Returns:
            The received objects, in the order of ``sources``.

        Raises:
            Exception: The first error, after everything has been sent and received.
        """
        sends = [self.mpi_comm.Isend(message, dest, self._collective)
                 for dest, each in pickled.items() for message in each.messages()]
        objs, failure = [], None
        for source in sources:
            try:
                objs.append(blocking(self.receive_object(source, self._collective), wait))
            except Exception as error:
                failure = failure or error
        for request in sends:
            wait(request)
        if failure is not None:
            raise failure
        return objs

    def _receive_buffer(self, header: MessageHeader, source: int) -> Receives[Array]:
        try:
            buffer = array_buffers.new_buffer(header.shape, header.dtype, header.device)
        except MemoryError as error:
            yield self._dropped(source, header.payload)
            raise self._no_memory(source, error) from error
        yield Receive(self.mpi_comm, array_buffers.raw(buffer), source, header.payload)
        return buffer

    def _dropped(self, source: int, number: int) -> Receive:
        """Return a receive that discards a message."""
        return Receive(self.mpi_comm, bytearray(1), source, number, is_dropped=True)

    def _no_memory(self, source: int, error: MemoryError) -> MemoryError:
        return MemoryError(f'rank {self._rank} cannot allocate memory for the message from rank '
                           f'{source}: {error}')
