"""Availability of PyTorch on the CPU and on GPUs, and the reason if it cannot be used."""

from __future__ import annotations

import functools
import importlib
import sys


@functools.cache
def why_unavailable() -> str:
    """Return why PyTorch cannot be used, or ``''`` if it can. Imports PyTorch."""
    try:
        importlib.import_module('chainer_compat.pytorch.recording')
    except Exception as error:  # a broken installation can raise anything
        return f'{type(error).__name__}: {" ".join(str(error).split())}'
    return ''


def why_not_on_gpu(device: int) -> str:
    """Return why convolutions on a GPU are slow, and the remedy; or ``''`` if they are fast.

    They are fast with PyTorch or cuDNN. Imports PyTorch.

    Args:
        device: The number of the GPU.
    """
    from chainer.backends import cuda

    if cuda.cudnn_enabled:
        return ''
    reason = why_unavailable()
    if not reason:
        from chainer_compat.pytorch.tensors import gpu_arrays

        reason = gpu_arrays.why_not(device)
    return reason and (
        'convolutions on this GPU take several times as long as with PyTorch, because CuPy has no '
        f'cuDNN and Chainer cannot use PyTorch ({reason}). Install a PyTorch build for this '
        'version of CUDA: see docs/torch_kernels.md')


def is_imported() -> bool:
    """Return whether PyTorch has been imported, which the first call of a kernel does."""
    return 'chainer_compat.pytorch.recording' in sys.modules
