"""Payloads: large arrays and objects, sent after their header on a separate MPI communicator.

A rank that cannot allocate a payload still receives and discards it, since the sender waits, and
then raises.
"""
from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from chainermn._collectives.nonblocking import Receive, Receives, blocking
from chainermn._consistency import tags
from chainermn._process.mpi import MPI
from chainermn._transport import array_buffers
from chainermn._transport.pickling import CHUNK, Pickled, load
from chainermn._types import Array, Object


class Payloads:
    """Receives payloads, and exchanges objects in collective calls.

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
        """Return a tag that no other payload of this rank in flight has."""
        return next(self._numbers) % self._n_numbers

    def receive_array(self, shape: tuple[int, ...], dtype: np.dtype, device: bool, source: int,
                      number: int) -> Receives[Array]:
        """Receive the buffer of an array."""
        try:
            buffer = array_buffers.new_buffer(shape, dtype, device)
        except MemoryError as error:
            yield self._dropped(source, number)
            raise self._no_memory(source, error) from error
        yield Receive(self.mpi_comm, array_buffers.raw(buffer), source, number)
        return buffer

    def receive_object(self, source: int, number: int) -> Receives[Object]:
        """Receive an object that was sent as `Pickled.messages`."""
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

    def exchange(self, pickled: Mapping[int, Pickled], sources: Iterable[int],
                 wait: Callable[..., None]) -> list[Object]:
        """Exchange objects in a collective call.

        Args:
            pickled: The objects to send, by destination.
            sources: The ranks that send to this one.
            wait: Waits for an MPI request.

        Returns:
            The received objects, in the order of ``sources``.

        Raises:
            Exception: The first error, after everything was sent and received.
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

    def _dropped(self, source: int, number: int) -> Receive:
        return Receive(self.mpi_comm, bytearray(1), source, number, is_dropped=True)

    def _no_memory(self, source: int, error: MemoryError) -> MemoryError:
        return MemoryError(f'rank {self._rank} has no memory for the message from rank {source}: '
                           f'{error}')
