"""Converts arrays to MPI buffers and back.

MPI reads NumPy arrays directly. It reads CuPy arrays directly if the MPI library is CUDA-aware
(``CHAINERMN_CUDA_AWARE=1``); otherwise, they are staged in page-locked ("pinned") host memory.
"""
from __future__ import annotations

import math
import operator
import sys
from typing import TypeGuard

import chainer
import numpy as np

from chainermn._operations import call_signature
from chainermn._operations.arguments import is_integer
from chainermn._process import environment
from chainermn._transport import unsuitable
from chainermn._types import Array, Arrays, Device, DeviceEvent


def checked(x: Array) -> Array:
    """Return ``x`` as an array that MPI can send, or raise TypeError.

    NumPy scalars become 0-dimensional arrays, subclasses such as ``numpy.matrix`` become plain
    arrays, and non-native byte orders become native. Unaligned arrays, such as a field of packed
    records, are copied, because mpi4py cannot send them.
    """
    if is_plain(x):
        return x
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError('a masked array would lose its mask; send x.data and x.mask, or x.filled()')
    if isinstance(x, (np.ndarray, np.generic)) or on_device(x):
        x = without_subclass(x)
    else:
        raise TypeError(f'expected a numpy or cupy array, but got {unsuitable.described(x)}')
    if x.dtype not in call_signature.CODES:
        native = x.dtype.newbyteorder('=')
        if native not in call_signature.CODES:
            raise TypeError(f'arrays of dtype {x.dtype} cannot be sent; use one of '
                            + ', '.join(map(str, call_signature.DTYPES))
                            + unsuitable.advice_for(x.dtype))
        x = x.astype(native)
    return x if on_device(x) or x.flags.aligned else x.copy()


def without_subclass(x: Array) -> Array:
    """Return a plain array that shares the memory of ``x``. Methods of subclasses may differ."""
    if not on_device(x):
        return np.asarray(x)
    import cupy
    return x if type(x) is cupy.ndarray else cupy.asarray(x)


def is_direct(x: Array) -> bool:
    """Return whether MPI can read the memory of an array: in C order and, on the host, aligned."""
    flags = x.flags
    return flags.c_contiguous and getattr(flags, 'aligned', True)


def contiguous(x: Array) -> Array:
    """Return an array that MPI can read directly: ``x`` itself if possible."""
    return x if is_direct(x) else x.copy('C')


def is_plain(x: Arrays) -> TypeGuard[np.ndarray]:
    """Return whether ``x`` is a NumPy array that :func:`checked` returns unchanged."""
    return type(x) is np.ndarray and x.dtype in call_signature.CODES and x.flags.aligned


def checked_root(root: int, size: int) -> int:
    """Return a valid root, or raise an error."""
    if not is_integer(root):
        raise TypeError(f'root must be an integer, not {root!r}')
    if not 0 <= root < size:
        raise ValueError(f'root must be a rank from 0 to {size - 1}, not {root}')
    return operator.index(root)


def summed_in(dtype: np.dtype) -> np.dtype:
    """Return the dtype in which MPI sums arrays of a dtype: float16 in float32."""
    return np.dtype(np.float32) if dtype == np.float16 else dtype


def device_in_thread(device_id: int | None) -> Device:
    """Return a device for a with statement in a thread of this package.

    If the thread has not used a GPU yet, this device remains its current device. Otherwise, CuPy
    would switch to device 0 at the end of the statement and allocate memory on it for a context.
    """
    import cupy

    device = cupy.cuda.Device(device_id)
    if not cupy.cuda.driver.ctxGetCurrent():
        device.use()
    return device


def event() -> DeviceEvent:
    """Record an event on the device, after the work queued on the current stream."""
    import cupy

    return cupy.cuda.get_current_stream().record(cupy.cuda.Event(disable_timing=True))


def on_device(x: Array) -> bool:
    """Return whether ``x`` is a CuPy array."""
    cupy = sys.modules.get('cupy')
    return cupy is not None and isinstance(x, getattr(cupy, 'ndarray', ()))


def to_buffer(x: Array) -> Array:
    """Return the elements of a checked array as a flat C-ordered array that MPI can read.

    The result may share memory with ``x``.
    """
    if on_device(x):
        import cupy
        flat = cupy.ascontiguousarray(x).reshape(-1)
        if cuda_aware():
            cupy.cuda.get_current_stream().synchronize()
            return flat
        staged = new_buffer(flat.shape, flat.dtype, device=True)
        return cupy.asnumpy(flat, out=staged) if flat.size else staged
    return x.reshape(-1) if is_direct(x) else x.flatten()


def copied(buffer: Array) -> Array:
    """Return a copy of an MPI buffer, once the device has finished copying."""
    copy = buffer.copy()
    if on_device(copy):
        import cupy
        cupy.cuda.get_current_stream().synchronize()
    return copy


def new_buffer(shape: tuple[int, ...], dtype: np.dtype, device: bool) -> Array:
    """Return an empty flat array to receive an array of a given shape.

    If ``device`` is true, the array is in device memory if MPI is CUDA-aware, and otherwise in
    page-locked host memory.
    """
    size = math.prod(shape)
    if not device or not has_device() or not size:
        return np.empty(size, dtype)
    if cuda_aware():
        import cupy
        buffer = cupy.empty(size, dtype)
        # The device may still be using the previous contents of this memory.
        cupy.cuda.get_current_stream().synchronize()
        return buffer
    return _pinned(size, dtype)


def from_buffer(buffer: Array, shape: tuple[int, ...], device: bool) -> Array:
    """Return a received buffer as an array, on the current device or on the host.

    The array shares memory with the buffer if possible.
    """
    if device and not on_device(buffer) and has_device():
        import cupy
        array = cupy.empty(shape, buffer.dtype)
        if buffer.size:
            array.set(buffer.reshape(shape))
            cupy.cuda.get_current_stream().synchronize()  # then the pinned memory may be reused
        return array
    return buffer.reshape(shape)


def raw(buffer: Array) -> Array:
    """Return a flat buffer as bytes, for transfers without arithmetic."""
    return buffer.view(np.uint8)


def cuda_aware() -> bool:
    """Return whether the user has declared the MPI library CUDA-aware."""
    return environment.flag(environment.CUDA_AWARE)


def has_device() -> bool:
    """Return whether this process can hold arrays on a device."""
    return bool(chainer.backends.cuda.available)


def _pinned(size: int, dtype: np.dtype) -> np.ndarray:
    import cupyx
    return cupyx.empty_pinned((size,), dtype)
