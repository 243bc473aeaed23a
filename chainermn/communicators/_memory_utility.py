"""Buffers and packing of parameters under old names, which extensions such as K-FAC import."""
from __future__ import annotations

import contextlib
import ctypes
import operator
from collections.abc import Iterable, Sequence

import chainer
import numpy as np
from mpi4py import MPI
from numpy.typing import DTypeLike

from chainermn._transport import packing
from chainermn._transport.nccl import connection
from chainermn._types import Array, DeviceArray, Model, Parameter, Stream
from chainermn._types import DeviceMemory as _Memory

#: A buffer for MPI: a C-contiguous NumPy array, or device memory with its MPI dtype.
MpiBuffer = np.ndarray | tuple[ctypes.Array[ctypes.c_ubyte], MPI.Datatype]


class _Allocated:
    """A buffer of the size that was last requested.

    Raises:
        RuntimeError: If CuPy is not available.
    """

    def __init__(self) -> None:
        _require_cupy(type(self).__name__)
        self.size = 0
        self.memory: _Memory = None

    def assign(self, size: int) -> None:
        """Allocate the buffer, without initializing it, unless it already has this size.

        Args:
            size: Number of bytes.
        """
        if size != self.size:
            self.size, self.memory = size, self._allocate(size)

    def buffer(self, size: int) -> ctypes.Array[ctypes.c_ubyte]:
        """Return the start of the buffer, for an MPI library that can access this memory.

        Args:
            size: Number of bytes.
        """
        return _buffer(self.memory.ptr, size)

    def _allocate(self, size: int) -> _Memory:
        raise NotImplementedError


class DeviceMemory(_Allocated):
    """A buffer on the current device.

    Raises:
        RuntimeError: If CuPy is not available.
    """

    def _allocate(self, size: int) -> _Memory:
        import cupy
        return cupy.cuda.alloc(size)

    def from_device(self, src: DeviceArray, size: int, offset: int = 0, stream: Stream | None = None
                    ) -> None:
        """Copy bytes from a device array into the buffer.

        Args:
            src: A CuPy array.
            size: Number of bytes.
            offset: Offset in the buffer at which to write, in bytes.
            stream: The CUDA stream; by default the current one.
        """
        (self.memory + offset).copy_from_device_async(src.data, size, stream)

    def to_device(self, dst: DeviceArray, size: int, offset: int = 0, stream: Stream | None = None
                  ) -> None:
        """Copy bytes from the buffer into a device array.

        Args:
            dst: A CuPy array.
            size: Number of bytes.
            offset: Offset in the buffer at which to read, in bytes.
            stream: The CUDA stream; by default the current one.
        """
        dst.data.copy_from_device_async(self.memory + offset, size, stream)

    def ptr(self) -> int:
        """Return the address of the buffer."""
        return self.memory.ptr

    def array(self, shape: int | tuple[int, ...], offset: int = 0, dtype: DTypeLike = np.float32
              ) -> Array:
        """Return a CuPy array that shares memory with the buffer.

        Args:
            shape: Shape of the array.
            offset: Offset of the array in the buffer, in bytes.
            dtype: Dtype of the array.
        """
        import cupy
        return cupy.ndarray(shape, dtype, self.memory + offset)


class HostPinnedMemory(_Allocated):
    """A buffer in page-locked host memory.

    Raises:
        RuntimeError: If CuPy is not available.
    """

    def _allocate(self, size: int) -> _Memory:
        import cupy
        return cupy.cuda.alloc_pinned_memory(size)

    def ptr(self, offset: int = 0) -> ctypes.c_void_p:
        """Return an address in the buffer.

        Args:
            offset: Offset from the start of the buffer, in bytes.
        """
        return ctypes.c_void_p(self.memory.ptr + offset)

    def array(self, count: int, offset: int = 0, dtype: DTypeLike = np.float32) -> np.ndarray:
        """Return a flat NumPy array that shares memory with the buffer.

        Args:
            count: Number of elements.
            offset: Offset of the array in the buffer, in bytes.
            dtype: Dtype of the array.
        """
        return np.frombuffer(self.memory, dtype, count, offset)


class ParamsData:
    """Addresses, prefix sums of sizes and NCCL dtypes of device arrays, on the device.

    Args:
        params: Parameters on the device.
        attr_name: ``'data'`` or ``'grad'``.
        zero_fill: Whether to set missing gradients to zero first.
    """

    def __init__(self, params: Iterable[Parameter], attr_name: str, zero_fill: bool) -> None:
        import cupy
        arrays = _arrays(params, attr_name, zero_fill)
        on_device: Sequence[DeviceArray] = arrays
        sums = np.cumsum([0, *(array.size for array in arrays)], dtype=np.int64)
        self.n_params = len(arrays)
        self.n_elems = int(sums[-1])
        self.size_csum = cupy.asarray(sums)
        self.dtype = cupy.asarray(
            np.array([connection.type_id(array.dtype) for array in arrays], np.int32))
        self.dptr = cupy.asarray(np.array([array.data.ptr for array in on_device], np.int64))


def extract_params_set_data(model: Model) -> list[Parameter]:
    """Return the initialized parameters of a model, sorted by path.

    Args:
        model: A ``chainer.Link``.
    """
    return [param for _, param in sorted(model.namedparams(), key=operator.itemgetter(0))
            if param.array is not None]


def extract_params_set_grad(model: Model, zero_fill: bool) -> list[Parameter]:
    """Return the parameters of a model that have a gradient, sorted by path.

    Args:
        model: A ``chainer.Link``.
        zero_fill: Whether to return all initialized parameters instead.
    """
    return [param for param in extract_params_set_data(model)
            if zero_fill or param.grad is not None]


def count_grad_elements(params: Iterable[Parameter], zero_fill: bool) -> int:
    """Return the number of elements in the gradients of parameters.

    Args:
        params: Initialized parameters.
        zero_fill: Whether to also count parameters without a gradient.
    """
    return sum(param.array.size for param in params if zero_fill or param.grad is not None)


def pack_params(params: Iterable[Parameter], attr_name: str, buffer: DeviceMemory,
                transfer_dtype: DTypeLike, zero_fill: bool, stream: Stream | None = None) -> None:
    """Copy the data or gradients of parameters into a buffer.

    Args:
        params: Parameters on the device.
        attr_name: ``'data'`` or ``'grad'``.
        buffer: The buffer.
        transfer_dtype: Dtype of the elements in the buffer.
        zero_fill: Whether to set missing gradients to zero first.
        stream: The CUDA stream; by default the current one.
    """
    arrays = _arrays(params, attr_name, zero_fill)
    with contextlib.nullcontext() if stream is None else stream:
        packed = packing.pack(arrays, np.dtype(transfer_dtype))
        buffer.array(packed.shape, dtype=transfer_dtype)[...] = packed


def unpack_params(params: Iterable[Parameter], attr_name: str, buffer: DeviceMemory,
                  transfer_dtype: DTypeLike, zero_fill: bool, stream: Stream | None = None) -> None:
    """Copy a buffer into the data or gradients of parameters.

    Args:
        params: Parameters on the device.
        attr_name: ``'data'`` or ``'grad'``.
        buffer: The buffer.
        transfer_dtype: Dtype of the elements in the buffer.
        zero_fill: Whether to create missing gradients.
        stream: The CUDA stream; by default the current one.
    """
    arrays = _arrays(params, attr_name, zero_fill)
    with contextlib.nullcontext() if stream is None else stream:
        size = sum(array.size for array in arrays)
        packing.unpack(buffer.array((size,), dtype=transfer_dtype), arrays)


def array_to_buffer_object(array: Array, mpi_dtype: MPI.Datatype = MPI.FLOAT) -> MpiBuffer:
    """Return a buffer argument for MPI: a C-contiguous NumPy array, or device memory and its dtype.

    Args:
        array: NumPy or CuPy array.
        mpi_dtype: MPI dtype of a CuPy array.
    """
    pointer = get_device_memory_pointer(array)
    return pointer if isinstance(pointer, np.ndarray) else (pointer, mpi_dtype)


def get_device_memory_pointer(array: Array) -> np.ndarray | ctypes.Array[ctypes.c_ubyte]:
    """Return the memory of a CuPy array for a CUDA-aware MPI, or a C-contiguous NumPy array.

    Args:
        array: NumPy or CuPy array.
    """
    array = chainer.backend.get_array_module(array).ascontiguousarray(array)
    return array if isinstance(array, np.ndarray) else _buffer(array.data.ptr, array.nbytes)


def _arrays(params: Iterable[Parameter], attr_name: str, zero_fill: bool) -> list[Array]:
    params = list(params)
    if attr_name == 'grad' and zero_fill:
        for param in params:
            if param.grad is None:
                param.grad = chainer.backend.get_array_module(param.array).zeros_like(param.array)
    return [array for param in params if (array := getattr(param, attr_name)) is not None]


def _buffer(address: int, size: int) -> ctypes.Array[ctypes.c_ubyte]:
    return (ctypes.c_ubyte * size).from_address(address)


def _require_cupy(name: str) -> None:
    if not chainer.backends.cuda.available:
        raise RuntimeError(f'{name} cannot be used: CuPy is not available '
                           f'({chainer.backends.cuda._resolution_error})')
