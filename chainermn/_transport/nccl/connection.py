"""An NCCL communicator for the ranks of an MPI communicator, connected on first use."""
from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import TypeVar, cast

import numpy as np

from chainermn import nccl
from chainermn._consistency import mismatch
from chainermn._diagnostics import devices
from chainermn._diagnostics.flight_recorder import FlightRecord
from chainermn._operations import common_error
from chainermn._process import runtime
from chainermn._process.mpi import MPI
from chainermn._process.running_time import RunningClock
from chainermn._transport import array_buffers
from chainermn._types import Device, DeviceArray, DeviceEvent, NcclComm

_Result = TypeVar('_Result')

_TYPES = ('int8', 'int32', 'int64', 'uint8', 'uint32', 'uint64', 'float16', 'float32', 'float64')

#: The return values of ``cudaEventQuery``.
_SUCCESS, _NOT_READY = 0, 600


class NcclGroup:
    """NCCL collectives for flat device arrays.

    The operations are collective and run on the current stream.

    Args:
        mpi_comm: The communicator. Nothing else may use it while it connects.
        all_ranks: A larger communicator whose ranks connect at the same time. If a rank cannot
            connect, all of them raise the same error.
        record: The flight record of the communicator, with its time limit.
    """

    def __init__(self, mpi_comm: MPI.Comm, all_ranks: MPI.Comm | None = None,
                 record: FlightRecord | None = None) -> None:
        self._mpi_comm = mpi_comm
        self._record = None if record is None else weakref.ref(record)
        self._all_ranks = mpi_comm if all_ranks is None else all_ranks
        self.nccl_comm: NcclComm = None
        self._newest: tuple[DeviceEvent, float, str] | None = None
        self._lock = threading.Lock()  # against queries and aborts during destroy()
        #: The device number; ``None`` if not connected.
        self.device_id: int | None = None

    def connect(self) -> None:
        """Connect the current devices of the ranks, unless they are already connected."""
        if self.nccl_comm is not None:
            return
        _set_options()
        unique_id = together(self._all_ranks, 'connecting by NCCL', lambda: (
            nccl.get_unique_id() if self._mpi_comm.rank == 0 else None))
        unique_id = self._mpi_comm.bcast(unique_id)
        self.nccl_comm = together(self._all_ranks, 'connecting by NCCL',
                                  lambda: self._connected(unique_id))
        self.device_id = _device().id
        devices.add(self)

    def _connected(self, unique_id: object) -> NcclComm:
        try:
            return nccl.NcclCommunicator(self._mpi_comm.size, unique_id, self._mpi_comm.rank)
        except nccl.NcclError as error:
            raise RuntimeError(
                f'{error} on GPU {_device().pci_bus_id} of {MPI.Get_processor_name()}. Use one '
                "GPU per rank: call chainer.get_device(f'@cupy:{comm.intra_rank}').use() before "
                'moving the model to the GPU. Set NCCL_DEBUG=INFO for details.') from error

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._mpi_comm.size

    @staticmethod
    def combines(dtype: np.dtype) -> bool:
        """Return whether NCCL can reduce arrays of a dtype."""
        return str(dtype) in _TYPES

    def all_reduce(self, buffer: DeviceArray, op: str = 'sum', dtype: np.dtype | str | None = None
                   ) -> None:
        """Replace a flat array, interpreted as ``dtype``, with the reduction over all ranks."""
        if buffer.size:
            self.nccl_comm.allReduce(buffer.data.ptr, buffer.data.ptr, buffer.size,
                                     type_id(buffer.dtype if dtype is None else dtype), _op(op),
                                     _stream())
            self._began('all-reduce', buffer)

    def reduce(self, buffer: DeviceArray, op: str = 'sum', root: int = 0) -> None:
        """Replace a flat array on the root with the reduction over all ranks."""
        if buffer.size:
            self.nccl_comm.reduce(buffer.data.ptr, buffer.data.ptr, buffer.size,
                                  type_id(buffer.dtype), _op(op), root, _stream())
            self._began('reduce', buffer)

    def reduce_scatter(self, x: DeviceArray, y: DeviceArray, op: str = 'sum') -> None:
        """Reduce flat arrays; store the part for this rank in ``y``."""
        if y.size:
            self.nccl_comm.reduceScatter(x.data.ptr, y.data.ptr, y.size, type_id(x.dtype),
                                         _op(op), _stream())
            self._began('reduce-scatter', x)

    def all_gather(self, x: DeviceArray, y: DeviceArray) -> None:
        """Collect flat arrays of any dtype and the same length in ``y``, by rank."""
        if x.size:
            self.nccl_comm.allGather(x.data.ptr, y.data.ptr, x.nbytes, nccl.NCCL_UINT8, _stream())
            self._began('all-gather', x)

    def bcast(self, buffer: DeviceArray, root: int = 0) -> None:
        """Broadcast a flat array of any dtype from the root."""
        if buffer.size:
            self.nccl_comm.bcast(buffer.data.ptr, buffer.nbytes, nccl.NCCL_UINT8, root, _stream())
            self._began('broadcast', buffer)

    def exchange(self, xs: dict[int, DeviceArray], ys: dict[int, DeviceArray]) -> None:
        """Send and receive flat arrays of any dtype, by rank, in one NCCL group call."""
        moving = [x for x in (*xs.values(), *ys.values()) if x.size]
        if not moving:
            return
        nccl.groupStart()
        try:
            for arrays, move in (xs, self.nccl_comm.send), (ys, self.nccl_comm.recv):
                for rank, x in arrays.items():
                    if x.size:
                        move(x.data.ptr, x.nbytes, nccl.NCCL_UINT8, rank, _stream())
        finally:
            nccl.groupEnd()
        self._began('exchange', moving[0])

    def destroy(self) -> None:
        """Destroy the NCCL communicator after the work on the device has finished."""
        if self.nccl_comm is None:
            return
        import cupy

        with cupy.cuda.Device(self.device_id) as device:
            device.synchronize()  # the watchdog still detects a hang here
            devices.remove(self)
            with self._lock:
                nccl_comm, self.nccl_comm = self.nccl_comm, None
                nccl_comm.destroy()
        self._newest = self.device_id = None

    # --- for the watchdog ----------------------------------------------------------------------

    def _began(self, operation: str, buffer: DeviceArray) -> None:
        text = f'{operation} of {buffer.size} {buffer.dtype} by NCCL on GPU {self.device_id}'
        self._newest = array_buffers.event(), runtime.get(RunningClock).peek(), text

    @property
    def timeout(self) -> float | None:
        """The time limit of the communicator, or ``None`` for the default."""
        record = None if self._record is None else self._record()
        return None if record is None else record.timeout

    def running(self) -> tuple[float, str]:
        """Return how many seconds the newest operation has been running, and its description."""
        newest = self._newest
        if newest is None:
            return 0., ''
        done, since, text = newest
        is_running = self._query(lambda: _status(done) == _NOT_READY, False)
        return (runtime.get(RunningClock).peek() - since if is_running else 0.), text

    def error(self) -> str:
        """Return the error of the device or of NCCL, or ''."""
        return self._query(self._error, '')

    def abort(self) -> None:
        """Abort the operations in flight."""
        with self._lock:
            if self.nccl_comm is not None:
                with array_buffers.device_in_thread(self.device_id):
                    self.nccl_comm.abort()

    def _query(self, query: Callable[[], _Result], otherwise: _Result) -> _Result:
        """Run a query on the device of this group, unless the group is being destroyed."""
        if not self._lock.acquire(blocking=False):
            return otherwise
        try:
            if self.nccl_comm is None:
                return otherwise
            with array_buffers.device_in_thread(self.device_id):
                return query()
        finally:
            self._lock.release()

    def _error(self) -> str:
        import cupy

        status = _SUCCESS if self._newest is None else _status(self._newest[0])
        if status not in (_SUCCESS, _NOT_READY):
            return f'GPU {self.device_id}: {cupy.cuda.runtime.CUDARuntimeError(status)}'
        try:
            if hasattr(self.nccl_comm, 'check_async_error'):
                self.nccl_comm.check_async_error()
        except nccl.NcclError as error:
            return str(error)
        return ''


def _status(event: DeviceEvent) -> int:
    """Return the CUDA status of an event. ``Event.done`` treats any error as not done."""
    import cupy

    return cupy.cuda.runtime.eventQuery(event.ptr)


def together(mpi_comm: MPI.Comm, what: str, call: Callable[[], _Result]) -> _Result:
    """Return ``call()``; if it fails on a rank, all ranks raise the same error.

    Collective: every rank calls it.
    """
    failure = None
    try:
        result = call()
    except Exception as error:
        failure = mismatch.RemoteError.of(what, error)
    failures = mpi_comm.allgather(failure)
    if any(failures):
        common = mismatch.remote_error([what] * len(failures), failures)
        common_error.mark_failure(common, mpi_comm.rank, failures)
        raise common
    return result


def _set_options() -> None:
    """Set environment variables of NCCL, unless the user has set them."""
    # Start operations of several groups in program order on all ranks. Otherwise, two GPUs could
    # each run an operation that the other cannot start for lack of resources.
    os.environ.setdefault('NCCL_LAUNCH_ORDER_IMPLICIT', '1')
    if 'NCCL_RUNTIME_CONNECT' not in os.environ:
        # Since NCCL 2.22, the first collective that uses an algorithm blocks the host until all
        # ranks call it. A rank that has begun more operations than the others could then not notify
        # them; see NcclMeanQueue.cancel.
        os.environ['NCCL_RUNTIME_CONNECT'] = '0'
        # Before NCCL 2.32.3, connecting PAT in advance hangs if nodes have different numbers of
        # ranks (NCCL issue 2385).
        os.environ.setdefault('NCCL_PAT_ENABLE', '0')


def type_id(dtype: np.dtype | str) -> int:
    """Return NCCL's number for a dtype or the name of a dtype."""
    if str(dtype) not in (*_TYPES, 'bfloat16'):
        raise ValueError(f'NCCL can only reduce arrays of dtype {", ".join(_TYPES)}, not {dtype}')
    return cast(int, getattr(nccl, f'NCCL_{str(dtype).upper()}'))


def _op(op: str) -> int:
    return cast(int, getattr(nccl, f'NCCL_{op.upper()}'))


def _device() -> Device:
    import cupy

    return cupy.cuda.Device()


def _stream() -> int:
    import cupy

    return cupy.cuda.get_current_stream().ptr
