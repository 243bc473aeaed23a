"""Old names for buffers and for packing parameters; extensions such as K-FAC import them."""
from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterable
from typing import Any

import chainer
import numpy as np
from mpi4py import MPI

from chainermn._transport import packing
from chainermn._transport.nccl import connection


class DeviceMemory:
    """A buffer on the current device that grows."""

    def __init__(self) -> None:
        _require_cupy('DeviceMemory')
        self.size = 0
        self.memory: Any = None

    def assign(self, size: int) -> None:
        """Makes it hold that many bytes; they are not initialized."""
        if size != self.size:
            import cupy
            self.size, self.memory = size, cupy.cuda.alloc(size)

    def from_device(self, src: Any, size: int, offset: int = 0, stream: Any = None) -> None:
        """Copies bytes from a device array, to where ``offset`` says."""
        (self.memory + offset).copy_from_device_async(src.data, size, stream)

    def to_device(self, dst: Any, size: int, offset: int = 0, stream: Any = None) -> None:
        """Copies bytes into a device array, from where ``offset`` says."""
        dst.data.copy_from_device_async(self.memory + offset, size, stream)

    def ptr(self) -> int:
        """The address."""
        return self.memory.ptr

    def buffer(self, size: int) -> Any:
        """The first bytes, as an object that a CUDA-aware MPI takes."""
        return _buffer(self.ptr(), size)

    def array(self, shape: Any, offset: int = 0, dtype: Any = np.float32) -> Any:
        """An array on that memory."""
        import cupy
        return cupy.ndarray(shape, dtype, self.memory + offset)


class HostPinnedMemory:
    """A buffer in page-locked host memory that grows."""

    def __init__(self) -> None:
        _require_cupy('HostPinnedMemory')
        self.size = 0
        self.memory: Any = None

    def assign(self, size: int) -> None:
        """Makes it hold that many bytes; they are not initialized."""
        if size != self.size:
            import cupy
            self.size, self.memory = size, cupy.cuda.alloc_pinned_memory(size)

    def ptr(self, offset: int = 0) -> ctypes.c_void_p:
        """The address."""
        return ctypes.c_void_p(self.memory.ptr + offset)

    def buffer(self, size: int) -> Any:
        """The first bytes, as an object that MPI takes."""
        return _buffer(self.memory.ptr, size)

    def array(self, count: int, offset: int = 0, dtype: Any = np.float32) -> np.ndarray:
        """A flat array of ``count`` elements on that memory."""
        return np.frombuffer(self.memory, dtype, count, offset)


class ParamsData:
    """Addresses, prefix sums of sizes and NCCL dtypes of device arrays, on the device."""

    def __init__(self, params: Iterable[Any], attr_name: str, zero_fill: bool) -> None:
        import cupy
        arrays = _arrays(params, attr_name, zero_fill)
        sums = np.cumsum([0, *(array.size for array in arrays)], dtype=np.int64)
        self.n_params = len(arrays)
        self.n_elems = int(sums[-1])
        self.size_csum = cupy.asarray(sums)
        self.dtype = cupy.asarray(
            np.array([connection.type_id(array.dtype) for array in arrays], np.int32))
        self.dptr = cupy.asarray(np.array([array.data.ptr for array in arrays], np.int64))


def extract_params_set_data(model: Any) -> list[Any]:
    """Returns the initialized parameters, sorted by path."""
    return [param for _, param in sorted(model.namedparams(), key=packing.path_of)
            if param.array is not None]


def extract_params_set_grad(model: Any, zero_fill: bool) -> list[Any]:
    """Returns those that have a gradient, or with ``zero_fill`` all that are initialized."""
    return [param for param in extract_params_set_data(model)
            if zero_fill or param.grad is not None]


def count_grad_elements(params: Iterable[Any], zero_fill: bool) -> int:
    """Returns the number of elements of their gradients."""
    return sum(param.array.size for param in params if zero_fill or param.grad is not None)


def pack_params(params: Iterable[Any], attr_name: str, buffer: DeviceMemory, transfer_dtype: Any,
                zero_fill: bool, stream: Any = None) -> None:
    """Copies ``attr_name`` of the parameters into a buffer."""
    arrays = _arrays(params, attr_name, zero_fill)
    with contextlib.nullcontext() if stream is None else stream:
        packed = packing.pack(arrays, np.dtype(transfer_dtype))
        buffer.array(packed.shape, dtype=transfer_dtype)[...] = packed


def unpack_params(params: Iterable[Any], attr_name: str, buffer: DeviceMemory,
                  transfer_dtype: Any, zero_fill: bool, stream: Any = None) -> None:
    """Copies a buffer into ``attr_name`` of the parameters."""
    arrays = _arrays(params, attr_name, zero_fill)
    with contextlib.nullcontext() if stream is None else stream:
        size = sum(array.size for array in arrays)
        packing.unpack(buffer.array((size,), dtype=transfer_dtype), arrays)


def array_to_buffer_object(array: Any, mpi_dtype: Any = MPI.FLOAT) -> Any:
    """Returns what MPI takes: a contiguous NumPy array, or device memory with its MPI dtype."""
    pointer = get_device_memory_pointer(array)
    return pointer if isinstance(pointer, np.ndarray) else (pointer, mpi_dtype)


def get_device_memory_pointer(array: Any) -> Any:
    """Returns the memory of a device array, for a CUDA-aware MPI; a NumPy array as it is."""
    array = chainer.backend.get_array_module(array).ascontiguousarray(array)
    return array if isinstance(array, np.ndarray) else _buffer(array.data.ptr, array.nbytes)


def _arrays(params: Iterable[Any], attr_name: str, zero_fill: bool) -> list[Any]:
    params = list(params)
    if attr_name == 'grad' and zero_fill:
        for param in params:
            packing.fill_with_zeros(param)
    return [array for param in params if (array := getattr(param, attr_name)) is not None]


def _buffer(address: int, size: int) -> Any:
    return (ctypes.c_ubyte * size).from_address(address)


def _require_cupy(name: str) -> None:
    if not chainer.backends.cuda.available:
        raise RuntimeError(f'{name} cannot be used: CuPy is not available '
                           f'({chainer.backends.cuda._resolution_error})')
