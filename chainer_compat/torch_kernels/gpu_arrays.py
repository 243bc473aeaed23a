"""CuPy arrays as PyTorch's tensors and back, on the same memory of a GPU; and float32 as Chainer's.

Arrays and tensors are used in the order of their streams. Usually both libraries use the default
stream, and nothing is needed; otherwise DLPack lets one stream wait for the other, at some cost.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from chainer import config
from chainer.backends.cuda import cupy

from chainer_compat.torch_kernels import compute_dtype

DTYPES: dict[torch.dtype, np.dtype] = {
    torch.float32: np.dtype(np.float32), torch.float64: np.dtype(np.float64)}


def tensor(array: Any) -> torch.Tensor:
    """Return a tensor that shares the memory of a contiguous CuPy array."""
    if _use_one_stream(array.data.device_id):
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
    """Whether both libraries use the default stream of a device."""
    return not (cupy.cuda.get_current_stream().ptr
                or torch._C._cuda_getCurrentRawStream(device))  # of torch.cuda.current_stream()


@contextlib.contextmanager
def precision(x: torch.Tensor) -> Iterator[None]:
    """Let a GPU multiply float32 as such, or as TF32 if ``config.torch_compute_dtype`` says so.

    By default, PyTorch lets cuDNN use TF32.
    """
    if not x.is_cuda:
        yield
        return
    value = TF32 if config.torch_compute_dtype == compute_dtype.TF32 else FULL
    saved = []
    try:
        for flags, name in FLAGS:
            before = getattr(flags, name)
            if before != value:
                saved.append((flags, name, before))
                setattr(flags, name, value)
        yield
    finally:
        for each in saved:
            setattr(*each)


_cudnn, _matmul = torch.backends.cudnn, torch.backends.cuda.matmul
FLAGS: list[tuple[object, str]]
FULL: object
TF32: object
if hasattr(_cudnn, 'conv'):  # since PyTorch 2.9, where reading the old flags may raise an error
    FLAGS = [(each, 'fp32_precision') for each in (_cudnn.conv, _cudnn.rnn, _matmul)]
    FULL, TF32 = 'ieee', 'tf32'
else:
    FLAGS = [(_cudnn, 'allow_tf32'), (_matmul, 'allow_tf32')]
    FULL, TF32 = False, True
