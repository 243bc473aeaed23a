"""Remote procedure calls: a thread of each rank answers requests from other ranks.

The alternative, one-sided communication (MPI chapter 12), needs no thread where ranks share memory.
But without special network hardware, MPI transfers such data only while the target rank is in an
MPI call, so a rank that sleeps or computes would block all others.
"""
from __future__ import annotations

import itertools
import pickle
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias, cast

import numpy as np

from chainermn._collectives.operation import operation
from chainermn._collectives.tracer import Tracer
from chainermn._consistency import tags
from chainermn._consistency.mismatch import RemoteError
from chainermn._diagnostics import lifecycle, unusable
from chainermn._diagnostics.flight_recorder import FlightRecord, ServiceRecord
from chainermn._diagnostics.unusable import Unusable
from chainermn._operations import common_error
from chainermn._operations.ranks import ranks_text
from chainermn._operations.table import REQUEST
from chainermn._process.mpi import MPI
from chainermn._types import Buffer

_REQUEST = 0  # tag
_HEAD = struct.Struct('=q')  # in a request: tag of the answer; in an answer: whether it failed

# Seconds. A waiting thread polls continuously at first, then at short and later at long intervals;
# an idle thread uses 3% of a core.
_CONTINUOUS = 2e-4
_FREQUENT = 2e-2
_SHORT_INTERVAL = 5e-5
_LONG_INTERVAL = 1e-3

#: The parts of a message: any number of C-ordered host arrays or bytes, which are sent together.
Buffers: TypeAlias = 'Sequence[Buffer]'


class Service:
    """Sends requests and answers those of other ranks. Collective: every rank creates one.

    Args:
        mpi_comm: A duplicate of the communicator that nothing else uses; freed at the end.
        answer: Function called as ``answer(source, request)``, where the request is a flat uint8
            array, which returns the buffers of the answer. It runs in the thread of this service,
            or in the requesting thread if this rank sends a request to itself. Its errors are
            raised on the requesting rank. It must not send requests, because two ranks could wait
            for each other.
    """

    def __init__(self, mpi_comm: MPI.Intracomm, answer: Callable[[int, np.ndarray], Buffers]
                 ) -> None:
        self._mpi_comm = mpi_comm
        self._record = ServiceRecord(mpi_comm)
        self._rank = mpi_comm.rank
        self._answer = answer
        n_tags = min(tags.largest_tag(), 2**20)
        self._tags = itertools.cycle(range(_REQUEST + 1, n_tags))
        self._closed = threading.Event()
        self._answering = threading.local()
        self._tracer: Tracer | None = None
        self._thread = threading.Thread(target=self._serve, name='chainermn service', daemon=True)
        lifecycle.add_callback(self._finish)
        unusable.register(self)
        self._thread.start()
        self._record.thread = self._thread.ident

    @operation(REQUEST)
    def ask(self, requests: Mapping[int, Buffers]) -> dict[int, np.ndarray]:
        """Send requests to several ranks at once and wait for the answers. Thread-safe.

        Args:
            requests: The buffers of each request, by destination.

        Returns:
            The answers as flat uint8 arrays, by rank.

        Raises:
            ValueError: If the service is closed on this rank.
            RuntimeError: If ``answer`` calls this method.
            Exception: The first error that ``answer`` raised.
        """
        if hasattr(self._answering, 'source'):
            raise RuntimeError('a function that answers requests, such as the updater of a '
                               'KVStore, must not send requests: two ranks could wait for each '
                               'other')
        if self._closed.is_set():
            raise ValueError('the store was closed on this rank, so other ranks may have exited; '
                             'do not use it after close()')
        tag = next(self._tags)
        call = self._record.add(operation=REQUEST)
        call.words = f'to {ranks_text(sorted(requests))}'
        call.asked = tuple(self._record.ranks[rank] for rank in requests if rank != self._rank)
        messages = {rank: _joined(_HEAD.pack(tag), request) for rank, request in requests.items()
                    if rank != self._rank}
        sent = [self._mpi_comm.Isend(message, rank, _REQUEST) for rank, message in messages.items()]
        answers = {}
        if self._rank in requests:
            answers[self._rank] = self._checked_answer(
                self._rank, _joined(b'', requests[self._rank]))
        # Receive in order of arrival. In a fixed order, ranks could wait for each other in a cycle.
        for _ in messages:
            rank, answer = self._receive(tag)
            answers[rank] = answer
        MPI.Request.Waitall(sent)
        for rank in sorted(answers):
            if _HEAD.unpack_from(answers[rank].data)[0]:
                failure, place = pickle.loads(answers[rank][_HEAD.size:].data)
                raise failure.error(failure.text if rank == self._rank else
                                    f'{failure.text}\n  (raised on rank {rank}{place})')
        return {rank: answer[_HEAD.size:] for rank, answer in answers.items()}

    def _flight_records(self) -> tuple[FlightRecord, ...]:
        """Return the flight record of the requests."""
        return self._record,

    def _make_unusable(self, unusable: Unusable) -> None:
        """Make every later :meth:`ask` raise an error."""
        setattr(self, '_answering', unusable)  # noqa: B010  (of a different type)

    def close(self) -> None:
        """Stop sending requests from this rank. Every rank calls it, at any time.

        Returns immediately. This rank continues to answer requests until all ranks have called
        ``close`` or have reached the end of the script.
        """
        self._closed.set()

    def _finish(self) -> None:
        self.close()
        self._thread.join()

    def _receive(self, tag: int) -> tuple[int, np.ndarray]:
        status = MPI.Status()
        start = time.perf_counter()
        while (message := self._mpi_comm.Improbe(MPI.ANY_SOURCE, tag, status)) is None:
            _pause(start)
        return _received(message, status)

    def _serve(self) -> None:
        """Answer requests until all ranks have closed the service; runs in the thread."""
        status = MPI.Status()
        all_closed: MPI.Request | None = None
        last = time.perf_counter()
        while True:
            message = self._mpi_comm.Improbe(MPI.ANY_SOURCE, _REQUEST, status)
            if message is not None:
                source, request = _received(message, status)
                tag, = _HEAD.unpack_from(request.data)
                self._mpi_comm.Send(
                    self._checked_answer(source, request[_HEAD.size:]), source, tag)
                last = time.perf_counter()
                continue
            if self._closed.is_set() and all_closed is None:
                all_closed = self._mpi_comm.Ibarrier()
            if all_closed is not None and all_closed.Test():
                break  # every request has been answered, and no more will come
            _pause(last)
        self._mpi_comm.Free()
        lifecycle.remove_callback(self._finish)

    def _checked_answer(self, source: int, request: np.ndarray) -> np.ndarray:
        """Return the message with the answer, or with the error of ``answer``."""
        self._answering.source = source
        try:
            return _joined(_HEAD.pack(0), self._answer(source, request))
        except Exception as error:
            return _failed(error)
        except BaseException as error:
            if threading.current_thread() is not self._thread:
                raise  # the error belongs to this rank, for example KeyboardInterrupt
            # If the thread exited here, the requesting rank would get no answer.
            return _failed(RuntimeError(f'{type(error).__name__}: {error}'))
        finally:
            del self._answering.source


def check_service(answer: object) -> None:
    """Raise if a service cannot be started."""
    if not callable(answer):
        raise TypeError(f'answer must be a function, not {answer!r}')
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise RuntimeError(
            'answering requests in a thread requires MPI_THREAD_MULTIPLE, which the MPI library '
            'does not provide; leave mpi4py.rc.threads and mpi4py.rc.thread_level at their '
            'defaults, or use a different MPI library')


def _received(message: MPI.Message, status: MPI.Status) -> tuple[int, np.ndarray]:
    source = status.Get_source()
    received = np.empty(status.Get_count(), np.uint8)
    message.Recv(received)
    return source, received


def _failed(error: Exception) -> np.ndarray:
    failure, place = RemoteError.of(REQUEST, error), common_error.program_line(error)
    is_new = place and place not in failure.text
    return _joined(_HEAD.pack(1), [pickle.dumps((failure, f', at {place}' if is_new else ''))])


def _joined(head: bytes, buffers: Buffers) -> np.ndarray:
    parts = cast('Sequence[bytes]', buffers)  # arrays are also buffers
    return np.frombuffer(b''.join([head, *parts]), np.uint8)


def _pause(since: float) -> None:
    waited = time.perf_counter() - since
    time.sleep(0 if waited < _CONTINUOUS else
               _SHORT_INTERVAL if waited < _FREQUENT else _LONG_INTERVAL)
