"""Local response normalization and its gradient."""

from __future__ import annotations

import numpy as np
import torch
from chainer.functions.normalization.local_response_normalization import (
    LocalResponseNormalization,
    LocalResponseNormalizationGrad,
)

from chainer_compat.pytorch.tensors.arrays import array, tensor, tensors
from chainer_compat.pytorch.tensors.memory_format import like
from chainer_compat.pytorch.unsupported import Unsupported


def output(f: LocalResponseNormalization, inputs: tuple[np.ndarray]) -> tuple[np.ndarray]:
    """Divide the input by a power of the sum of squares in nearby channels."""
    x = tensor(inputs[0], channels_last=True)
    _check(f)
    unit_scale = _sums(x * x, f.n).mul_(f.alpha).add_(f.k)
    scale = unit_scale.pow(-f.beta)
    f.retain_inputs((0,))
    f.retain_outputs((0,))
    f.unit_scale, f.scale = array(unit_scale), array(scale)
    return array(x * scale),


def gradient(f: LocalResponseNormalizationGrad, inputs: tuple[np.ndarray, ...]
             ) -> tuple[np.ndarray]:
    """Return the gradient of the input."""
    _check(f)
    x, *others = tensors(*inputs, f.scale, f.unit_scale, channels_last=True)
    y, gy, scale, unit_scale = [like(each, x) for each in others]
    sums = _sums((y * gy).div_(unit_scale), f.n)
    return array((gy * scale).addcmul_(x, sums, value=-2 * f.alpha * f.beta)),


def _sums(x: torch.Tensor, n: int) -> torch.Tensor:
    """Return the sums over ``n`` channels around each channel."""
    sums = x.clone()
    for i in range(1, n // 2 + 1):
        sums[:, i:] += x[:, :-i]
        sums[:, :-i] += x[:, i:]
    return sums


def _check(f: LocalResponseNormalization | LocalResponseNormalizationGrad) -> None:
    """Check that constants are Python numbers: NumPy scalars change the dtype of the result."""
    if not {type(f.k), type(f.alpha), type(f.beta)} <= {int, float}:
        raise Unsupported
