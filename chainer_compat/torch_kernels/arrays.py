"""NumPy and CuPy arrays as PyTorch's tensors and back, on the same memory."""

from __future__ import annotations

import numpy as np
import torch
from chainer import config
from chainer.backends import cuda

from chainer_compat.torch_kernels import gpu_arrays, memory, threads
from chainer_compat.torch_kernels.dispatch import Unsupported

FLOATS = (np.dtype(np.float32), np.dtype(np.float64))

memory.keep()
threads.limit()


def tensor(array: np.ndarray) -> torch.Tensor:
    """Return a contiguous tensor, which shares the memory of a floating-point array if it can.

    Some of PyTorch's kernels ignore strides, because PyTorch itself only passes contiguous tensors.

    Raises:
        Unsupported: For other dtypes, and for arrays on a GPU unless ``use_torch`` is 'always'.
    """
    is_on_host = isinstance(array, np.ndarray)
    if array.dtype not in FLOATS or not (
            is_on_host or (config.use_torch == 'always' and isinstance(array, cuda.ndarray))):
        raise Unsupported
    # PyTorch rejects strides that are negative or no multiples of the size, also where they do not
    # matter, such as in axes of one element.
    is_usable = array.flags.c_contiguous and all(
        stride >= 0 and stride % array.itemsize == 0 for stride in array.strides)
    if is_on_host:
        if not (is_usable and array.flags.writeable and array.flags.aligned):
            array = array.copy()
        return torch.from_numpy(array)
    return gpu_arrays.tensor(array if is_usable else array.copy())


def tensors(*arrays: np.ndarray) -> list[torch.Tensor]:
    """Return tensors of arrays.

    Raises:
        Unsupported: As for :func:`tensor`, or if the dtypes differ.
    """
    if any(array.dtype != arrays[0].dtype for array in arrays):
        raise Unsupported
    return [tensor(array) for array in arrays]


def array(result: torch.Tensor) -> np.ndarray:
    """Return an array that shares the memory of a tensor."""
    return gpu_arrays.array(result) if result.is_cuda else result.numpy()
