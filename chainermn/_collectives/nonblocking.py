"""Requests: what an operation that does not block gives, to be waited for."""
from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, NamedTuple, cast

from mpi4py import MPI

from chainermn._diagnostics import thread_state

#: MPI requests one after another, each with the status it fills, then the result.
Steps = Iterator[tuple[MPI.Request, 'MPI.Status | None']]


class Receive(NamedTuple):
    """One message to be received, by a call that blocks or by one that does not."""

    mpi_comm: Any
    buffer: Any
    source: int
    tag: int
    status: MPI.Status | None = None
    is_dropped: bool = False  # it does not fit into the buffer, and nobody wants it

    def begin(self) -> MPI.Request:
        """Begins to receive it."""
        request = self.mpi_comm.Irecv(self.buffer, self.source, self.tag)
        return cast(MPI.Request, _Dropped(request)) if self.is_dropped else request


class _Dropped:
    """A request for a message that MPI cuts off at the end of the buffer."""

    def __init__(self, request: MPI.Request) -> None:
        self._request = request

    def Test(self, status: MPI.Status | None = None) -> bool:  # noqa: N802  (it is MPI's)
        with _cut_off():
            return self._request.Test(status)
        return True

    def Wait(self, status: MPI.Status | None = None) -> None:  # noqa: N802
        with _cut_off():
            self._request.Wait(status)


@contextlib.contextmanager
def _cut_off() -> Iterator[None]:
    try:
        yield
    except MPI.Exception as error:
        if error.Get_error_class() != MPI.ERR_TRUNCATE:
            raise


#: Messages one after another, then the result.
Receives = Generator[Receive, None, Any]


class Request:
    """What :meth:`CommunicatorBase.isend` and :meth:`CommunicatorBase.irecv` give.

    Each request has to be waited for, once.

    Args:
        name: What it is the request of, for errors.
        site: Where the program called that.
        steps: What is left to be done.
        are_others: Lets what else this rank receives go on, and says whether there is something.
        waits: Called when somebody begins to wait, to keep that; returns where it is kept.
    """

    def __init__(self, name: str, site: str, steps: Steps, are_others: Callable[[Request], bool],
                 waits: Callable[[], Any] | None = None) -> None:
        self._name = name
        #: For warnings.
        self.call = f'{name}, called at {site}'
        self._steps = steps
        self._are_others = are_others
        self._waits = waits
        self._kept: Any = None
        self._step: tuple[MPI.Request, MPI.Status | None] | None = None
        self._result: Any = None
        self._error: Exception | None = None
        self._is_over = False  # waited for
        self._advance()

    def wait(self) -> Any:
        """Returns once the message has been sent or received.

        Returns:
            What was received, as :meth:`CommunicatorBase.recv` would; ``None`` for ``isend``.

        Raises:
            RuntimeError: If this request has been waited for before.
            TypeError, ValueError: If what was sent cannot be received, as ``recv`` does.
        """
        if self._is_over:
            raise RuntimeError(f'the request of {self._name} has been waited for already; each '
                               'request is waited for once')
        if self._step is not None and self._waits is not None:
            self._kept = self._waits()
        while self._step is not None:
            if self._are_others(self):  # what this one waits for may wait for another one
                if not self.test():
                    os.sched_yield()
            elif self._step is not None:  # it may just have gone on
                request, status = self._step
                request.Wait(status)
                self._advance()
        self._is_over = True
        if self._error is not None:
            raise self._error
        result, self._result = self._result, None
        return result

    def recent_calls(self) -> tuple[Any, ...]:
        """Where it is kept that somebody waits."""
        return (self._kept,) if self._kept is not None else ()

    def test(self) -> bool:
        """Returns at once, and says whether :meth:`wait` would do so too."""
        while self._step is not None:
            request, status = self._step
            if not request.Test(status):
                return False
            self._advance()
        return True

    def give_up(self, unusable: Any) -> None:
        """Makes whoever asks for this request raise, unless it is complete."""
        if self._step is not None:
            self._step = unusable

    def __repr__(self) -> str:
        state = 'over' if self._is_over else 'complete' if self._step is None else 'pending'
        return f'<Request of {self._name}: {state}>'

    def _advance(self) -> None:
        try:
            self._step = next(self._steps)
        except StopIteration as end:
            self._step, self._result = None, end.value
        except Exception as error:
            self._step, self._error = None, error


def largest_tag() -> int:
    """The largest tag that a message may have; some MPIs know it only of COMM_WORLD."""
    tag = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)
    assert isinstance(tag, int)
    return tag


def waitall(requests: Iterable[Request]) -> list[Any]:
    """Waits for all requests; returns what their ``wait()`` returns, or raises the first error."""
    requests = [requests] if isinstance(requests, Request) else list(requests)
    for request in requests:
        if not isinstance(request, Request):
            raise TypeError(f'waitall takes requests of isend and irecv, not {request!r}')
    results, errors = [], []
    for request in requests:
        try:
            results.append(request.wait())
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return results


def blocking(receives: Receives, wait: Callable[[MPI.Request, MPI.Status | None], None]) -> Any:
    """Receives one message after another, and waits for each; returns the result."""
    try:
        while True:
            receive = next(receives)
            wait(receive.begin(), receive.status)
    except StopIteration as end:
        return end.value


def non_blocking(receives: Receives) -> Steps:
    """The steps of messages that are received while the caller does something else."""
    try:
        while True:
            receive = next(receives)
            yield receive.begin(), receive.status
    except StopIteration as end:
        return end.value


thread_state.know([Request.wait])
