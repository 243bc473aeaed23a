"""Activation functions."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as N

from chainer_compat.pytorch.expressions.running import Retained, retaining
from chainer_compat.pytorch.tensors.arrays import Expression
from chainer_compat.pytorch.tensors.gpu_arrays import DTYPES
from chainer_compat.pytorch.tensors.memory_format import like
from chainer_compat.pytorch.unsupported import Unsupported


def per_channel(W: Any, shape: tuple[int, ...], ndim: int) -> Any:
    """Return a parameter with axes of length 1 for the batch and the axes after its own axes."""
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


class _LeakyReLU(torch.autograd.Function):
    """A leaky ReLU whose gradient depends on the output, like Chainer's and unlike PyTorch's."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, slope: float) -> torch.Tensor:
        y = N.leaky_relu(x, slope)
        ctx.save_for_backward(y)
        ctx.slope = slope
        return y

    @staticmethod
    def backward(ctx: Any, gy: torch.Tensor) -> tuple[torch.Tensor, None]:
        y, = ctx.saved_tensors
        gy = like(gy, y)  # PyTorch's kernel is ten times slower if the strides differ
        if y.sum().isnan():  # Chainer returns the gradient where it was NaN
            return torch.where(y <= 0, gy * ctx.slope, gy), None
        return _leaky_relu_backward(gy, y, ctx.slope, False), None


_leaky_relu_backward = torch.ops.aten.leaky_relu_backward.default
#: ``apply`` without its checks for ``torch.func``.
_leaky_relu = super(torch.autograd.Function, _LeakyReLU).apply


class _Tanh(torch.autograd.Function):
    """``torch.tanh(x)``, computed by NumPy."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = torch.empty_like(x)
        np.tanh(x.detach().numpy(), out=y.numpy())
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, gy: torch.Tensor) -> torch.Tensor:
        y, = ctx.saved_tensors
        return _tanh_backward(gy, y)


_tanh_backward = torch.ops.aten.tanh_backward.default
_tanh = super(torch.autograd.Function, _Tanh).apply
_numpy = importlib.import_module(
    f'numpy.{"_core" if hasattr(np, "_core") else "core"}._multiarray_umath')
#: Number of elements from which NumPy's tanh is faster than PyTorch's: with AVX-512, it takes a
#: tenth of the time for large arrays.
_MIN_TANH = 1 << 13 if getattr(_numpy, '__cpu_features__', {}).get('AVX512_SKX') else np.inf


def tanh(f: Any, x: torch.Tensor) -> torch.Tensor:
    """``torch.tanh(x)``."""
    return _tanh(x) if x.numel() >= _MIN_TANH else torch.tanh(x)


def run_relu(f: Any, x: torch.Tensor) -> torch.Tensor:
    """``torch.relu(x)``.

    The gradient is 0 wherever the output is 0, like Chainer's gradient on a GPU. On the CPU,
    Chainer's gradient is NaN there if the gradient of the output is infinite or NaN. Where the
    output is NaN, the gradient of the output is passed on, whereas Chainer's gradient is 0.
    """
    f.retain_outputs((0,))
    return torch.relu(x)


def run_leaky_relu(f: Any, x: torch.Tensor) -> torch.Tensor:
    """``F.leaky_relu(x, slope)``."""
    slope = float(f.slope)
    if slope <= 0 or not x.dtype.is_floating_point:
        raise Unsupported
    f.retain_outputs((0,))
    return _leaky_relu(x, slope)


def run_elu(f: Any, x: torch.Tensor) -> torch.Tensor:
    """``F.elu(x)``."""
    if f.alpha != 1:  # at 0, the gradient would differ
        raise Unsupported
    y = N.elu_(x.clone())  # in place, the gradient depends on the output, like in Chainer
    if y.detach().sum().isnan():  # for NaN, Chainer's gradient differs
        raise Unsupported
    f.retain_outputs((0,))
    return y


def run_log_softmax(f: Any, x: torch.Tensor) -> torch.Tensor:
    """``torch.log_softmax(x, axis)``."""
    if not x.shape[f.axis]:
        raise Unsupported
    f._x_xp, f._x_shape, f._x_dtype = np, tuple(x.shape), DTYPES[x.dtype]
    f.retain_outputs((0,))
    return torch.log_softmax(x, f.axis)


def run_softmax(f: Any, x: torch.Tensor) -> torch.Tensor:
    """``torch.softmax(x, axis)``."""
    if not x.shape[f.axis]:
        raise Unsupported
    f.retain_outputs((0,))
    return torch.softmax(x, f.axis)


def run_softplus(f: Any, x: torch.Tensor) -> torch.Tensor:
    """``F.softplus(x, beta)``."""
    if f.beta == 0 or not x.dtype.is_floating_point:
        raise Unsupported
    f.retain_inputs((0,))
    return N.softplus(x, f.beta, 40)  # above 40, the result is x even in float64


def without_cudnn(f: Any, x: torch.Tensor) -> None:
    """Set the attributes that the gradients of sigmoid and tanh read."""
    f._use_cudnn = False


RETAINED: dict[str, Retained] = {
    'activation.sigmoid.Sigmoid': Retained((), (0,), without_cudnn),
}

RECORDED: dict[str, Expression] = {
    'activation.elu.ELU': run_elu,
    'activation.leaky_relu.LeakyReLU': run_leaky_relu,
    'activation.log_softmax.LogSoftmax': run_log_softmax,
    'activation.relu.ReLU': run_relu,
    'activation.softmax.Softmax': run_softmax,
    'activation.softplus.Softplus': run_softplus,
    'activation.tanh.Tanh': retaining(tanh, Retained((), (0,), without_cudnn)),
}
