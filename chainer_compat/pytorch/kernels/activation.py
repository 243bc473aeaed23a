"""ReLU and leaky ReLU, with one pass over memory in forward and in backward."""

from __future__ import annotations

import numpy as np
import torch
from chainer import Variable
from chainer.functions.activation.leaky_relu import LeakyReLU, _LeakyReLUGrad
from chainer.functions.activation.relu import ReLU, ReLUGrad2

from chainer_compat.pytorch.kernels import backward
from chainer_compat.pytorch.tensors.arrays import array, tensor, tensors
from chainer_compat.pytorch.tensors.memory_format import like
from chainer_compat.pytorch.unsupported import Unsupported


def relu(f: ReLU, inputs: tuple[np.ndarray]) -> tuple[np.ndarray]:
    """Return the input, with zeros in place of negative elements."""
    y = array(torch.relu(tensor(inputs[0], channels_last=True)))
    f.retain_outputs((0,))
    return y,


def relu_backward(f: ReLU, indexes: tuple[int, ...], grad_outputs: backward.Gradients
                  ) -> tuple[Variable, ...]:
    """Return the gradient of the input."""
    y, gy = backward.arrays(f, grad_outputs, is_of_output=True)
    if not isinstance(gy, np.ndarray):
        raise Unsupported
    return backward.variables(_relu_gradient(gy, y))


def relu_gradient(f: ReLUGrad2, inputs: tuple[np.ndarray]) -> tuple[np.ndarray]:
    """Return the gradient where the output was positive, and zero times the gradient elsewhere."""
    return _relu_gradient(inputs[0], f.b),


def _relu_gradient(gy: np.ndarray, y: np.ndarray) -> np.ndarray:
    # Unlike threshold_backward, this has Chainer's results for NaN and infinity.
    return array(torch.ops.aten.leaky_relu_backward(*_in_one_format(gy, y), 0., False))


def _in_one_format(gy: np.ndarray, y: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tensors in the memory format of ``y``."""
    gy_, y_ = tensors(gy, y, channels_last=True)
    return like(gy_, y_), y_


def leaky_relu(f: LeakyReLU, inputs: tuple[np.ndarray]) -> tuple[np.ndarray]:
    """Return the input, with negative elements multiplied by the slope."""
    y = array(torch.ops.aten.leaky_relu(tensor(inputs[0], channels_last=True), float(f.slope)))
    # The sign of the output is the sign of the input, unless the slope is negative.
    if f.slope >= 0:
        f.retain_outputs((0,))
    else:
        f.retain_inputs((0,))
    return y,


def leaky_relu_backward(f: LeakyReLU, indexes: tuple[int, ...], grad_outputs: backward.Gradients
                        ) -> tuple[Variable, ...]:
    """Return the gradient of the input."""
    condition, gy = backward.arrays(f, grad_outputs, is_of_output=f.slope >= 0)
    if not isinstance(gy, np.ndarray):
        raise Unsupported
    return backward.variables(_leaky_relu_gradient(gy, condition, f.slope))


def leaky_relu_gradient(f: _LeakyReLUGrad, inputs: tuple[np.ndarray]) -> tuple[np.ndarray]:
    """Return the gradient where the input was positive, and times the slope elsewhere."""
    return _leaky_relu_gradient(inputs[0], f.cond, f.slope),


def _leaky_relu_gradient(gy: np.ndarray, condition: np.ndarray, slope: float) -> np.ndarray:
    gy_, condition_ = _in_one_format(gy, condition)
    if condition_.sum().isnan():  # Chainer returns the gradient where the input was NaN
        raise Unsupported
    return array(torch.ops.aten.leaky_relu_backward(gy_, condition_, float(slope), False))
