"""Requests and answers: a thread of each rank answers the others, whatever the rank itself does.

The alternative, memory windows that the others read and write (MPI chapter 12, "One-Sided
Communications"), needs no thread where ranks share memory. But an MPI library without special
network hardware moves such data only while their owner is inside MPI, so a rank that sleeps or
computes would hold up all others; a thread that looks for messages does not let that happen.
"""
from __future__ import annotations

import itertools
import pickle
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from chainermn._collectives.nonblocking import largest_tag
from chainermn._consistency.mismatch import Refusal
from chainermn._diagnostics import shutdown, thread_state, unusable
from chainermn._diagnostics.flight_recorder import Calls, ServiceCalls
from chainermn._ranks import ranks_text

_REQUEST = 0  # tag; each request says which tag its answer has
_HEAD = struct.Struct('=q')  # of a request: that tag; of an answer: whether it was refused

# Seconds. Who waits looks for messages without a break for a while, then often, then at times: a
# thread that has nothing to do takes 3 % of a core.
_WITHOUT_BREAK = 2e-4
_OFTEN = 2e-2
_SHORT_BREAK = 5e-5
_LONG_BREAK = 1e-3

#: A message: any number of C-ordered buffers, which travel as one.
Buffers = Sequence[Any]


class Service:
    """Answers the requests of other ranks, and asks them.  Collective: every rank makes one.

    Args:
        mpi_comm: A duplicate of the communicator that nothing else uses; it is freed at the end.
        answer: Called as ``answer(source, request)`` with a flat uint8 array; returns the buffers
            of the answer.  It runs in the thread of this service, or, for what this rank asks
            itself, in the thread that asks.  What it raises is raised by the rank that asks.  It
            must not ask: two ranks could wait for each other's answers.
    """

    def __init__(self, mpi_comm: Any, answer: Callable[[int, Any], Buffers]) -> None:
        self._mpi_comm = mpi_comm
        self._calls = ServiceCalls(mpi_comm)
        self._rank = mpi_comm.rank
        self._answer = answer
        tags = min(largest_tag(), 2**20)
        self._tags = itertools.cycle(range(_REQUEST + 1, tags))
        self._closed = threading.Event()
        self._answering = threading.local()
        self._thread = threading.Thread(target=self._serve, name='chainermn service', daemon=True)
        shutdown.before_the_end(self._finish)
        unusable.know(self)
        self._thread.start()

    def ask(self, requests: Mapping[int, Buffers]) -> dict[int, Any]:
        """Asks some ranks at once, and waits for their answers; any thread may ask.

        Args:
            requests: The buffers of each request, by the rank that is asked.

        Returns:
            The answers as flat uint8 arrays, by the rank that answered.

        Raises:
            ValueError: If the service is closed on this rank.
            RuntimeError: If it is called by ``answer``.
            Exception: What ``answer`` raised on another rank, or the first of that.
        """
        if hasattr(self._answering, 'source'):
            raise RuntimeError('what answers requests, such as the updater of a KVStore, must not '
                               'make requests itself: two ranks could wait for each other')
        if self._closed.is_set():
            raise ValueError('this store was closed on this rank, and other ranks may have ended')
        tag = next(self._tags)
        self._calls.count += 1
        self._calls.keep(f'ask {ranks_text(sorted(requests))}')
        messages = {rank: _joined(_HEAD.pack(tag), request) for rank, request in requests.items()
                    if rank != self._rank}
        sent = [self._mpi_comm.Isend(message, rank, _REQUEST) for rank, message in messages.items()]
        answers = {}
        if self._rank in requests:
            answers[self._rank] = self._checked_answer(
                self._rank, _joined(b'', requests[self._rank]))
        # In the order in which they come. In an order of its own, this rank could wait for one that
        # waits for its answer to another to be received, and so on in a circle.
        for _ in messages:
            rank, answer = self._receive(tag)
            answers[rank] = answer
        MPI.Request.Waitall(sent)
        for rank in sorted(answers):
            if _HEAD.unpack_from(answers[rank])[0]:
                refusal = pickle.loads(answers[rank][_HEAD.size:])
                raise refusal.error(refusal.text if rank == self._rank else
                                    f'{refusal.text}\n  (raised on rank {rank})')
        return {rank: answer[_HEAD.size:] for rank, answer in answers.items()}

    def recent_calls(self) -> tuple[Calls, ...]:
        """Where it is kept whom this rank has asked."""
        return self._calls,

    def give_up(self, unusable: Any) -> None:
        """Makes :meth:`ask` raise from now on."""
        self._answering = unusable

    def close(self) -> None:
        """Says that this rank asks nothing any more.  Every rank calls it, when it likes.

        Returns at once.  This rank goes on answering until all ranks have called it, which the
        end of the program does too.
        """
        self._closed.set()

    def _finish(self) -> None:
        self.close()
        self._thread.join()

    def _receive(self, tag: int) -> tuple[int, Any]:
        status = MPI.Status()
        start = time.perf_counter()
        while (message := self._mpi_comm.Improbe(MPI.ANY_SOURCE, tag, status)) is None:
            _have_a_break(start)
        return _received(message, status)

    def _serve(self) -> None:
        """Runs in the thread."""
        status = MPI.Status()
        all_closed: MPI.Request | None = None
        last = time.perf_counter()
        while True:
            message = self._mpi_comm.Improbe(MPI.ANY_SOURCE, _REQUEST, status)
            if message is not None:
                source, request = _received(message, status)
                tag, = _HEAD.unpack_from(request)
                self._mpi_comm.Send(
                    self._checked_answer(source, request[_HEAD.size:]), source, tag)
                last = time.perf_counter()
                continue
            if self._closed.is_set() and all_closed is None:
                all_closed = self._mpi_comm.Ibarrier()
            if all_closed is not None and all_closed.Test():
                break  # nobody asks any more, and each question has been answered
            _have_a_break(last)
        self._mpi_comm.Free()
        shutdown.not_before_the_end(self._finish)

    def _checked_answer(self, source: int, request: Any) -> Any:
        """The answer as it travels, or the refusal if ``answer`` raises."""
        self._answering.source = source
        try:
            return _joined(_HEAD.pack(0), self._answer(source, request))
        except Exception as error:
            return _refused(error)
        except BaseException as error:
            if threading.current_thread() is not self._thread:
                raise  # it is of the rank itself, such as an interrupt
            # An exit of the thread would leave who asks without an answer.
            return _refused(RuntimeError(f'{type(error).__name__}: {error}'))
        finally:
            del self._answering.source


def check_service(answer: Any) -> None:
    """Raises if there can be no such service."""
    if not callable(answer):
        raise TypeError(f'what answers requests has to be a function, not {answer!r}')
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise RuntimeError(
            'answering requests in a thread needs MPI_THREAD_MULTIPLE, which this MPI library does '
            'not give, or was not asked for: leave mpi4py.rc.threads and mpi4py.rc.thread_level '
            'as they are by default')


def _received(message: MPI.Message, status: MPI.Status) -> tuple[int, Any]:
    source = status.Get_source()
    received = np.empty(status.Get_count(), np.uint8)
    message.Recv(received)
    return source, received


def _refused(error: Exception) -> Any:
    return _joined(_HEAD.pack(1), [pickle.dumps(Refusal.of('', error))])


def _joined(head: bytes, buffers: Buffers) -> Any:
    return np.frombuffer(b''.join([head, *buffers]), np.uint8)


def _have_a_break(since: float) -> None:
    waited = time.perf_counter() - since
    time.sleep(0 if waited < _WITHOUT_BREAK else
               _SHORT_BREAK if waited < _OFTEN else _LONG_BREAK)


thread_state.know([Service.ask])
