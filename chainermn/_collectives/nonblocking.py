"""Requests of nonblocking operations."""
from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Generic, NamedTuple, TypeAlias, TypeVar, cast

from chainermn._collectives.operation import operation
from chainermn._collectives.tracer import Tracer
from chainermn._diagnostics.flight_recorder import FlightRecord
from chainermn._diagnostics.unusable import Unusable
from chainermn._process.mpi import MPI
from chainermn._types import Array

_T = TypeVar('_T')
_Result = TypeVar('_Result', covariant=True)

#: A generator that yields MPI requests, each with the status to fill, and returns the result.
Steps: TypeAlias = 'Iterator[tuple[MPI.Request, MPI.Status | None]]'


class Receive(NamedTuple):
    """One message to receive, blocking or nonblocking."""

    mpi_comm: MPI.Intracomm
    buffer: Array | bytearray
    source: int
    tag: int
    status: MPI.Status | None = None
    is_dropped: bool = False  # the message does not fit into the buffer and is discarded

    def begin(self, is_blocking: bool = False) -> MPI.Request:
        start = blocking_receive if is_blocking else receive
        request = start(self.mpi_comm, self.buffer, self.source, self.tag)
        return cast(MPI.Request, _Dropped(request)) if self.is_dropped else request


def receive(mpi_comm: MPI.Intracomm, buffer: Array | bytearray, source: int, tag: int
            ) -> MPI.Request:
    """Start to receive a message.

    Between hosts with MPICH 5.0.2, a receive from any source does not find a message that UCX has
    received before the call; a matched probe does. A message that arrives between the probe and the
    receive is still missed; see :func:`blocking_receive`.
    """
    if source == MPI.ANY_SOURCE and (message := mpi_comm.Improbe(source, tag)) is not None:
        return message.Irecv(buffer)
    return mpi_comm.Irecv(buffer, source, tag)


def blocking_receive(mpi_comm: MPI.Intracomm, buffer: Array | bytearray, source: int, tag: int
                     ) -> MPI.Request:
    """Start to receive a message for a caller that then waits, so that no message is missed."""
    if source == MPI.ANY_SOURCE:
        return cast(MPI.Request, _FromAnySource(mpi_comm, buffer, tag))
    return mpi_comm.Irecv(buffer, source, tag)


class _FromAnySource:
    """A request for a message from any rank, which probes until a message has arrived."""

    def __init__(self, mpi_comm: MPI.Intracomm, buffer: Array | bytearray, tag: int) -> None:
        self._mpi_comm, self._buffer, self._tag = mpi_comm, buffer, tag

    def Test(self, status: MPI.Status | None = None) -> bool:  # noqa: N802  (MPI's name)
        message = self._mpi_comm.Improbe(MPI.ANY_SOURCE, self._tag)
        if message is None:
            return False
        message.Recv(self._buffer, status)
        return True

    def Wait(self, status: MPI.Status | None = None) -> None:  # noqa: N802
        self._mpi_comm.Mprobe(MPI.ANY_SOURCE, self._tag).Recv(self._buffer, status)


class _Dropped:
    """A request for a message that MPI truncates."""

    def __init__(self, request: MPI.Request) -> None:
        self._request = request

    def Test(self, status: MPI.Status | None = None) -> bool:  # noqa: N802  (MPI's name)
        with _ignore_truncation():
            return self._request.Test(status)
        return True

    def Wait(self, status: MPI.Status | None = None) -> None:  # noqa: N802
        with _ignore_truncation():
            self._request.Wait(status)


@contextlib.contextmanager
def _ignore_truncation() -> Iterator[None]:
    try:
        yield
    except MPI.Exception as error:
        if error.Get_error_class() != MPI.ERR_TRUNCATE:
            raise


#: A generator that yields the messages to receive and returns the result.
Receives = Generator[Receive, None, _T]


class Request(Generic[_Result]):
    """The result of :meth:`CommunicatorBase.isend` and :meth:`CommunicatorBase.irecv`.

    Wait for each request exactly once. A thread that waits in another operation also makes progress
    with the requests of other threads. A lock protects the MPI request, because MPI allows only one
    thread at a time to test or wait for a request.

    Args:
        name: The name of the operation, for errors.
        site: The call site of the operation.
        steps: The remaining MPI requests.
        has_other_receives: Function that makes progress with the other receives of this rank and
            returns whether any of them remain.
        record_wait: Function to call when :meth:`wait` begins to block. It returns the flight
            record of the wait.
    """

    def __init__(self, name: str, site: str, steps: Steps,
                 has_other_receives: Callable[[Request[object]], bool],
                 record_wait: Callable[[], FlightRecord] | None = None) -> None:
        self._name = name
        self._tracer: Tracer | None = None  # traces the wait
        #: The operation and its call site, for warnings.
        self.call: str = f'{name}, called at {site}'
        self._steps = steps
        self._has_other_receives = has_other_receives
        self._record_wait = record_wait
        self._record: FlightRecord | None = None
        self._step: tuple[MPI.Request, MPI.Status | None] | None = None
        self._result: _Result | None = None
        self._error: Exception | None = None
        self._is_over = False  # whether the caller has waited for the request
        self._lock = threading.RLock()
        self._advance()

    @operation
    def wait(self) -> _Result:
        """Wait until the message has been sent or received.

        Returns:
            The received data, as from :meth:`CommunicatorBase.recv`; ``None`` for ``isend``.

        Raises:
            RuntimeError: If this request has already been waited for.
            TypeError, ValueError: The same errors as ``recv``.
        """
        if self._is_over:
            raise self._second_wait_error()
        if self._step is not None and self._record_wait is not None:
            self._record = self._record_wait()
        while self._step is not None:
            if self._has_other_receives(self):  # they may have to finish before this one
                if not self.test():
                    os.sched_yield()
                continue
            with self._lock:
                if self._step is not None:  # otherwise, another receive or thread finished it
                    request, status = self._step
                    request.Wait(status)
                    self._advance()
        with self._lock:
            if self._is_over:
                raise self._second_wait_error()
            self._is_over = True
        if self._error is not None:
            raise self._error
        result, self._result = self._result, None
        return cast(_Result, result)

    def _flight_records(self) -> tuple[FlightRecord, ...]:
        """Return the flight record of the wait."""
        return (self._record,) if self._record is not None else ()

    def test(self) -> bool:
        """Return whether :meth:`wait` would return immediately. Does not block."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            while self._step is not None:
                request, status = self._step
                if not request.Test(status):
                    return False
                self._advance()
            return True
        finally:
            self._lock.release()

    def _second_wait_error(self) -> RuntimeError:
        return RuntimeError(f'wait() was already called on the request of {self._name}; call it '
                            'once for each request')

    def _make_unusable(self, unusable: Unusable) -> None:
        """Make this request raise an error, unless it is complete."""
        if self._step is not None:
            setattr(self, '_step', unusable)  # noqa: B010  (of a different type)

    def __repr__(self) -> str:
        state = 'done' if self._is_over else 'complete' if self._step is None else 'pending'
        return f'<Request of {self._name}: {state}>'

    def _advance(self) -> None:
        try:
            self._step = next(self._steps)
        except StopIteration as end:
            self._step, self._result = None, end.value
        except Exception as error:
            self._step, self._error = None, error


class Pending:
    """Keeps the requests and buffers of incomplete sends alive while MPI uses them."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._sends: list[tuple[str, list[MPI.Request]]] = []

    def record(self, call: str, requests: Iterable[MPI.Request]) -> None:
        """Record the requests of a call."""
        with self._lock:
            self._drop_complete()
            self._sends.append((call, list(requests)))

    def calls(self) -> list[str]:
        """Return the calls with incomplete requests."""
        with self._lock:
            self._drop_complete()
            return [call for call, _ in self._sends]

    def _drop_complete(self) -> None:
        self._sends = [send for send in self._sends
                       if not all([request.Test() for request in send[1]])]


def waitall(requests: Iterable[Request[_T]]) -> list[_T]:
    """Wait for all requests; return their results, or raise the first error."""
    if not isinstance(requests, Iterable):
        requests = [requests]
    requests = list(requests)
    for request in requests:
        if not isinstance(request, Request):
            raise TypeError(f'waitall takes requests from isend and irecv, not {request!r}')
    results, errors = [], []
    for request in requests:
        try:
            results.append(request.wait())
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return results


def blocking(receives: Receives[_T], wait: Callable[[MPI.Request, MPI.Status | None], None]) -> _T:
    """Receive messages one after another, blocking, and return the result.

    The sender waits until all messages have been received, so an exception from a signal handler is
    raised only after the last message.
    """
    interruption: BaseException | None = None
    while True:
        try:
            receive = next(receives)
        except StopIteration as end:
            if interruption is not None:
                raise interruption from None
            return end.value
        try:
            wait(receive.begin(is_blocking=True), receive.status)
        except MPI.Exception:
            raise
        except BaseException as error:  # this message has been received
            interruption = error


def non_blocking(receives: Receives[object]) -> Steps:
    """Return the steps that receive messages while the caller does something else."""
    try:
        while True:
            receive = next(receives)
            yield receive.begin(), receive.status
    except StopIteration as end:
        return end.value
