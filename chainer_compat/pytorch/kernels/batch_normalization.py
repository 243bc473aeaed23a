"""Batch normalization: forward, backward, with given statistics, and in parts.

Multi-node batch normalization calls the parts, and all-reduces statistics and gradients in between.
"""

from __future__ import annotations

import functools
import math
from types import ModuleType
from typing import Any

import chainer
import numpy as np
import torch
from chainer import Variable
from chainer.backends import intel64
from chainer.functions.normalization.batch_normalization import (
    BatchNormalization,
    GeneralBatchNormalizationImpl,
    _compute_axis,
    _impl_selector,
)

from chainer_compat.pytorch.kernels import backward as of_node
from chainer_compat.pytorch.tensors.arrays import array, shared, tensor, tensors
from chainer_compat.pytorch.tensors.memory_format import like
from chainer_compat.pytorch.unsupported import Unsupported

aten = torch.ops.aten

Expander = tuple[slice | None, ...]
Shape = tuple[int, ...]

#: All functions can share it, because it has no state.
_IMPL = GeneralBatchNormalizationImpl()


def forward(impl: GeneralBatchNormalizationImpl, axis: tuple[int, ...], gamma: np.ndarray,
            x: np.ndarray, x_layout: None, xp: ModuleType, expander: Expander, beta: np.ndarray,
            eps: float, decay: float, running_mean: np.ndarray | None,
            running_var: np.ndarray | None) -> tuple[object, ...]:
    """Normalize a batch, and update the running statistics in place."""
    _check(impl, axis, x, gamma, beta)
    # With one element per statistic, PyTorch would divide by zero. Leave calls with only one of the
    # running statistics to Chainer.
    if x.size == gamma.size or (running_mean is None) != (running_var is None):
        raise Unsupported
    x_, gamma_, beta_ = tensors(x, gamma, beta, channels_last=gamma.ndim == 1)
    shape = gamma.shape
    in_place = None
    if running_mean is not None and running_var is not None:
        if not x_.is_cuda:
            in_place = _in_place(running_mean, running_var, shape, x_, gamma_, beta_)
        elif _are_plain(running_mean, running_var, gamma, beta, x):
            in_place = tuple([t.flatten() for t in tensors(running_mean, running_var)])
    # With momentum 1, these become the mean and the unbiased variance.
    mean_, var_ = in_place or gamma_.new_zeros(2, gamma.size)
    y, mean, inv_std = torch.native_batch_norm(
        _flat(x_, gamma_), gamma_.flatten(), beta_.flatten(), mean_, var_, True,
        1. if in_place is None else 1 - decay, eps)
    if running_mean is not None and running_var is not None and in_place is None:
        for running, value in (running_mean, mean_), (running_var, var_):
            running *= decay
            running += (1 - decay) * array(value).reshape(shape)
    return (array(y).reshape(x.shape), x_layout, running_mean, running_var,
            array(mean).reshape(shape), None, array(inv_std).reshape(shape), None)


def output(f: BatchNormalization, inputs: tuple[np.ndarray, ...]) -> tuple[object]:
    """Normalize a batch, and store the values that the gradient needs."""
    x, gamma, beta = inputs
    # Chainer handles batches with one sample, about which it warns.
    if (f._impl_selector is not _impl_selector or any(f.input_layouts) or x.size == gamma.size
            or intel64.is_ideep_available()
            or (not isinstance(x, np.ndarray) and chainer.should_use_cudnn('>=auto'))):
        raise Unsupported
    axis = _compute_axis(x.ndim, gamma.ndim, f.axis)
    key_axis, expander = _channels(x.ndim, axis)
    impl = GeneralBatchNormalizationImpl()
    y, _, f.running_mean, f.running_var, f.mean, f.var, f.inv_std, f.forward_data = impl.forward(
        axis, gamma, x, None, chainer.backend.get_array_module(x), expander, beta, f.eps, f.decay,
        f.running_mean, f.running_var)
    f.axis, f.key_axis, f.expander, f._impl = axis, key_axis, expander, impl
    f.retain_inputs((0, 1))
    return y,


def recorded(f: BatchNormalization, x: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor
             ) -> torch.Tensor:
    """Normalize a batch, and update the running statistics in place."""
    shape = gamma.shape
    plan = _plan(x.shape, shape, beta.shape, f.axis)
    mean, var = f.running_mean, f.running_var
    if (plan is None or f._impl_selector is not _impl_selector or intel64.is_ideep_available()
            or x.dtype is not gamma.dtype or beta.dtype is not gamma.dtype
            or (mean is None) != (var is None)):
        raise Unsupported
    is_flat, f.axis, f.key_axis, f.expander = plan
    x_shape = x.shape
    if not is_flat:
        x, gamma, beta = x.reshape(len(x), -1), gamma.flatten(), beta.flatten()
    in_place = None if mean is None else _in_place(mean, var, shape, x, gamma, beta)
    if in_place is not None:
        y, *of_batch = torch.native_batch_norm(
            x, gamma, beta, *in_place, True, 1 - f.decay, f.eps)
    else:
        # With momentum 1, these become the mean and the unbiased variance.
        statistics = torch.zeros(2, len(gamma), dtype=gamma.dtype)
        y, *of_batch = torch.native_batch_norm(
            x, gamma, beta, statistics[0], statistics[1], True, 1., f.eps)
        if mean is not None:
            new_mean, new_var = statistics.numpy() * (1 - f.decay)
            for running, new in (mean, new_mean), (var, new_var):
                running *= f.decay
                running += new if is_flat else new.reshape(shape)
    f._statistics = *of_batch, tuple(shape)
    f.var = f.forward_data = None
    f._impl = _IMPL
    f.retain_inputs((0, 1))
    return y if is_flat else y.reshape(x_shape)


def _in_place(mean: np.ndarray, var: np.ndarray, shape: Shape, *others: torch.Tensor
              ) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return tensors of the running statistics, which PyTorch can update in place.

    The result is ``None`` if the statistics have a different shape, dtype or layout, or if they
    share memory with other arrays.
    """
    if mean.base is not None or var.base is not None or not mean.shape == var.shape == shape:
        return None
    mean_, var_ = shared(mean), shared(var)
    if mean_ is None or var_ is None:
        return None
    addresses = [other.data_ptr() for other in others]
    for t in mean_, var_:
        if t.dtype is not others[0].dtype:
            return None
        # They own their memory, so any array that shares it begins inside it.
        begin = t.data_ptr()
        end = begin + mean.nbytes
        for address in addresses:
            if begin <= address < end:
                return None
    return (mean_, var_) if len(shape) == 1 else (mean_.flatten(), var_.flatten())


@functools.lru_cache(maxsize=1024)
def _plan(x: Shape, gamma: Shape, beta: Shape, axis: tuple[int, ...] | None
          ) -> tuple[bool, tuple[int, ...], tuple[int, ...], Expander] | None:
    """Return the values that depend on shapes; ``None`` if PyTorch does not support the shapes.

    Returns:
        Whether statistics are per channel, the axes that are normalized, the other axes, and an
        index that broadcasts the statistics.
    """
    axis = _compute_axis(len(x), len(gamma), axis)
    expected = x[1:] if axis == (0,) else x[1:2]
    if (axis not in ((0,), (0, *range(2, len(x)))) or gamma != expected or beta != expected
            or math.prod(x) in (0, math.prod(gamma))):  # Chainer warns about one sample
        return None
    return len(gamma) == 1, axis, *_channels(len(x), axis)


def _statistic(index: int) -> functools.cached_property[np.ndarray | None]:
    """Return an attribute that is computed on demand, or assigned by Chainer's own code."""
    def get(f: BatchNormalization) -> np.ndarray | None:
        found = f.__dict__.get('_statistics')
        return None if found is None else array(found[index].detach()).reshape(found[2])

    return functools.cached_property(get)


for _index, _name in enumerate(('mean', 'inv_std')):
    setattr(BatchNormalization, _name, _statistic(_index))
    getattr(BatchNormalization, _name).__set_name__(BatchNormalization, _name)


@functools.lru_cache(maxsize=64)
def _channels(ndim: int, axis: tuple[int, ...]) -> tuple[tuple[int, ...], Expander]:
    """Return the axes that are not normalized, and an index that broadcasts statistics."""
    key_axis = tuple([i for i in range(ndim) if i not in axis])
    return key_axis, tuple([slice(None) if i in key_axis else None for i in range(ndim)])


def backward(impl: GeneralBatchNormalizationImpl, axis: tuple[int, ...], gamma: np.ndarray,
             gy: np.ndarray, x: np.ndarray, x_layout: None, xp: ModuleType, expander: Expander,
             mean: np.ndarray, inv_std: np.ndarray, eps: float, var: None, forward_data: None
             ) -> tuple[np.ndarray | None, ...]:
    """Return the gradients of the input, of gamma and of beta."""
    _check(impl, axis, x, gamma, mean, inv_std)
    gy_, x_, gamma_, mean_, inv_std_ = tensors(
        gy, x, gamma, mean, inv_std, channels_last=gamma.ndim == 1)
    gy_ = like(gy_, x_)
    gx, ggamma, gbeta = aten.native_batch_norm_backward(
        _flat(gy_, gamma_), _flat(x_, gamma_), gamma_.flatten(), None, None, mean_.flatten(),
        inv_std_.flatten(), True, eps, [True, True, True])
    return (array(gx).reshape(x.shape), None, array(ggamma).reshape(gamma.shape),
            array(gbeta).reshape(gamma.shape))


def gradients(f: BatchNormalization, indexes: tuple[int, ...], grad_outputs: of_node.Gradients
              ) -> tuple[Variable, ...]:
    """Return the gradients of all inputs."""
    x, gamma, gy = of_node.arrays(f, grad_outputs)
    gx, _, ggamma, gbeta = backward(
        f._impl, f.axis, gamma, gy, x, None, np, f.expander, f.mean, f.inv_std, f.eps, None, None)
    return of_node.variables(gx, ggamma, gbeta)


def normalize(xp: ModuleType, x: np.ndarray, mean: np.ndarray, inv_std: np.ndarray,
              gamma: np.ndarray, beta: np.ndarray) -> np.ndarray:
    """Normalize with given statistics; all arrays broadcast with ``x``."""
    x_, mean_, inv_std_, gamma_, beta_ = tensors(
        x, mean, inv_std, gamma, beta, channels_last=True)
    return array((x_ - mean_).mul_(inv_std_ * gamma_).add_(beta_))


def statistics(x: np.ndarray, axis: tuple[int, ...], expander: Expander, dtype: np.dtype
               ) -> np.ndarray:
    """Return the number of elements per channel, the means and the variances, as a flat array."""
    x_ = _by_channel(x, axis, dtype)
    mean, var = aten.batch_norm_update_stats(x_, None, None, 0.)
    count = x_.numel() // x_.shape[1]
    return np.concatenate([np.full(1, count, dtype), array(mean), array(var)])


def gradient_sums(gy: np.ndarray, x: np.ndarray, axis: tuple[int, ...], expander: Expander,
                  mean: np.ndarray, inv_std: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return the gradients of beta and gamma, stacked."""
    x_ = _by_channel(x, axis, dtype)
    gy_ = like(_by_channel(gy, axis, dtype), x_)
    mean_, inv_std_ = (t.flatten() for t in tensors(mean, inv_std))
    _, ggamma, gbeta = aten.native_batch_norm_backward(
        gy_, x_, None, None, None, mean_, inv_std_, True, 0., [False, True, True])
    return np.stack([array(gbeta).reshape(mean.shape), array(ggamma).reshape(mean.shape)])


def input_gradient(gy: np.ndarray, x: np.ndarray, expander: Expander, mean: np.ndarray,
                   inv_std: np.ndarray, gamma: np.ndarray, sums: np.ndarray, total: np.ndarray
                   ) -> np.ndarray:
    """Return the gradient of the input, from the sums over all ranks."""
    gbeta, ggamma = sums
    gy_, x_, mean_, scale, slope, shift = tensors(
        gy, x, mean[expander], *(each.astype(x.dtype, copy=False)[expander] for each in (
            gamma * inv_std, -gamma * inv_std ** 2 * ggamma / total,
            -gamma * inv_std * gbeta / total)), channels_last=True)
    return array((x_ - mean_).mul_(slope).addcmul_(gy_, scale).add_(shift))


def _by_channel(x: np.ndarray, axis: tuple[int, ...], dtype: np.dtype) -> torch.Tensor:
    """Return a tensor with the channels in the second axis."""
    if x.size == 0 or x.dtype != dtype or axis not in ((0,), (0, *range(2, x.ndim))):
        raise Unsupported
    x_ = tensor(x, channels_last=axis != (0,))
    return x_.reshape(len(x), -1) if axis == (0,) else x_


def _check(impl: GeneralBatchNormalizationImpl, axis: tuple[int, ...], x: np.ndarray,
           *by_channel: np.ndarray) -> None:
    """Check that PyTorch supports the statistics: per channel, or per element of a sample.

    PyTorch's kernel does not check the shapes of per-channel arrays. Chainer does, unless the
    option ``type_check`` is off.
    """
    # Multi-node batch normalization derives from this class, but computes different statistics.
    is_supported = (type(impl) is GeneralBatchNormalizationImpl and x.size > 0
                    and axis in ((0,), (0, *range(2, x.ndim))))
    shape = x.shape[1:] if axis == (0,) else x.shape[1:2]
    if not is_supported or any(each.shape != shape for each in by_channel):
        raise Unsupported


def _are_plain(*arrays: Any) -> bool:
    """Return whether CuPy arrays are contiguous, have one dtype, and do not share memory."""
    return (all(each is not None and each.dtype == arrays[0].dtype and each.flags.c_contiguous
                for each in arrays) and len({id(each.data.mem) for each in arrays}) == len(arrays))


def _flat(x: torch.Tensor, gamma: torch.Tensor) -> torch.Tensor:
    """Return ``x`` with one axis for all elements that have separate statistics."""
    return x if gamma.ndim == 1 else x.reshape(len(x), -1)
