"""Rectified linear units: one pass over the memory, forward and backward."""

from __future__ import annotations

import numpy as np
import torch
from chainer.functions.activation.relu import ReLU, ReLUGrad2

from chainer_compat.torch_kernels.arrays import array, tensor, tensors


def relu(f: ReLU, inputs: tuple[np.ndarray]) -> tuple[np.ndarray]:
    """Return the input, with zeros for negative elements."""
    y = array(torch.relu(tensor(inputs[0])))
    f.retain_outputs((0,))
    return y,


def relu_gradient(f: ReLUGrad2, inputs: tuple[np.ndarray]) -> tuple[np.ndarray]:
    """Return the gradient where the output was positive, else zero."""
    gy, y = tensors(inputs[0], f.b)
    return array(torch.ops.aten.threshold_backward(gy, y, 0)),
