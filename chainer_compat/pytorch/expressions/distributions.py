"""Functions of ``chainer.distributions`` and ``chainer.links``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch


def bernoulli_log_prob(f: Any, logit: Any, x: Any) -> Any:
    """``logit * (x - 1) - F.softplus(-logit)``, for finite logits."""
    x = x.detach()  # as in Chainer
    y = logit * (x - 1) - torch.logaddexp(-logit, torch.zeros_like(logit))
    if not f.binary_check:
        return y
    return torch.where((x != 0) & (x != 1), torch.full_like(y, float('-inf')), y)


def hierarchical_softmax(f: Any, x: Any, t: Any, W: Any) -> Any:
    """``F.softplus(-(x * W[path]).sum() * code)``, with the path of each label, padded."""
    begins, paths, codes = (f.raw(name) for name in ('begins', 'paths', 'codes'))
    lengths = np.diff(begins)
    table = np.zeros((len(lengths), lengths.max()), np.int64)
    signs = np.zeros(table.shape, codes.dtype)
    for label, (begin, length) in enumerate(zip(begins, lengths, strict=False)):
        table[label, :length] = paths[begin:begin + length]
        signs[label, :length] = codes[begin:begin + length]
    t = t.long()
    path, code = f.constant(table)[t], f.constant(signs)[t]
    scores = (W[path] * x.unsqueeze(1)).sum(2) * code
    loss = torch.logaddexp(-scores, torch.zeros_like(scores))
    return torch.where(code != 0, loss, torch.zeros_like(loss)).sum()


def triangular_inverse(f: Any, x: Any) -> Any:
    """``torch.linalg.solve_triangular(x, eye, upper=not lower)``."""
    eye = f.constant(np.eye(f.in_shapes[0][0], dtype=f.in_dtypes[0]))
    return torch.linalg.solve_triangular(x, eye, upper=not f._lower)


EXPRESSIONS: dict[str, Callable[..., Any]] = {
    'chainer.distributions.bernoulli.BernoulliLogProb': bernoulli_log_prob,
    'chainer.distributions.laplace.LaplaceCDF':
        lambda f, x: .5 - .5 * torch.sign(x) * torch.expm1(-torch.abs(x)),
    'chainer.distributions.laplace.LaplaceICDF':
        lambda f, x: torch.sign(1 - 2 * x) * torch.log1p(-torch.abs(1 - 2 * x)),
    'chainer.distributions.multivariate_normal.TriangularInv': triangular_inverse,
    'chainer.distributions.utils.ModifiedXLogX': lambda f, x: torch.xlogy(x, x),
    'chainer.links.loss.hierarchical_softmax.BinaryHierarchicalSoftmaxFunction':
        hierarchical_softmax,
}
