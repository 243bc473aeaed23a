"""Averages gradients in the background, one list after another, while the caller computes.

A thread in each rank processes the lists in the order of submission, on a separate communicator.
Before it processes a list, it waits passively until all ranks have submitted theirs and checks that
the lists match.
"""
from __future__ import annotations

import contextlib
import queue
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import NamedTuple

import chainer
import numpy as np

from chainermn._diagnostics import lifecycle, unusable
from chainermn._diagnostics.flight_recorder import BackgroundRecord, FlightRecord
from chainermn._diagnostics.unusable import Unusable
from chainermn._gradients.codec import NewCodec, average
from chainermn._gradients.compressors import Compression
from chainermn._gradients.parameters import ParameterList
from chainermn._gradients.power_sgd import PowerSGD
from chainermn._gradients.result_memory import ResultMemory
from chainermn._operations import call_signature
from chainermn._operations.call import entered
from chainermn._process.mpi import MPI
from chainermn._timeline import recorder
from chainermn._transport import array_buffers, packing
from chainermn._transport.array_list import ArrayList, map_groups
from chainermn._transport.base import Compressor
from chainermn._transport.mpi_transport import MpiTransport
from chainermn._types import Array, Device, Model

_POLL_INTERVAL = 1e-4  # seconds between polls for the other ranks
_POLLS = 4  # per interval: a nonblocking all-reduce may need one poll for each of its steps

#: Compares the gradients of a model between ranks: ``(model, zero_fill, compression, notify)``.
#: Returns them by path, and whether any rank passed ``notify=True``.
Gradients = Callable[[Model, bool, Compression, bool], tuple[dict[str, Array], bool]]


class _Submission(NamedTuple):
    """The submission of a list by all ranks."""

    request: MPI.Request  # complete when all ranks have submitted the list
    digests: np.ndarray  # once complete: the largest digest, and minus the smallest digest

    @property
    def differs(self) -> bool:
        return bool(self.digests[0] != -self.digests[1])


class MeanQueue:
    """The queue that :meth:`CommunicatorBase.mean_queue` returns; see that method for its use.

    Args:
        mpi_comm: A communicator that nothing else uses.
        gradients: Function that compares the gradients of a model between ranks.
        check: Function that checks the mean gradients of a model in debug mode.
        transport: The transport that averages, on a separate communicator. Only this object uses
            it.
        new_codec: Function that creates the codec of an all-reduce. Like all other arguments, it
            must not refer to the communicator of the queue; otherwise, the communicator would never
            be freed.
        is_profitable: Whether ranks can compute during an all-reduce, because it uses a network or
            a core that no rank needs.
        record: The flight record of the background communicator, with its timeout.
    """

    def __init__(self, mpi_comm: MPI.Intracomm, gradients: Gradients,
                 check: Callable[[Model], None], transport: MpiTransport, new_codec: NewCodec,
                 is_profitable: bool, record: FlightRecord) -> None:
        self._control = mpi_comm
        self._record = BackgroundRecord(mpi_comm, record)
        self._submissions = mpi_comm.Dup()  # announces submissions; also used by the thread
        self._transport = transport
        self._new_codec = new_codec
        self.gradients = gradients
        self.is_profitable = is_profitable
        self.check = check
        self._number = 0  # number of the next list
        self._limit = sys.maxsize  # lists from this number on are cancelled
        self._urgent = False  # whether the caller is waiting
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._finished: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._in_flight = 0
        self._memory = ResultMemory()
        self._has_thread = MPI.Query_thread() >= MPI.THREAD_MULTIPLE
        if not self._has_thread:
            warnings.warn('the MPI library was not started with MPI_THREAD_MULTIPLE, so '
                          'gradients are averaged while wait() blocks, not in the background. '
                          'Leave mpi4py.rc.threads and mpi4py.rc.thread_level at their defaults.',
                          RuntimeWarning, stacklevel=3)
        self._thread: threading.Thread | None = None
        lifecycle.add_callback(self.cancel)  # MPI must not be finalized while a thread uses it
        unusable.register(self)

    def submit(self, gradients: dict[str, Array], compressor: Compressor | PowerSGD | None = None,
               scale: float | None = None) -> list[Array]:
        """Start averaging gradients, after all earlier submissions.

        Args:
            gradients: The gradients by path, at least one. They must not change before
                :meth:`wait`.
            compressor: The compressor that encodes the gradients, or ``None``.
            scale: The loss scale of the gradients.

        Returns:
            One array per gradient, which contains its mean after :meth:`wait`.
        """
        arrays = ParameterList.named(gradients)
        results = self._results(arrays)
        number, self._number = self._number, self._number + 1
        self._record.exchanges = self._number
        submission = self._announce(call_signature.digest((
            compressor is not None, '\n'.join(arrays.paths), [x.dtype.num for x in arrays],
            [x.size for x in arrays])))
        on_device = _computed_on(arrays)

        def average_list() -> None:
            if submission.differs:
                raise ValueError(
                    'Collective mismatch in the background: ranks submitted gradients with '
                    'different paths, dtypes or sizes, or in different orders, or only some ranks '
                    'used a compressor. Submit the same gradients on all ranks.')
            with recorder.span('means', 'operation', arrays):
                if compressor is None:
                    self._transport.mean(arrays, results)
                else:
                    average(self._transport, arrays, results, compressor, self._new_codec,
                            scale)

        def job() -> None:
            with recorder.span('wait', 'wait'):
                while not any(submission.request.Test() for _ in range(_POLLS)):
                    time.sleep(0 if self._urgent else _POLL_INTERVAL)
            # Select the device even for a discarded list, so that the list is freed on that device.
            with on_device():
                if number < self._limit:
                    average_list()

        self._in_flight += 1
        self._jobs.put(job)
        if self._has_thread and self._thread is None:
            self._thread = threading.Thread(target=self._run, name='chainermn mean queue',
                                            daemon=True)
            self._thread.start()
        return results

    @entered('wait')
    def wait(self) -> None:
        """Wait until all submitted gradients are averaged.

        Raises:
            Exception: The error of the first list that failed.
        """
        with recorder.span('wait for means', 'operation'):
            self._wait()

    def _wait(self) -> None:
        first: BaseException | None = None
        self._record.add(operation='wait').words = 'for means in the background'
        self._urgent = True
        self._transport.set_passive_wait(False)
        try:
            while self._in_flight:
                if not self._has_thread:
                    self._work()
                ended = self._finished.get()
                self._in_flight -= 1
                first = first or ended
        finally:
            self._transport.set_passive_wait(True)
            self._urgent = False
            self._memory.end_round()
        if first is not None:
            raise first

    @property
    def pending(self) -> bool:
        """Whether gradients are in flight."""
        return self._in_flight > 0

    def _flight_records(self) -> tuple[FlightRecord, ...]:
        """Return the flight record of :meth:`wait`."""
        return self._record,

    def cancel(self) -> None:
        """Discard all submitted gradients, as after an error. Collective: every rank calls it.

        The ranks may have submitted different numbers of lists.
        """
        least, most = self._last_numbers()
        submissions = []
        if least < most:
            self._limit = least
            self._control.Barrier()  # from here on, all ranks know the limit
            submissions = [self._announce(0) for _ in range(self._number, most)]
        with contextlib.suppress(Exception):  # discarded lists may raise errors
            self.wait()
        MPI.Request.Waitall([submission.request for submission in submissions])
        self._number, self._limit = most, sys.maxsize
        self._record.exchanges = self._number

    def _make_unusable(self, unusable: Unusable) -> None:
        """Make every later operation raise an error."""
        for name in ('_control', '_submissions', '_record'):
            setattr(self, name, unusable)

    def free(self) -> None:
        """Free the resources of this queue. Collective: every rank calls it, once."""
        self.cancel()
        lifecycle.remove_callback(self.cancel)
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
        self._submissions.Free()
        self._control.Free()
        self._make_unusable(Unusable(unusable.FREED_QUEUE))

    def _announce(self, digest: int) -> _Submission:
        """Notify the other ranks that this rank has submitted a list with the given digest."""
        digests = np.array([digest, -digest])
        request = self._submissions.Iallreduce(MPI.IN_PLACE, digests, MPI.MAX)
        return _Submission(request, digests)

    def _last_numbers(self) -> tuple[int, int]:
        """Return the smallest and the largest number of lists that a rank has submitted."""
        numbers = np.array([-self._number, self._number])
        self._control.Allreduce(MPI.IN_PLACE, numbers, MPI.MAX)
        return -int(numbers[0]), int(numbers[1])

    def _run(self) -> None:
        while self._work():
            pass

    def _work(self) -> bool:
        """Process one list; return whether more lists may follow."""
        job = self._jobs.get()
        if job is None:
            return False
        try:
            job()
        except BaseException as error:
            self._finished.put(error)
        else:
            self._finished.put(None)
        return True

    def _results(self, arrays: ParameterList) -> list[Array]:
        """Return new arrays for the means, with one buffer for each dtype."""
        def new(group: ArrayList) -> list[Array]:
            dtype, size = group[0].dtype, sum(x.size for x in group)
            if group.on_device:
                buffer = chainer.backend.get_array_module(group[0]).empty(size, dtype)
            else:
                buffer = self._memory.new(arrays.paths[0], dtype, size)
            return packing.parts(buffer, group.shapes)

        return map_groups(arrays, new)


def _computed_on(arrays: ParameterList) -> Callable[[], AbstractContextManager[None]]:
    """Return a context for the thread that selects the arrays' device and waits for them."""
    if arrays.on_host:
        return contextlib.nullcontext
    device: Device = next(x.device for x in arrays if array_buffers.on_device(x))
    import cupy

    computed = array_buffers.event()

    @contextlib.contextmanager
    def entered() -> Iterator[None]:
        with array_buffers.device_in_thread(device.id):
            computed.synchronize()
            yield
            cupy.cuda.get_current_stream().synchronize()

    return entered
