"""Availability of PyTorch, on the CPU and on a GPU, and the reason if it cannot be used."""

from __future__ import annotations

import functools
import importlib
import sys


@functools.cache
def why_unavailable() -> str:
    """Return why PyTorch cannot be used, ``''`` if it can. Imports PyTorch."""
    try:
        importlib.import_module('chainer_compat.pytorch.recording')
    except Exception as error:  # a broken installation can raise anything
        return f'{type(error).__name__}: {" ".join(str(error).split())}'
    return ''


def why_not_on_gpu(device: int) -> str:
    """Return why convolutions on a GPU are slow, and the remedy; ``''`` if they are not.

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
        f'cuDNN and Chainer cannot use PyTorch ({reason}). Install a PyTorch for this version of '
        'CUDA: see docs/torch_kernels.md')


def is_imported() -> bool:
    """Return whether a kernel has been called, so that PyTorch is imported."""
    return 'chainer_compat.pytorch.recording' in sys.modules
