"""NumPy and CuPy arrays as PyTorch's tensors and back, on the same memory."""

from __future__ import annotations

import numpy as np
import torch
from chainer import config
from chainer.backends import cuda

from chainer_compat.torch_kernels import memory, threads
from chainer_compat.torch_kernels.dispatch import Unsupported

FLOATS = (np.dtype(np.float32), np.dtype(np.float64))

memory.keep()
threads.limit()


def tensor(array: np.ndarray) -> torch.Tensor:
    """Return a tensor that shares the memory of a floating-point array.

    Raises:
        Unsupported: For other dtypes, and for arrays on a GPU unless ``use_torch`` is 'always'.
    """
    if array.dtype not in FLOATS:
        raise Unsupported
    if isinstance(array, np.ndarray):
        # Read-only arrays are results of broadcasting, for example. Fields of structured arrays
        # have strides that are no multiples of their size.
        is_shareable = array.flags.writeable and array.flags.aligned and all(
            stride >= 0 and stride % array.itemsize == 0 for stride in array.strides)
        if not is_shareable:
            array = array.copy()
        return torch.from_numpy(array)
    if config.use_torch == 'always' and isinstance(array, cuda.ndarray):
        return torch.from_dlpack(array)
    raise Unsupported


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
    return cuda.cupy.from_dlpack(result) if result.is_cuda else result.numpy()
