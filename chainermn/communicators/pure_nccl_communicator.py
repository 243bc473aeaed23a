"""One buffer per model, exchanged between GPUs by NCCL, while the caller may go on computing."""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import chainer
import numpy as np

from chainermn import _signature
from chainermn._consistency import debug_checks
from chainermn._gradients import compressed_mean
from chainermn._gradients.nccl_reducer import NcclMeanQueue
from chainermn._transport import packing
from chainermn._transport.mpi import MpiTransport
from chainermn._transport.nccl.connection import NcclGroup
from chainermn._transport.nccl.transport import NcclTransport
from chainermn.communicators._nccl_communicator_base import NcclCommunicatorBase

_GRAD_DTYPES = tuple(np.dtype(name) for name in ('float16', 'float32', 'float64'))


class PureNcclCommunicator(NcclCommunicatorBase):
    """Averages the gradients of a model on a GPU by one ncclAllReduce.

    All gradients travel in one dtype: ``allreduce_grad_dtype`` or, if that is ``None``, the
    ``dtype`` of Chainer's configuration, where ``mixed16`` means float16.  Each mean is cast to the
    dtype of its gradient.

    NCCL is connected at the first exchange, for the GPU on which the model is then.  The exchange
    runs on a CUDA stream of its own, after what the current stream of the caller has been given.
    """

    _name = 'pure_nccl'

    def __init__(self, mpi_comm: Any) -> None:
        super().__init__(mpi_comm)
        self._nccl = NcclGroup(self._arrays, calls=self._agreement.calls)  # for models
        # A group runs one exchange after the other, but arrays, such as those of batch
        # normalization, must not wait for gradients that are in flight.
        self._nccl_of_arrays = NcclGroup(self._arrays, calls=self._agreement.calls)
        self._nccl_transport = NcclTransport(self._arrays, self._nccl_of_arrays)
        self._stream: Any = None
        with self.config_scope():
            self.allreduce_grad_dtype: np.dtype | None = None

    @classmethod
    def check_grad_dtype(cls, dtype: Any) -> np.dtype:
        dtype = np.dtype(dtype)
        if dtype not in _GRAD_DTYPES:
            raise ValueError('allreduce_grad_dtype has to be float16, float32 or float64, not '
                             f'{dtype}')
        return dtype

    def finalize(self) -> None:
        super().finalize()
        self._nccl_of_arrays.destroy()

    @property
    def can_overlap(self) -> bool:
        return True

    @property
    def has_nccl(self) -> bool:
        return True

    def set_config(self, name: str, value: Any = True, **kwargs: Any) -> None:
        if name != 'allreduce_grad_dtype' or kwargs:
            super().set_config(name, value, **kwargs)
            return
        with self.config_scope():
            self.allreduce_grad_dtype = None if value is None else self.check_grad_dtype(value)

    def _transport(self, device: bool, alike: bool) -> MpiTransport:
        return self._nccl_transport if device and alike else self._mpi_transport

    def multi_node_mean_grad(self, model: Any, zero_fill: bool = False,
                             compression: Any = None) -> None:
        self.multi_node_mean_grad_async(model, zero_fill, compression).wait()

    def multi_node_mean_grad_async(self, model: Any, zero_fill: bool = False,
                                   compression: Any = None) -> _Exchange:
        by_path, compressor = self._agreed_gradients(model, zero_fill, compression)
        arrays = list(by_path.values())
        if not arrays:
            return _Exchange(model, arrays, None)
        with self._on_stream():
            mean, _ = self._exchanged(by_path, compressor, self._agreed_wires)
            packing.unpack(mean, arrays, 1, self.batched_copy)
            return _Exchange(model, arrays, _event())

    def _exchanged(self, by_path: dict[str, Any], compressor: Any,
                   wires: Callable[..., list[Any]]) -> tuple[Any, Any]:
        """Gives the current stream the exchange of arrays, which stay as they are.

        Returns:
            Their means as one flat array, and what travels.
        """
        arrays = list(by_path.values())
        scale = 1 / self._size  # before they are added: float16 may hold the mean, but not the sum
        if compressor is None:
            mean = packing.pack(arrays, self._transfer_dtype(), self.batched_copy, scale)
            self._nccl.all_reduce(mean)
            return mean, mean
        dtype = np.result_type(np.float32, *(array.dtype for array in arrays))
        buffer = packing.pack(arrays, dtype, self.batched_copy,
                              None if compressed_mean.is_gathered(compressor) else scale)
        wire, = wires(compressor, [buffer], by_path)
        return compressed_mean.mean_by_nccl(
            self._nccl, compressor, wire, buffer.size, dtype), wire

    def _new_mean_queue(self, mpi_comm: Any, agree: Callable[..., dict[str, Any]]) -> Any:
        self._nccl.connect()  # now, as all ranks are here

        def start(by_path: dict[str, Any], compressor: Any) -> tuple[list[Any], Any, Any]:
            with self._on_stream():
                mean, wire = self._exchanged(by_path, compressor, _own_wires)
                results = packing.unpacked(mean, list(by_path.values()), self.batched_copy)
                return results, _event(), wire

        def send_zeros(dtype: np.dtype, size: int, gathered: bool) -> Any:
            import cupy

            with self._on_stream():
                zeros = cupy.zeros(size, dtype)
                if gathered:
                    self._nccl.all_gather(zeros, cupy.empty((self._size, size), dtype))
                else:  # bfloat16 is held as integers
                    self._nccl.all_reduce(
                        zeros, dtype='bfloat16' if dtype == np.uint16 else dtype)
                return _event()

        return NcclMeanQueue(mpi_comm, agree, self._check, start, send_zeros)

    def _multi_node_mean_grad_async(self, model: Any, zero_fill: bool, stream: Any) -> None:
        """For callers of ChainerMN 7: the gradients are means once ``stream`` has got so far."""
        exchange = self.multi_node_mean_grad_async(model, zero_fill)
        with contextlib.nullcontext() if stream is None else stream:
            exchange.wait()

    def _bcast_in_place(self, group: list[Any]) -> None:
        with self._on_stream():
            buffer = packing.pack(group)
            self._nccl.bcast(buffer)
            if self._rank != 0:
                packing.unpack(buffer, group)
            done = _event()
        _wait(done)

    def _described(self, verb: str, arrays: dict[str, Any]) -> dict[str, str]:
        described = super()._described(verb, arrays)
        if verb == 'multi_node_mean_grad':
            return described | {'allreduce_grad_dtype': str(self._transfer_dtype())}
        return described

    def _transfer_dtype(self) -> np.dtype:
        if self.allreduce_grad_dtype is not None:
            return self.allreduce_grad_dtype
        return self.check_grad_dtype(chainer.get_dtype())

    @contextlib.contextmanager
    def _on_stream(self) -> Iterator[None]:
        """Makes our stream the current one, to go on where the caller's has got to by now."""
        import cupy

        self._nccl.connect()
        if self._stream is None:
            self._stream = cupy.cuda.Stream(non_blocking=True)
        self._stream.wait_event(_event())
        with self._stream:
            yield


class _Exchange:
    """Gradients on their way to become means."""

    def __init__(self, model: Any, arrays: list[Any], done: Any) -> None:
        self._model = model
        self._arrays = arrays  # NCCL reads and writes them, whatever the model does with them
        self._done = done

    def wait(self) -> None:
        """Lets the current stream wait until the gradients are means.  It does not block."""
        if self._done is None:
            return
        _wait(self._done)
        self._done, self._arrays = None, []
        if debug_checks.is_on():
            packing.check_finite(self._model)


def _own_wires(compressor: Any, buffers: list[Any], by_path: dict[str, Any]) -> list[Any]:
    """Buffers compressed, without asking whether other ranks send as much: that would block."""
    return compressed_mean.wires(compressor, buffers, f'{_signature.digest(list(by_path)):x}')


def _event() -> Any:
    """Marks what the current stream has been given until now."""
    import cupy

    return cupy.cuda.get_current_stream().record(cupy.cuda.Event(disable_timing=True))


def _wait(event: Any) -> None:
    import cupy

    cupy.cuda.get_current_stream().wait_event(event)
