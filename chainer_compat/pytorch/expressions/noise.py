"""Random functions. Comparisons replace their numbers with the numbers that Chainer drew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import chainer
import numpy as np
import torch
import torch.nn.functional as N

from chainer_compat.pytorch.tensors.arrays import Expression, check_floats, tensor
from chainer_compat.pytorch.unsupported import Unsupported


def rrelu(f: Any, x: Any) -> Any:
    """``F.rrelu(x, lower, upper, training)``."""
    if f.is_given:
        raise NotImplementedError('r as an argument')
    return N.rrelu(x, f.lower, f.upper, f.training)


def simplified_dropconnect(f: Any, x: Any, W: Any, b: Any = None) -> Any:
    """``F.dropout(W)`` for each sample, then ``matmul``."""
    if f.is_given:
        raise NotImplementedError('mask as an argument')
    x = x.flatten(1)
    if f.use_batchwise_mask:
        W = W.expand(f.in_shapes[0][0], *f.in_shapes[1])
    W = N.dropout(W, f.ratio, True)
    y = torch.matmul(W, x.unsqueeze(2)).squeeze(2)
    return y if b is None else y + b


def zoneout(f: Any, h: Any, x: Any) -> Any:
    """``torch.where(F.dropout(ones, ratio) > 0, x, h)``."""
    is_new = N.dropout(torch.ones_like(x), f.zoneout_ratio, f.training) > 0
    return torch.where(is_new, x, h)


def negative_sampling(f: Any, x: Any, t: Any, W: Any) -> Any:
    """``F.softplus`` of ``-x @ W[t]`` and of ``x @ W[samples]``, by ``torch.multinomial``."""
    table = getattr(f.raw('sampler'), '__self__', None)
    if not isinstance(table, chainer.utils.WalkerAlias):
        raise NotImplementedError('a sampler other than WalkerAlias, because it runs Python code')
    n = len(table.threshold)
    p = np.bincount(table.values[::2], table.threshold, n) + np.bincount(
        table.values[1::2], 1 - table.threshold, n)
    count = f.in_shapes[0][0]
    drawn = torch.multinomial(f.constant(p.astype('f')), count * f.sample_size, True)
    samples = torch.cat([t.long().unsqueeze(1), drawn.long().reshape(count, f.sample_size)], 1)
    signs = f.constant(np.array([-1] + [1] * f.sample_size, f.in_dtypes[0]))
    scores = (W[samples] * x.unsqueeze(1)).sum(2) * signs
    loss = torch.logaddexp(scores, torch.zeros_like(scores)).sum(1)
    loss = torch.where(t != f.ignore_label, loss, torch.zeros_like(loss))
    return loss.sum() if f.reduce == 'sum' else loss


EXPRESSIONS: dict[str, Callable[..., Any]] = {
    'activation.rrelu.RReLU': rrelu,
    'loss.negative_sampling.NegativeSamplingFunction': negative_sampling,
    'noise.dropout.Dropout':
        lambda f, x: x * f.mask if f.is_given else N.dropout(x, f.dropout_ratio, f.training),
    'noise.gaussian.Gaussian': lambda f, mean, ln_var: mean + torch.exp(ln_var * .5) * (
        f.eps if f.is_given else torch.randn_like(mean)),
    'noise.simplified_dropconnect.SimplifiedDropconnect': simplified_dropconnect,
    'noise.zoneout.Zoneout': zoneout,
}

#: The results of the random functions in the graph, computed from the numbers that Chainer drew.
DRAWN: dict[str, Callable[..., Any]] = {
    'activation.rrelu.RReLU': lambda f, x: torch.where(x >= 0, x, x * torch.from_numpy(f.r)),
    'loss.negative_sampling.NegativeSamplingFunction':
        lambda f, p: torch.from_numpy(f.samples[:, 1:].reshape(-1)),
    'noise.dropout.Dropout': lambda f, x: x * torch.from_numpy(f.mask),
    'noise.gaussian.Gaussian': lambda f, mean: torch.from_numpy(f.eps),
    'noise.simplified_dropconnect.SimplifiedDropconnect':
        lambda f, W: W * torch.from_numpy(np.asarray(f.mask)) / (1 - f.ratio),
    'noise.zoneout.Zoneout': lambda f, ones: torch.from_numpy(f.flag_x).to(ones.dtype),
    'numpy.random.random_sample': lambda f, shape: torch.from_numpy(f.drawn),
    'numpy.random.standard_normal': lambda f, shape: torch.from_numpy(f.drawn),
}

#: The random functions of the graph.
RANDOM = frozenset({N.dropout, N.rrelu, torch.multinomial, torch.rand, torch.randn,
                    torch.randn_like})

#: Attributes that are set before the function runs if user code passed the random numbers.
GIVEN = {'Dropout': 'mask', 'Gaussian': 'eps', 'RReLU': 'r', 'SimplifiedDropconnect': 'mask'}


def run_dropout(f: Any, x: torch.Tensor) -> torch.Tensor:
    """``x * mask``, with Chainer's random numbers."""
    check_floats(x)
    if f.mask is not None:
        raise Unsupported
    like = x.detach().numpy()
    is_used = np.random.rand(*x.shape) >= f.dropout_ratio
    scale = like.dtype.type(1 / (1 - f.dropout_ratio))
    f.mask = np.multiply(is_used, scale, out=np.empty_like(like))  # in the memory format of x
    return x * tensor(f.mask, channels_last=True)


RECORDED: dict[str, Expression] = {'noise.dropout.Dropout': run_dropout}
