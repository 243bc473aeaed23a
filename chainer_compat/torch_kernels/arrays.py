"""NumPy and CuPy arrays as PyTorch's tensors and back, on the same memory."""

from __future__ import annotations

import numpy as np
import torch
from chainer import config
from chainer.backends import cuda

from chainer_compat.torch_kernels import compute_dtype, gpu_arrays, memory, threads
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
    if is_on_host:
        if array.flags.carray:
            try:
                return torch.from_numpy(array)
            except ValueError:  # an axis of one element with an unusual stride
                pass
        return torch.from_numpy(array.copy())
    # PyTorch rejects strides that are negative or no multiples of the size, also where they do not
    # matter, such as in axes of one element.
    is_usable = array.flags.c_contiguous and not any([
        stride < 0 or stride % array.itemsize for stride in array.strides])
    return gpu_arrays.tensor(array if is_usable else array.copy())


def tensors(*arrays: np.ndarray) -> list[torch.Tensor]:
    """Return tensors of arrays.

    Raises:
        Unsupported: As for :func:`tensor`, or if the dtypes differ.
    """
    dtype = arrays[0].dtype
    if any([array.dtype != dtype for array in arrays]):
        raise Unsupported
    return [tensor(array) for array in arrays]


def operands(*arrays: np.ndarray, has_kernel: bool = True) -> list[torch.Tensor]:
    """Return tensors of arrays for a matrix product, cast as the configuration says.

    Only float32 is cast. Pass results to :func:`product`.

    Args:
        arrays: Of one dtype.
        has_kernel: Whether PyTorch has a kernel for CPUs that sums up bfloat16 in float32.

    Raises:
        Unsupported: As for :func:`tensors`.
        OptionError: If the option has an invalid value.
    """
    found = tensors(*arrays)
    if not compute_dtype.is_bfloat16(config.torch_compute_dtype) or found[0].dtype != torch.float32:
        return found
    found = [each.bfloat16() for each in found]
    if found[0].is_cuda:
        return found
    if not compute_dtype.has_instructions():
        compute_dtype.warn_once()
    elif has_kernel:
        return found
    return [each.float() for each in found]


def product(result: torch.Tensor) -> np.ndarray:
    """Return the array of a product of :func:`operands`, in the dtype of their arrays."""
    return array(result.float() if result.dtype == torch.bfloat16 else result)


def array(result: torch.Tensor) -> np.ndarray:
    """Return an array that shares the memory of a tensor."""
    return gpu_arrays.array(result) if result.is_cuda else result.numpy()
