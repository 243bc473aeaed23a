"""CuPy arrays and PyTorch tensors that share GPU memory, and the precision of float32.

Usually, both libraries use the default stream, so no synchronization is needed. Otherwise, DLPack
makes one stream wait for the other, at some cost.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from chainer import config
from chainer.backends.cuda import cudnn_enabled, cupy

from chainer_compat.pytorch.tensors import compute_dtype

Kind: TypeAlias = Literal['convolution', 'rnn', 'matmul']

DTYPES: dict[torch.dtype, np.dtype] = {
    torch.float32: np.dtype(np.float32), torch.float64: np.dtype(np.float64)}
TORCH_DTYPES = {dtype: name for name, dtype in DTYPES.items()}


@functools.cache
def why_not(device: int) -> str:
    """Return why PyTorch cannot compute on a GPU, or ``''`` if it can.

    Args:
        device: The number of the GPU.
    """
    if not torch.cuda.is_available():
        return f'PyTorch {torch.__version__} has no CUDA, or cannot use this driver'
    try:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')  # PyTorch warns about GPUs that it was not built for
            torch.ones(1, device=f'cuda:{device}').add_(1).item()
    except Exception as error:  # for example, there is no kernel for this GPU
        return f'PyTorch {torch.__version__} cannot use this GPU: {" ".join(str(error).split())}'
    return ''


def is_default(array: Any) -> bool:
    """Return whether PyTorch computes with a CuPy array by default.

    It does if it can use the GPU, unless CuPy has cuDNN, which Chainer uses instead.
    """
    return not cudnn_enabled and not why_not(array.data.device_id)


def tensor(array: Any) -> torch.Tensor:
    """Return a tensor that shares the memory of a contiguous CuPy array."""
    if _use_one_stream(array.data.device_id):
        owner = getattr(array.data.mem, '_owner', None)  # of memory that CuPy did not allocate
        if (isinstance(owner, torch.Tensor) and owner.data_ptr() == array.data.ptr
                and owner.dtype == TORCH_DTYPES.get(array.dtype) and owner.is_contiguous()
                and owner.numel() == array.size and not owner.requires_grad):
            return owner.view(array.shape)  # takes less time than DLPack
        return torch.utils.dlpack.from_dlpack(array.__dlpack__(stream=-1))
    return torch.from_dlpack(array)


def array(result: torch.Tensor) -> Any:
    """Return a CuPy array that shares the memory of a tensor on a GPU."""
    device = result.device.index
    if result.dtype not in DTYPES or not result.numel() or not _use_one_stream(device):
        return cupy.from_dlpack(result)
    dtype = DTYPES[result.dtype]
    strides: list[int] | None = None
    n_bytes = result.numel() * dtype.itemsize
    if not result.is_contiguous():
        strides = [step * dtype.itemsize for step in result.stride()]
        n_bytes = dtype.itemsize + sum(
            (n - 1) * step for n, step in zip(result.shape, strides, strict=True))
    memory = cupy.cuda.UnownedMemory(result.data_ptr(), n_bytes, result, device)
    return cupy.ndarray(tuple(result.shape), dtype, cupy.cuda.MemoryPointer(memory, 0), strides)


def _use_one_stream(device: int) -> bool:
    """Return whether both libraries use the default stream of a device."""
    return not (cupy.cuda.get_current_stream().ptr
                or torch._C._cuda_getCurrentRawStream(device))  # of torch.cuda.current_stream()


class precision:  # noqa: N801 (a context manager; a generator would take longer)
    """Makes a GPU multiply float32 in full precision, or in TF32 if that is configured.

    By default, PyTorch allows cuDNN to use TF32. ``config.torch_compute_dtype`` selects TF32.

    Args:
        x: A tensor on the device that computes.
        kind: The kind of operation.
    """

    def __init__(self, x: torch.Tensor, kind: Kind) -> None:
        self._flags = FLAGS[kind] if x.is_cuda else None
        self._saved: object = None

    def __enter__(self) -> None:
        if self._flags is not None:
            owner, name = self._flags
            self._saved = getattr(owner, name)
            setattr(owner, name,
                    TF32 if config.torch_compute_dtype == compute_dtype.TF32 else FULL)

    def __exit__(self, *_: object) -> None:
        if self._flags is not None:
            setattr(*self._flags, self._saved)


FLAGS: dict[Kind, tuple[object, str]]
FULL: object
TF32: object
if hasattr(torch.backends.cudnn, 'conv'):  # since PyTorch 2.9; reading the old flags may raise
    FLAGS = {'convolution': (torch.backends.cudnn.conv, 'fp32_precision'),
             'rnn': (torch.backends.cudnn.rnn, 'fp32_precision'),
             'matmul': (torch.backends.cuda.matmul, 'fp32_precision')}
    FULL, TF32 = 'ieee', 'tf32'
else:
    FLAGS = {'convolution': (torch.backends.cudnn, 'allow_tf32'),
             'rnn': (torch.backends.cudnn, 'allow_tf32'),
             'matmul': (torch.backends.cuda.matmul, 'allow_tf32')}
    FULL, TF32 = False, True
