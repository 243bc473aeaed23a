"""Random functions. Comparisons replace what they draw with what Chainer drew (``DRAWN``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as N


def simplified_dropconnect(f: Any, x: Any, W: Any, b: Any = None) -> Any:
    """``F.dropout(W)`` for each sample, then ``matmul``."""
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


EXPRESSIONS: dict[str, Callable[..., Any]] = {
    'activation.rrelu.RReLU': lambda f, x: N.rrelu(x, f.lower, f.upper, f.training),
    'noise.dropout.Dropout': lambda f, x: N.dropout(x, f.dropout_ratio, f.training),
    'noise.gaussian.Gaussian':
        lambda f, mean, ln_var: mean + torch.exp(ln_var * .5) * torch.randn_like(mean),
    'noise.simplified_dropconnect.SimplifiedDropconnect': simplified_dropconnect,
    'noise.zoneout.Zoneout': zoneout,
}

#: What the random functions in the graph return for the numbers that Chainer drew.
DRAWN: dict[str, Callable[..., Any]] = {
    'activation.rrelu.RReLU': lambda f, x: torch.where(x >= 0, x, x * torch.from_numpy(f.r)),
    'noise.dropout.Dropout': lambda f, x: x * torch.from_numpy(f.mask),
    'noise.gaussian.Gaussian': lambda f, mean: torch.from_numpy(f.eps),
    'noise.simplified_dropconnect.SimplifiedDropconnect':
        lambda f, W: W * torch.from_numpy(np.asarray(f.mask)) / (1 - f.ratio),
    'noise.zoneout.Zoneout': lambda f, ones: torch.from_numpy(f.flag_x).to(ones.dtype),
}

#: The random functions of the graph.
RANDOM = frozenset({N.dropout, N.rrelu, torch.randn_like})
