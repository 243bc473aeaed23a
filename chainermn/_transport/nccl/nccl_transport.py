"""The NCCL-based transport: the gradients of a model in one buffer, on a separate CUDA stream.

Single arrays are sent on the current stream. MPI sends arrays that NCCL does not support.
"""
from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import ClassVar

import chainer
import numpy as np

from chainermn._transport import array_buffers, encoded_mean, packing
from chainermn._transport.array_list import ArrayList
from chainermn._transport.base import Codec, Compressor, Group
from chainermn._transport.mpi_transport import MpiTransport
from chainermn._transport.nccl.connection import NcclGroup
from chainermn._types import Array, DeviceArray, DeviceEvent, Stream

_GRAD_DTYPES = tuple(np.dtype(name) for name in ('float16', 'float32', 'float64'))


class DeviceTransport(MpiTransport):
    """Transfers models on devices, with one GPU per rank. MPI sends single arrays."""

    needs_device: ClassVar[bool] = True
    name: ClassVar[str]  # name of the communicator
    _nccl: NcclGroup  # communicates the arrays of models

    def requirements(self, paths: Sequence[str], arrays: ArrayList, for_mean: bool
                     ) -> dict[str, str]:
        for path, array in zip(paths, arrays, strict=True):
            if not array_buffers.on_device(array):
                raise TypeError(
                    f'parameter {path}: {self.name} needs models on a GPU, but this is a '
                    f'{type(array).__module__}.{type(array).__name__}; call model.to_device('
                    "'@cupy:0') first, with the number of this rank's GPU, or use "
                    "create_communicator('flat')")
        import cupy

        on_device: Sequence[DeviceArray] = arrays
        used = {array.data.device_id for array in on_device}
        if self._nccl.device_id is None and len(used) == 1:
            # A script may move its model to a GPU without ever selecting that GPU, but NCCL
            # connects the current one.
            cupy.cuda.Device(used.pop()).use()
        current = cupy.cuda.Device().id
        for path, array in zip(paths, on_device, strict=True):
            if (device_id := array.data.device_id) != current:
                raise ValueError(
                    f'parameter {path} is on GPU {device_id}, but GPU {current} is the current '
                    f"one; call chainer.get_device('@cupy:{device_id}').use() first")
        if self._nccl.device_id not in (None, current):
            raise ValueError(f'this communicator uses NCCL on GPU {self._nccl.device_id}, the GPU '
                             f'of its first model, but this model is on GPU {current}; create '
                             'another communicator for it')
        return {}

    def connect(self) -> None:
        self._nccl.connect()

    def groups(self, arrays: ArrayList, results: Sequence[Array] | None
               ) -> Sequence[tuple[Sequence[Array], Sequence[Array]]]:
        return arrays.by_dtype(results)

    def mean_for_owners(self, arrays: ArrayList, owners: tuple[int, ...]) -> None:
        self.mean(arrays)  # NCCL within a node is faster than MPI

    def free(self) -> None:
        self._nccl.destroy()


class NcclTransport(DeviceTransport):
    """Uses NCCL between all ranks: one all-reduce per model, and collectives for arrays.

    NCCL connects in the first operation, on the current device. Transfers of models run on a
    separate stream, after all work queued on the current stream.
    """

    name: ClassVar[str] = 'pure_nccl'
    can_overlap: ClassVar[bool] = True
    has_nccl: ClassVar[bool] = True

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self._nccl = NcclGroup(self.mpi_comm, record=group.record())
        # A separate group: single arrays, for example of batch normalization, must not wait for
        # gradients in flight.
        self._nccl_of_arrays = NcclGroup(self.mpi_comm, record=group.record())
        self._stream: Stream | None = None

    def carries(self, on_device: bool) -> bool:
        return on_device

    def requirements(self, paths: Sequence[str], arrays: ArrayList, for_mean: bool
                     ) -> dict[str, str]:
        super().requirements(paths, arrays, for_mean)
        return {'allreduce_grad_dtype': str(self._transfer_dtype())} if for_mean else {}

    def free(self) -> None:
        super().free()
        self._nccl_of_arrays.destroy()

    # --- models --------------------------------------------------------------------------------

    def mean(self, arrays: ArrayList, results: Sequence[Array] | None = None) -> None:
        wait(self.begin_mean(arrays, results))

    def mean_compressed(self, arrays: ArrayList, results: Sequence[Array] | None, codec: Codec
                        ) -> None:
        wait(self.begin_mean(arrays, results, codec))

    def begin_mean(self, arrays: ArrayList, results: Sequence[Array] | None = None,
                   codec: Codec | None = None) -> DeviceEvent | None:
        """Start averaging arrays; return a completion event, or ``None`` if the list is empty."""
        if not arrays:
            return None
        with self._on_stream():
            mean, _ = self._flat_mean(arrays, codec)
            packing.unpack(mean, arrays if results is None else results, 1,
                           self.group.batched_copy)
            return array_buffers.event()

    def begin_new_mean(self, arrays: ArrayList, codec: Codec | None = None
                       ) -> tuple[list[Array], DeviceEvent, Array]:
        """Start averaging arrays, which must not change until this is complete.

        Returns:
            New arrays for the means, a completion event, and the array that is sent.
        """
        with self._on_stream():
            mean, sent = self._flat_mean(arrays, codec)
            results = packing.unpacked(mean, arrays, self.group.batched_copy)
            return results, array_buffers.event(), sent

    def send_zeros(self, dtype: np.dtype, size: int, gathered: bool) -> DeviceEvent:
        """Take part in an averaging step of the other ranks; return a completion event."""
        import cupy

        with self._on_stream():
            zeros = cupy.zeros(size, dtype)
            if gathered:
                self._nccl.all_gather(zeros, cupy.empty((self.size, size), dtype))
            else:  # bfloat16 is stored as integers
                self._nccl.all_reduce(zeros, dtype='bfloat16' if dtype == np.uint16 else dtype)
            return array_buffers.event()

    def _flat_mean(self, arrays: ArrayList, codec: Codec | None) -> tuple[Array, Array]:
        """Queue the averaging on the current stream; return the flat mean and the array sent."""
        batched = self.group.batched_copy
        scale = 1 / self.size  # applied before the sum, which may overflow in float16
        if codec is None:
            mean = packing.pack(arrays, self._transfer_dtype(), batched, scale)
            self._nccl.all_reduce(mean)
            return mean, mean
        dtype = np.result_type(np.float32, *arrays.dtypes)
        buffer = packing.pack(arrays, dtype, batched,
                              None if is_gathered(codec.compressor) else scale)
        encoded, = codec.encode([buffer], [arrays])
        return self._mean_encoded(codec, encoded, buffer.size, dtype), encoded

    def _mean_encoded(self, codec: Codec, encoded: Array, size: int, dtype: np.dtype) -> Array:
        """Return the mean of the encoded arrays of all ranks.

        NCCL sums float16 and bfloat16 arrays itself and rounds each partial sum.
        """
        if is_gathered(codec.compressor):
            xp = chainer.backend.get_array_module(encoded)
            received = xp.empty((self.size, encoded.size), encoded.dtype)
            self._nccl.all_gather(encoded, received)
            return encoded_mean.decoded_mean(codec, received, size, dtype)
        self._nccl.all_reduce(encoded, dtype=getattr(codec.compressor, 'encoded_dtype', None))
        return codec.decompress(encoded, size, dtype)

    def bcast_arrays(self, arrays: ArrayList, root: int = 0) -> None:
        for group, _ in self.groups(arrays, None):
            with self._on_stream():
                buffer = packing.pack(group)
                self._nccl.bcast(buffer, root)
                if self.rank != root:
                    packing.unpack(buffer, group)
                done = array_buffers.event()
            wait(done)

    def mean_for_owners(self, arrays: ArrayList, owners: tuple[int, ...]) -> None:
        import cupy

        is_overridden = type(self).mean is not NcclTransport.mean
        padded = None if is_overridden else _padded(arrays, owners, self.size)
        if padded is None:
            super().mean_for_owners(arrays, owners)
            return
        own = _of_owner(arrays, owners, self.rank)
        with self._on_stream():
            dtype, batched = self._transfer_dtype(), self.group.batched_copy
            x = packing.pack(padded, dtype, batched, 1 / self.size)
            y = cupy.empty(x.size // self.size, dtype)
            self._nccl.reduce_scatter(x, y)
            if own:
                packing.unpack(y, own, 1, batched)
            done = array_buffers.event()
        wait(done)

    def copy_arrays(self, arrays: ArrayList, owners: tuple[int, ...]) -> None:
        import cupy

        is_overridden = type(self).bcast_arrays is not NcclTransport.bcast_arrays
        for group, of_group in arrays.by_owner(owners):
            padded = None if is_overridden else _padded(group, of_group, self.size)
            if padded is None:
                super().copy_arrays(group, tuple(of_group))
                continue
            with self._on_stream():
                n = sum(array.size for array in padded) // self.size
                y = cupy.empty(n * self.size, group[0].dtype)
                x = y[self.rank * n:(self.rank + 1) * n]
                own = _of_owner(group, of_group, self.rank)
                batched = self.group.batched_copy and x.dtype.kind == 'f'
                if own:
                    x[:sum(array.size for array in own)] = packing.pack(own, batched=batched)
                self._nccl.all_gather(x, y)
                packing.unpack(y, padded, 1 if batched else None, batched)
                done = array_buffers.event()
            wait(done)

    def _transfer_dtype(self) -> np.dtype:
        if self.group.grad_dtype is not None:
            return self.group.grad_dtype
        return as_grad_dtype(chainer.get_dtype())

    @contextlib.contextmanager
    def _on_stream(self) -> Iterator[None]:
        """Use the stream for models, after the work queued on the caller's stream."""
        import cupy

        self._nccl.connect()
        if self._stream is None:
            self._stream = cupy.cuda.Stream(non_blocking=True)
        self._stream.wait_event(array_buffers.event())
        with self._stream:
            yield

    # --- single arrays -------------------------------------------------------------------------

    def bcast(self, x: Array, shape: tuple[int, ...], dtype: np.dtype, on_device: bool, root: int
              ) -> Array:
        import cupy

        self._nccl_of_arrays.connect()
        y = self.group.prepared(dtype.itemsize * math.prod(shape), lambda: (
            cupy.ascontiguousarray(x) if self.rank == root else cupy.empty(shape, dtype)))
        self._nccl_of_arrays.bcast(y.reshape(-1), root)
        return x if self.rank == root else y

    def gather(self, x: Array, shapes: Sequence[tuple[int, ...]], root: int
               ) -> tuple[Array, ...] | None:
        nbytes = x.dtype.itemsize * sum(map(math.prod, shapes))
        if self.mpi_comm.rank != root:
            self._exchange({root: x}, {}, nbytes)
            return None
        return self._exchange({root: x}, dict(enumerate(shapes)), nbytes)

    def scatter(self, xs: Sequence[Array], shape: tuple[int, ...], dtype: np.dtype,
                on_device: bool, homogeneous: bool, root: int) -> Array:
        nbytes = dtype.itemsize * math.prod(shape) * self.size if homogeneous else None
        y, = self._exchange(dict(enumerate(xs)), {root: shape}, nbytes, dtype)
        return y

    def alltoall(self, xs: Sequence[Array], shapes: Sequence[tuple[int, ...]], homogeneous: bool
                 ) -> tuple[Array, ...]:
        return self._exchange(dict(enumerate(xs)), dict(enumerate(shapes)),
                              xs[0].nbytes * self.size if homogeneous else None)

    def allgather(self, x: Array, shapes: Sequence[tuple[int, ...]]) -> tuple[Array, ...]:
        if len(set(shapes)) > 1:
            return super().allgather(x, shapes)
        import cupy

        self._nccl_of_arrays.connect()
        sent, y = self.group.prepared(x.nbytes * len(shapes), lambda: (
            cupy.ascontiguousarray(x), cupy.empty((len(shapes), *x.shape), x.dtype)))
        self._nccl_of_arrays.all_gather(sent.reshape(-1), y.reshape(-1))
        return tuple(y)

    def allreduce(self, x: Array, op: str, out: Array | None = None) -> Array:
        if not self._nccl_of_arrays.combines(x.dtype):
            return super().allreduce(x, op, out)
        self._nccl_of_arrays.connect()
        y = self.group.prepared(x.nbytes, lambda: x.copy('C'))
        self._nccl_of_arrays.all_reduce(y, op)
        return y

    def reduce(self, x: Array, op: str, root: int) -> Array | None:
        if not self._nccl_of_arrays.combines(x.dtype):
            return super().reduce(x, op, root)
        self._nccl_of_arrays.connect()
        y = self.group.prepared(x.nbytes, lambda: x.copy('C'))
        self._nccl_of_arrays.reduce(y, op, root)
        return y if self.mpi_comm.rank == root else None

    def reduce_scatter(self, x: Array, op: str, sizes: Sequence[int]) -> Array:
        if not self._nccl_of_arrays.combines(x.dtype) or len(set(sizes)) > 1:
            return super().reduce_scatter(x, op, sizes)
        import cupy

        self._nccl_of_arrays.connect()
        y = self.group.prepared(x.nbytes, lambda: cupy.empty(sizes[0], x.dtype))
        self._nccl_of_arrays.reduce_scatter(x, y, op)
        return y

    def _exchange(self, xs: dict[int, Array], shapes: dict[int, tuple[int, ...]],
                  nbytes: int | None, dtype: np.dtype | None = None) -> tuple[Array, ...]:
        """Send arrays of one dtype by rank; return the received arrays, of the given shapes.

        An array for this rank itself is copied. ``nbytes`` is the size of the transfer, if all
        ranks know it.
        """
        import cupy

        self._nccl_of_arrays.connect()
        rank = self.mpi_comm.rank
        dtype = next(iter(xs.values())).dtype if dtype is None else dtype
        sent, ys = self.group.prepared(nbytes, lambda: (
            {dest: cupy.ascontiguousarray(x).reshape(-1) for dest, x in xs.items() if dest != rank},
            {source: xs[rank].copy('C') if source == rank else cupy.empty(shape, dtype)
             for source, shape in shapes.items()}))
        self._nccl_of_arrays.exchange(
            sent, {source: y.reshape(-1) for source, y in ys.items() if source != rank})
        return tuple(ys.values())


def _padded(arrays: ArrayList, owners: Sequence[int], size: int) -> list[Array] | None:
    """Return arrays, rank by rank, padded so that all ranks have the same number of elements.

    Returns:
        The arrays, with unused arrays as padding. ``None`` if more than a third of the elements
        would be unused.
    """
    import cupy

    by_rank = [_of_owner(arrays, owners, rank) for rank in range(size)]
    counts = [sum(array.size for array in found) for found in by_rank]
    length = max(counts)
    n_unused = length * size - sum(counts)
    if 2 * n_unused > sum(counts):
        return None
    unused, start = cupy.empty(n_unused, arrays[0].dtype), 0
    for count, found in zip(counts, by_rank, strict=True):
        if count < length:
            found.append(unused[start:start + length - count])
            start += length - count
    return [*itertools.chain(*by_rank)]


def _of_owner(arrays: Sequence[Array], owners: Sequence[int], rank: int) -> list[Array]:
    return [array for array, owner in zip(arrays, owners, strict=True) if owner == rank]


def as_grad_dtype(dtype: object) -> np.dtype:
    """Return a dtype in which NCCL can average, or raise ValueError."""
    found = np.dtype(dtype)  # type: ignore[call-overload]
    if found not in _GRAD_DTYPES:
        raise ValueError(f'allreduce_grad_dtype must be float16, float32 or float64, not {found}')
    return found


def is_gathered(compressor: Compressor | None) -> bool:
    """Return whether each rank receives all encoded arrays, because NCCL cannot sum them."""
    return compressor is not None and getattr(compressor, 'encoded_dtype', None) is None


def wait(event: DeviceEvent | None) -> None:
    """Make the current stream wait for an event, without blocking the host."""
    if event is not None:
        import cupy

        cupy.cuda.get_current_stream().wait_event(event)
