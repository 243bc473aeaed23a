"""Activation functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as N


def per_channel(W: Any, shape: tuple[int, ...], ndim: int) -> Any:
    """Return a parameter with the axes of a batch: the first axis, and those after its own."""
    return W.reshape((1, *shape, *[1] * (ndim - 1 - len(shape))))


def prelu(f: Any, x: Any, W: Any) -> Any:
    """``torch.where(x >= 0, x, x * W)``."""
    return torch.where(x >= 0, x, x * per_channel(W, f.in_shapes[1], len(f.in_shapes[0])))


def swish(f: Any, x: Any, beta: Any) -> Any:
    """``x * torch.sigmoid(x * beta)``."""
    return x * torch.sigmoid(x * per_channel(beta, f.in_shapes[1], len(f.in_shapes[0])))


EXPRESSIONS: dict[str, Callable[..., Any]] = {
    'activation.clipped_relu.ClippedReLU': lambda f, x: N.hardtanh(x, 0., f.cap),
    'activation.crelu.CReLU': lambda f, x: torch.cat([torch.relu(x), torch.relu(-x)], f.axis),
    'activation.elu.ELU': lambda f, x: N.elu(x, f.alpha),
    'activation.hard_sigmoid.HardSigmoid': lambda f, x: N.hardtanh(x * .2 + .5, 0., 1.),
    'activation.leaky_relu.LeakyReLU': lambda f, x: N.leaky_relu(x, f.slope),
    'activation.log_softmax.LogSoftmax': lambda f, x: torch.log_softmax(x, f.axis),
    'activation.prelu.PReLUFunction': prelu,
    'activation.relu.ReLU': lambda f, x: torch.relu(x),
    'activation.sigmoid.Sigmoid': lambda f, x: torch.sigmoid(x),
    'activation.softmax.Softmax': lambda f, x: torch.softmax(x, f.axis),
    'activation.softplus.Softplus':
        lambda f, x: torch.logaddexp(x * f.beta, torch.zeros_like(x)) * f.beta_inv,
    'activation.swish.Swish': swish,
    'activation.tanh.Tanh': lambda f, x: torch.tanh(x),
}
