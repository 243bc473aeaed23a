"""Chainer's formulas for PyTorch, where ``torch.optim`` uses different ones.

They only use PyTorch, because ``export --training`` copies their source into ``train.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch


def eps_before_correction(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Make Adam add ``eps`` before it corrects the bias, and count every step, like Chainer.

    This is a hook for ``register_step_pre_hook``.
    """
    for group in optimizer.param_groups:
        group['t'] += 1
        group['eps'] = group['chainer_eps'] / math.sqrt(1 - group['betas'][1] ** group['t'])
        for p in group['params']:
            optimizer.state[p]['step'].fill_(group['t'] - 1)


class NesterovAG(torch.optim.Optimizer):
    """Chainer's accelerated gradient, which looks further ahead than ``torch.optim.SGD``."""

    def __init__(self, params: Any, lr: float = .01, momentum: float = .9) -> None:
        super().__init__(params, {'lr': lr, 'momentum': momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            lr, momentum = group['lr'], group['momentum']
            for p in group['params']:
                if p.grad is not None:
                    v = self.state[p]['v']
                    v.mul_(momentum).sub_(p.grad, alpha=lr)
                    p.add_(v, alpha=momentum ** 2).sub_(p.grad, alpha=(1 + momentum) * lr)
        return loss
