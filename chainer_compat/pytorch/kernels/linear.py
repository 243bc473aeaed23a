"""Matrix multiplications of linear layers."""

from __future__ import annotations

import chainer
import numpy as np
import torch
from chainer import Variable
from chainer.functions.connection.linear import (
    LinearFunction,
    LinearGradData,
    LinearGradWeight,
)

from chainer_compat.pytorch.kernels import backward
from chainer_compat.pytorch.tensors.arrays import operands, product, rounded
from chainer_compat.pytorch.tensors.gpu_arrays import precision
from chainer_compat.pytorch.unsupported import Unsupported


def output(node: LinearFunction, inputs: tuple[np.ndarray, ...]) -> tuple[np.ndarray]:
    """Compute ``x W^T + b``."""
    if chainer.config.schedule_func is not None:  # a static graph replays Chainer's functions
        raise Unsupported
    x, W, *b = operands(*inputs)
    with precision(x, 'matmul'):
        y = torch.nn.functional.linear(x, W, *b)
    _keep(node)
    return product(y),


def recorded(f: LinearFunction, x: torch.Tensor, W: torch.Tensor, b: torch.Tensor | None = None
             ) -> torch.Tensor:
    """Compute ``x W^T + b``."""
    dtype = x.dtype
    y = torch._C._nn.linear(*rounded(x, W, b))
    _keep(f)
    return y if y.dtype is dtype else y.to(dtype)


def gradients(f: LinearFunction, indexes: tuple[int, ...], grad_outputs: backward.Gradients
              ) -> list[Variable]:
    """Return the gradients of the inputs."""
    x, W, gy = backward.arrays(f, grad_outputs)
    x_, W_, gy_ = operands(x, W, gy)
    with precision(gy_, 'matmul'):
        gx = gy_.mm(W_) if 0 in indexes else None
        gW = gy_.t().mm(x_) if 1 in indexes else None
    return backward.with_bias(gx, gW, grad_outputs[0], x, indexes)


def input_gradient(node: LinearGradData, inputs: tuple[np.ndarray, np.ndarray]
                   ) -> tuple[np.ndarray]:
    """Compute the gradient of the input, ``gy W``."""
    W, gy = operands(*inputs)
    with precision(gy, 'matmul'):
        gx = gy.mm(W)
    _keep(node)
    return product(gx),


def weight_gradient(node: LinearGradWeight, inputs: tuple[np.ndarray, np.ndarray]
                    ) -> tuple[np.ndarray]:
    """Compute the gradient of the weights, ``gy^T x``."""
    if inputs[0].dtype != node._w_dtype:
        raise Unsupported
    x, gy = operands(*inputs)
    with precision(gy, 'matmul'):
        gW = gy.t().mm(x)
    _keep(node)
    return product(gW),


def _keep(node: LinearFunction | LinearGradData | LinearGradWeight) -> None:
    """Set the attributes that the node's ``backward`` needs, as its ``forward`` does."""
    node._config_use_ideep = chainer.config.use_ideep
    node.retain_inputs((0, 1))
