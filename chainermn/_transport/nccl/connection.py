"""NCCL among the ranks of an MPI communicator, connected when it is first needed."""
from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

from mpi4py import MPI

from chainermn import nccl
from chainermn._consistency import mismatch
from chainermn._diagnostics import watchdog
from chainermn._diagnostics.flight_recorder import Calls

_TYPES = ('int8', 'int32', 'int64', 'uint8', 'uint32', 'uint64', 'float16', 'float32', 'float64')

#: What ``cudaEventQuery`` returns.
_SUCCESS, _NOT_READY = 0, 600


class NcclGroup:
    """Combines and moves flat device arrays over the ranks of an MPI communicator.

    All methods but ``destroy`` are collective, and run on the current stream.

    Args:
        mpi_comm: The ranks.  Nothing else may use its messages meanwhile.
        witnesses: A communicator of more ranks, which connect at the same time; all of them raise
            the same error if some rank cannot connect.
        calls: Those of the communicator whose time limit holds.
    """

    def __init__(self, mpi_comm: Any, witnesses: Any = None, calls: Calls | None = None) -> None:
        self._mpi_comm = mpi_comm
        self._calls = calls
        self._witnesses = mpi_comm if witnesses is None else witnesses
        self.nccl_comm: Any = None
        self._newest: tuple[Any, float, str] | None = None
        self._lock = threading.Lock()  # so that nobody asks or aborts what is being destroyed
        #: Number of the device it runs on; ``None`` before it is connected.
        self.device_id: int | None = None

    def connect(self) -> None:
        """Connects the current devices of the ranks, unless they are."""
        if self.nccl_comm is not None:
            return
        # What several groups have in flight starts in the order of the program, on all ranks; else
        # two GPUs could each have room for what the other one waits for.
        os.environ.setdefault('NCCL_LAUNCH_ORDER_IMPLICIT', '1')
        unique_id = together(self._witnesses, 'connecting by NCCL', lambda: (
            nccl.get_unique_id() if self._mpi_comm.rank == 0 else None))
        unique_id = self._mpi_comm.bcast(unique_id)
        self.nccl_comm = together(self._witnesses, 'connecting by NCCL',
                                  lambda: self._connected(unique_id))
        self.device_id = _device().id
        watchdog.add_device(self)

    def _connected(self, unique_id: Any) -> Any:
        try:
            return nccl.NcclCommunicator(self._mpi_comm.size, unique_id, self._mpi_comm.rank)
        except nccl.NcclError as error:
            raise RuntimeError(
                f'{error} on GPU {_device().pci_bus_id} of {MPI.Get_processor_name()}.  Each rank '
                'needs a GPU of its own: before its model goes there, let it call '
                'chainer.backends.cuda.get_device_from_id(comm.intra_rank).use().  '
                'NCCL_DEBUG=INFO in the environment tells more') from error

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._mpi_comm.size

    @staticmethod
    def combines(dtype: Any) -> bool:
        """Whether NCCL combines arrays of a dtype."""
        return str(dtype) in _TYPES

    def all_reduce(self, buffer: Any, op: str = 'sum', dtype: Any = None) -> None:
        """Replaces a flat array by what those of all ranks combine to, as if of that dtype."""
        if buffer.size:
            self.nccl_comm.allReduce(buffer.data.ptr, buffer.data.ptr, buffer.size,
                                     type_id(buffer.dtype if dtype is None else dtype), _op(op),
                                     _stream())
            self._began('all-reduce', buffer)

    def reduce(self, buffer: Any, op: str = 'sum', root: int = 0) -> None:
        """Replaces a flat array on the root by what those of all ranks combine to."""
        if buffer.size:
            self.nccl_comm.reduce(buffer.data.ptr, buffer.data.ptr, buffer.size,
                                  type_id(buffer.dtype), _op(op), root, _stream())
            self._began('reduce', buffer)

    def reduce_scatter(self, x: Any, y: Any, op: str = 'sum') -> None:
        """Combines flat arrays; ``y`` gets the piece with the number of this rank."""
        if y.size:
            self.nccl_comm.reduceScatter(x.data.ptr, y.data.ptr, y.size, type_id(x.dtype),
                                         _op(op), _stream())
            self._began('reduce-scatter', x)

    def all_gather(self, x: Any, y: Any) -> None:
        """Puts flat arrays of any dtype and equal lengths into ``y``, by rank."""
        if x.size:
            self.nccl_comm.allGather(x.data.ptr, y.data.ptr, x.nbytes, nccl.NCCL_UINT8, _stream())
            self._began('all-gather', x)

    def bcast(self, buffer: Any, root: int = 0) -> None:
        """Replaces a flat array of any dtype by that of the root."""
        if buffer.size:
            self.nccl_comm.bcast(buffer.data.ptr, buffer.nbytes, nccl.NCCL_UINT8, root, _stream())
            self._began('broadcast', buffer)

    def exchange(self, xs: dict[int, Any], ys: dict[int, Any]) -> None:
        """Sends flat arrays of any dtype to ranks, and receives others from ranks, all at once."""
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
        """Frees what NCCL holds, once the work on the device is done."""
        if self.nccl_comm is None:
            return
        import cupy

        with cupy.cuda.Device(self.device_id) as device:
            device.synchronize()  # until then the watchdog may find that this hangs
            watchdog.remove_device(self)
            with self._lock:
                nccl_comm, self.nccl_comm = self.nccl_comm, None
                nccl_comm.destroy()
        self._newest = self.device_id = None

    # --- for the thread that watches over this rank --------------------------------------------

    def _began(self, verb: str, buffer: Any) -> None:
        import cupy

        done = cupy.cuda.get_current_stream().record(cupy.cuda.Event(disable_timing=True))
        text = f'{verb} of {buffer.size} {buffer.dtype} by NCCL on GPU {self.device_id}'
        self._newest = done, time.monotonic(), text

    @property
    def limit(self) -> float | None:
        """The time limit of the communicator, if it has one of its own."""
        return None if self._calls is None else self._calls.limit

    def waits(self) -> tuple[float, str]:
        """For how many seconds the device has not done the newest exchange, and which."""
        newest = self._newest
        if newest is None:
            return 0., ''
        done, since, text = newest
        is_under_way = self._ask(lambda: _status(done) == _NOT_READY, False)
        return (time.monotonic() - since if is_under_way else 0.), text

    def error(self) -> str:
        """What has gone wrong on the device or on the way to another one."""
        return self._ask(self._error, '')

    def abort(self) -> None:
        """Lets the device give up what it waits for."""
        import cupy

        with self._lock:
            if self.nccl_comm is not None:
                with cupy.cuda.Device(self.device_id):
                    self.nccl_comm.abort()

    def _ask(self, question: Callable[[], Any], otherwise: Any) -> Any:
        """Asks the device, which is not that of the calling thread, unless it is being left."""
        import cupy

        if not self._lock.acquire(blocking=False):
            return otherwise
        try:
            if self.nccl_comm is None:
                return otherwise
            with cupy.cuda.Device(self.device_id):
                return question()
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


def _status(event: Any) -> int:
    """What CUDA says of an event.  ``Event.done`` takes any error for one that is not done."""
    import cupy

    return cupy.cuda.runtime.eventQuery(event.ptr)


def together(mpi_comm: Any, what: str, call: Callable[[], Any]) -> Any:
    """Returns ``call()``; if it fails on some rank, all raise the same error.

    Collective: every rank calls it.
    """
    result, refusal = None, None
    try:
        result = call()
    except Exception as error:
        refusal = mismatch.Refusal.of(what, error)
    refusals = mpi_comm.allgather(refusal)
    if any(refusals):
        raise mismatch.refused_error([what] * len(refusals), refusals)
    return result


def type_id(dtype: Any) -> Any:
    """Returns NCCL's number for a dtype, or for the name of one."""
    if str(dtype) not in (*_TYPES, 'bfloat16'):
        raise ValueError(f'NCCL combines arrays of {", ".join(_TYPES)}, not {dtype}')
    return getattr(nccl, f'NCCL_{str(dtype).upper()}')


def _op(op: str) -> Any:
    return getattr(nccl, f'NCCL_{op.upper()}')


def _device() -> Any:
    import cupy

    return cupy.cuda.Device()


def _stream() -> int:
    import cupy

    return cupy.cuda.get_current_stream().ptr
