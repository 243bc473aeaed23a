"""The logarithm of softmax, which most losses of classifiers need: one pass over the memory."""

from __future__ import annotations

import numpy as np
import torch

from chainer_compat.torch_kernels.arrays import array, tensor
from chainer_compat.torch_kernels.dispatch import Unsupported


def log_softmax(x: np.ndarray, axis: int = 1) -> np.ndarray:
    """Return the logarithm of ``x``'s softmax along an axis."""
    if not x.shape[axis]:  # there is no maximum
        raise Unsupported
    return array(torch.log_softmax(tensor(x), axis))
