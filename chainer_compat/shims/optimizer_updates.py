"""Updates of large parameters on the CPU, a block at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from chainer_compat._patch import patch

if TYPE_CHECKING:
    import numpy as np

#: Elements. The temporary arrays of a block stay in the cache of a core.
BLOCK = 1 << 14

#: Rules that compute each element by itself, and change their states in place.
RULES = {
    'chainer.optimizers.ada_delta': 'AdaDeltaRule',
    'chainer.optimizers.ada_grad': 'AdaGradRule',
    'chainer.optimizers.adam': 'AdamRule',
    'chainer.optimizers.corrected_momentum_sgd': 'CorrectedMomentumSGDRule',
    'chainer.optimizers.momentum_sgd': 'MomentumSGDRule',
    'chainer.optimizers.nesterov_ag': 'NesterovAGRule',
    'chainer.optimizers.rmsprop': 'RMSpropRule',
    'chainer.optimizers.rmsprop_graves': 'RMSpropGravesRule',
    'chainer.optimizers.sgd': 'SGDRule',
}


class _Block:
    """A part of a parameter, as update rules use it."""

    def __init__(self, data: np.ndarray, grad: np.ndarray) -> None:
        self.data = data
        self.grad = grad
        self.dtype = data.dtype


@patch(*RULES)
def updates_in_blocks(module: Any) -> None:
    """All versions: an update allocated several arrays as large as the parameter.

    It was memory-bound. Results are bitwise identical.
    """
    rule = getattr(module, RULES[module.__name__])
    rule.update_core_cpu = _in_blocks(rule.update_core_cpu)


def _in_blocks(update: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:

    @functools.wraps(update)
    def update_core_cpu(self: Any, param: Any) -> None:
        whole = self.state
        states = whole or {}
        arrays = [param.data, param.grad, *states.values()]
        if not _is_divisible(arrays):
            return update(self, param)
        data, grad, *flat = [array.reshape(-1) for array in arrays]
        try:
            for start in range(0, data.size, BLOCK):
                part = slice(start, start + BLOCK)
                self._state = {name: state[part] for name, state in zip(states, flat, strict=True)}
                update(self, _Block(data[part], grad[part]))
        finally:
            self._state = whole

    return update_core_cpu


def _is_divisible(arrays: list[Any]) -> bool:
    import numpy as np

    data = arrays[0]
    return all(type(array) is np.ndarray and array.size == data.size > BLOCK
               and array.flags.c_contiguous for array in arrays)
