"""Means over all ranks of one list of arrays after another, while the caller goes on.

A thread of each rank takes the lists in the order in which they were put, on a communicator of its
own, so that the caller's collectives are not confused with its.  Before each list the ranks wait
for one another without using a core, as one of them may still be computing, and make sure that all
have put the like.
"""
from __future__ import annotations

import contextlib
import queue
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import chainer
import numpy as np
from mpi4py import MPI

from chainermn import _signature
from chainermn._diagnostics import shutdown, thread_state, unusable
from chainermn._diagnostics.flight_recorder import BackgroundCalls, Calls
from chainermn._tracing import recorder
from chainermn._transport import array_buffers

_NAP = 1e-4  # seconds between two looks at whether all ranks have got so far
_LOOKS = 4  # at a time: an exchange that needs nothing else may need one for each of its steps
_KEPT = 4  # calls of wait() for which memory that is not used is kept

#: What computes the means of arrays by path, with a compressor or ``None``, into results.
Means = Callable[[dict[str, Any], Any, list[Any]], None]


class _Turn(NamedTuple):
    request: Any  # complete once all ranks have put it
    said: Any  # by all ranks then: the greatest digest, and the least one with its sign changed

    @property
    def differs(self) -> bool:
        return bool(self.said[0] != -self.said[1])


class MeanQueue:
    """Made by :meth:`CommunicatorBase.mean_queue`, which says how it is used.

    Args:
        mpi_comm: The ranks; its messages are for this object alone.
        agree: Gives the gradients of a model by path, once all ranks are known to have the like.
        check: Checks the mean gradients of a model.
        means: Computes means, on messages of its own.
        patient: Called with whether the caller is computing; then waiting must not use a core.
        can_hide: Whether exchanging does not take from all ranks what they compute with.
    """

    def __init__(self, mpi_comm: Any, agree: Callable[..., dict[str, Any]],
                 check: Callable[[Any], None], means: Means,
                 patient: Callable[[bool], None], can_hide: bool) -> None:
        self._control = mpi_comm
        self._calls = BackgroundCalls(mpi_comm)
        self._turns = mpi_comm.Dup()  # for the thread
        self._means = means
        self.agree = agree
        self.can_hide = can_hide
        self.check = check
        self._patient = patient
        self._number = 0  # of the next list
        self._limit = sys.maxsize  # lists from this number on are not exchanged any more
        self._hurry = False  # whether the caller waits
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._travelling = 0
        self._buffers: dict[Any, tuple[Any, int]] = {}  # and when they were used
        self._n_waits = 0
        self._has_thread = MPI.Query_thread() >= MPI.THREAD_MULTIPLE
        if not self._has_thread:
            warnings.warn('the MPI library was not started with MPI_THREAD_MULTIPLE, so nothing '
                          'can be exchanged in the background: it is exchanged when it is waited '
                          'for', RuntimeWarning, stacklevel=3)
        self._thread: threading.Thread | None = None
        shutdown.before_the_end(self._finish)
        unusable.know(self)

    def put(self, arrays: dict[str, Any], compressor: Any = None) -> list[Any]:
        """Lets the means of arrays be computed, after those that were put before.

        Args:
            arrays: By path, at least one; they must not be written to before :meth:`wait`.
            compressor: Through which they go, or ``None``.

        Returns:
            For each of them an array that :meth:`wait` fills.
        """
        results = self._results(arrays)
        number, self._number = self._number, self._number + 1
        self._calls.exchanges = self._number
        turn = self._turn(_signature.digest((
            compressor is not None, '\n'.join(arrays), [x.dtype.num for x in arrays.values()],
            [x.size for x in arrays.values()])))
        on_device = _computed_on(arrays.values())

        def job() -> None:
            with recorder.span('wait', 'wait'):
                while not any(turn.request.Test() for _ in range(_LOOKS)):
                    time.sleep(0 if self._hurry else _NAP)
            if number < self._limit:
                if turn.differs:
                    raise ValueError(
                        'the ranks have put arrays of other paths, dtypes or sizes, or in another '
                        'order, or only some of them with a compressor; put the like on all ranks')
                with recorder.span('means', 'verb', arrays.values()), on_device():
                    self._means(arrays, compressor, results)

        self._travelling += 1
        self._jobs.put(job)
        if self._has_thread and self._thread is None:
            self._thread = threading.Thread(target=self._run, name='chainermn mean queue',
                                            daemon=True)
            self._thread.start()
        return results

    def wait(self) -> None:
        """Returns once all that was put is exchanged.

        Raises:
            Exception: What went wrong in the first list that failed.
        """
        first: BaseException | None = None
        self._calls.count += 1
        self._calls.keep('wait for means in the background')
        self._hurry = True
        self._patient(False)
        try:
            while self._travelling:
                if not self._has_thread:
                    self._work()
                ended = self._ended.get()
                self._travelling -= 1
                first = first or ended
        finally:
            self._patient(True)
            self._hurry = False
            self._n_waits += 1
            self._buffers = {key: (buffer, used) for key, (buffer, used) in self._buffers.items()
                             if used > self._n_waits - _KEPT}
        if first is not None:
            raise first

    @property
    def pending(self) -> bool:
        """Whether something was put for which nobody has waited yet."""
        return self._travelling > 0

    def recent_calls(self) -> tuple[Calls, ...]:
        """Where it is kept that the caller waits."""
        return self._calls,

    def cancel(self) -> None:
        """Forgets what was put, as after an error.  Collective: every rank calls it.

        The ranks need not have put the same number of lists.
        """
        least, most = self._last_numbers()
        turns = []
        if least < most:
            self._limit = least
            self._control.Barrier()  # all know the limit
            turns = [self._turn(0) for _ in range(self._number, most)]
        with contextlib.suppress(Exception):  # nobody wants to know any more
            self.wait()
        MPI.Request.Waitall([turn.request for turn in turns])
        self._number, self._limit = most, sys.maxsize
        self._calls.exchanges = self._number

    def give_up(self, unusable: Any) -> None:
        """Makes whatever is called from now on raise."""
        self._control = self._turns = self._calls = unusable

    def free(self) -> None:
        """Frees what this object holds.  Collective: every rank calls it, once."""
        self.cancel()
        shutdown.not_before_the_end(self._finish)
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
        self._turns.Free()
        self._control.Free()

    def _finish(self) -> None:
        """At the end of the program: MPI must not be left while a thread uses it."""
        self.cancel()

    def _turn(self, digest: int) -> _Turn:
        """Says that this rank has put what has that digest."""
        said = np.array([digest, -digest])
        return _Turn(self._turns.Iallreduce(MPI.IN_PLACE, said, MPI.MAX), said)

    def _last_numbers(self) -> tuple[int, int]:
        """The least and the greatest number of lists that a rank has put."""
        numbers = np.array([-self._number, self._number])
        self._control.Allreduce(MPI.IN_PLACE, numbers, MPI.MAX)
        return -int(numbers[0]), int(numbers[1])

    def _run(self) -> None:
        while self._work():
            pass

    def _work(self) -> bool:
        """Takes one list; returns whether there are more to come."""
        job = self._jobs.get()
        if job is None:
            return False
        try:
            job()
        except BaseException as error:
            self._ended.put(error)
        else:
            self._ended.put(None)
        return True

    def _results(self, arrays: dict[str, Any]) -> list[Any]:
        """Arrays like those, in the memory of last time unless somebody still has some of it."""
        members: dict[Any, list[int]] = {}
        xs = list(arrays.values())
        for i, x in enumerate(xs):
            members.setdefault((x.dtype, array_buffers.on_device(x)), []).append(i)
        results: list[Any] = [None] * len(xs)
        for (dtype, device), indices in members.items():
            size = sum(xs[i].size for i in indices)
            key = next(iter(arrays)), dtype, size
            buffer = None if device else self._buffers.pop(key, (None, 0))[0]
            if buffer is None or sys.getrefcount(buffer) > 2:  # here, and of getrefcount itself
                buffer = chainer.backend.get_array_module(xs[indices[0]]).empty(size, dtype)
            start = 0
            for i in indices:
                results[i] = buffer[start:start + xs[i].size].reshape(xs[i].shape)
                start += xs[i].size
            if not device:
                self._buffers[key] = buffer, self._n_waits
        return results


def _computed_on(arrays: Iterable[Any]) -> Callable[[], AbstractContextManager[Any]]:
    """What the thread enters to use arrays: their device, once they are computed there."""
    device = next((x.device for x in arrays if array_buffers.on_device(x)), None)
    if device is None:
        return contextlib.nullcontext
    import cupy

    computed = cupy.cuda.get_current_stream().record(cupy.cuda.Event(disable_timing=True))

    @contextlib.contextmanager
    def entered() -> Iterator[None]:
        with device:
            computed.synchronize()
            yield
            cupy.cuda.get_current_stream().synchronize()

    return entered


thread_state.know([MeanQueue.wait])
