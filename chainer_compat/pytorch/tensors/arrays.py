"""Conversion between NumPy or CuPy arrays and PyTorch tensors, which share their memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import torch
from chainer import config
from chainer.backends import cuda
from chainer.configuration import global_config

from chainer_compat.pytorch.tensors import compute_dtype, gpu_arrays, memory_format, process
from chainer_compat.pytorch.unsupported import Unsupported

#: A PyTorch expression for a Chainer function, called with the function and tensors.
Expression: TypeAlias = Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]

FLOATS = (np.dtype(np.float32), np.dtype(np.float64))

#: NumPy's flags of arrays that are C-contiguous, aligned and writable; ``flags.carray`` warns if
#: the array is a result of ``np.broadcast_arrays``.
PLAIN = 0x501

process.keep_memory()
process.limit_threads()


#: Returns whether ``torch.autocast`` is on, so that PyTorch casts the inputs of functions.
is_autocast = torch._C._is_any_autocast_enabled


def tensor(array: np.ndarray, channels_last: bool = False) -> torch.Tensor:
    """Return a contiguous tensor, which shares the memory of the array if possible.

    Some of PyTorch's kernels ignore strides, because PyTorch itself only passes contiguous tensors.

    Args:
        array: The array.
        channels_last: Whether to keep the channels-last layout if the array has it.

    Raises:
        Unsupported: If the dtype is neither float32 nor float64, for arrays on a GPU that PyTorch
            does not use, and within ``torch.autocast``.
    """
    is_on_host = isinstance(array, np.ndarray)
    if array.dtype not in FLOATS or is_autocast() or not (
            is_on_host or (isinstance(array, cuda.ndarray) and (
                config.use_torch == 'always' or gpu_arrays.is_default(array)))):
        raise Unsupported
    if is_on_host:
        is_last = channels_last and memory_format.is_channels_last(array)
        if array.flags.carray or (is_last and array.transpose(0, 2, 3, 1).flags.carray):
            try:
                return torch.from_numpy(array)
            except ValueError:  # an axis of one element with an unusual stride
                pass
        return torch.from_numpy(array.copy('K' if is_last else 'C'))
    # PyTorch rejects strides that are negative or not a multiple of the item size, even where they
    # do not matter, such as in axes of one element.
    is_usable = array.flags.c_contiguous and not any([
        stride < 0 or stride % array.itemsize for stride in array.strides])
    return gpu_arrays.tensor(array if is_usable else array.copy())


def shared(array: np.ndarray) -> torch.Tensor | None:
    """Return a tensor that shares the memory of a NumPy array; ``None`` if that is impossible."""
    if array.dtype == np.float16 or not (array.flags.num & PLAIN == PLAIN or (
            memory_format.is_channels_last(array)
            and array.transpose(0, 2, 3, 1).flags.num & PLAIN == PLAIN)):
        return None
    try:
        return torch.from_numpy(array)
    except (TypeError, ValueError):  # wrong dtype, or an axis of one element with unusual stride
        return None


def check_floats(*tensors: torch.Tensor) -> None:
    """Check that tensors have the same floating-point dtype.

    Raises:
        Unsupported: If they do not.
    """
    dtype = tensors[0].dtype
    if not dtype.is_floating_point or any([x.dtype != dtype for x in tensors]):
        raise Unsupported


def rounded(x: torch.Tensor, W: torch.Tensor, b: torch.Tensor | None
            ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return the operands of a matrix multiplication and a sum, cast to the configured dtype.

    Raises:
        Unsupported: If their dtypes differ, or autograd would round their gradients.
        OptionError: If the option has an invalid value.
    """
    dtype = x.dtype
    if W.dtype is not dtype or not (b is None or b.dtype is dtype) or not dtype.is_floating_point:
        raise Unsupported
    if not _is_rounded(x):
        return x, W, b
    if not compute_dtype.has_instructions():
        raise Unsupported
    return x.bfloat16(), W.bfloat16(), None if b is None else b.bfloat16()


def tensors(*arrays: np.ndarray, channels_last: bool = False) -> list[torch.Tensor]:
    """Return tensors of arrays.

    Args:
        arrays: The arrays, which must have the same dtype.
        channels_last: See :func:`tensor`.

    Raises:
        Unsupported: In the same cases as :func:`tensor`, or if the dtypes differ.
    """
    dtype = arrays[0].dtype
    if any([array.dtype != dtype for array in arrays]):
        raise Unsupported
    return [tensor(array, channels_last) for array in arrays]


def operands(*arrays: np.ndarray, has_kernel: bool = True, channels_last: bool = False
             ) -> list[torch.Tensor]:
    """Return tensors of arrays for a matrix multiplication, cast to the configured dtype.

    Only float32 is cast. Pass results to :func:`product`.

    Args:
        arrays: The arrays, which must have the same dtype.
        has_kernel: Whether PyTorch has a CPU kernel that accumulates bfloat16 in float32.
        channels_last: See :func:`tensor`.

    Raises:
        Unsupported: In the same cases as :func:`tensors`.
        OptionError: If the option has an invalid value.
    """
    found = tensors(*arrays, channels_last=channels_last)
    if not _is_rounded(found[0]):
        return found
    found = [each.bfloat16() for each in found]
    if found[0].is_cuda:
        return found
    if not compute_dtype.has_instructions():
        compute_dtype.warn_once()
    elif has_kernel:
        return found
    return [each.float() for each in found]


def multiplies_bfloat16(x: torch.Tensor) -> bool:
    """Return whether PyTorch's kernels multiply this tensor faster if it is cast to bfloat16.

    The tensor is an operand that was rounded and cast back, because some kernels sum in bfloat16.
    """
    return _is_rounded(x) and not x.is_cuda and compute_dtype.has_instructions()


def _is_rounded(x: torch.Tensor) -> bool:
    """Return whether the configuration rounds a tensor like this to bfloat16."""
    return compute_dtype.is_bfloat16(config._local.__dict__.get(
        'torch_compute_dtype', global_config.torch_compute_dtype)) and x.dtype is torch.float32


def product(result: torch.Tensor) -> np.ndarray:
    """Return the product of :func:`operands` as an array, in the dtype of the original arrays."""
    return array(result.float() if result.dtype == torch.bfloat16 else result)


def array(result: torch.Tensor) -> np.ndarray:
    """Return an array that shares the memory of a tensor."""
    return gpu_arrays.array(result) if result.is_cuda else result.numpy()
