"""Formulas of Chainer's update rules that allocate no arrays. Results are bitwise identical.

A rule allocates an array for each operation, and looks up its hyperparameters each time. These
formulas use the same operations in the same order, and one array for all intermediate results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array: TypeAlias = NDArray[Any]
    #: Changes data and states in place. The arguments are data, gradient and states, all flat.
    Formula: TypeAlias = Callable[..., None]


class Scratch:
    """An array for intermediate results."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self.dtype = dtype
        self._array = np.empty(0, dtype)

    def __call__(self, size: int) -> Array:
        """Return ``size`` elements with arbitrary values."""
        if self._array.size < size:
            self._array = np.empty(size, self.dtype)
        return self._array if self._array.size == size else self._array[:size]

    def rounded(self, *numbers: float) -> list[Array]:
        """Return numbers in the dtype, rounded once, as NumPy rounds them in each operation."""
        return [np.asarray(number, self.dtype) for number in numbers]


def find(rule: Any, dtype: np.dtype[Any]) -> Formula | None:
    """Return the formula of one of Chainer's rules, or ``None``.

    Args:
        rule: A rule with Chainer's methods, in the step that the formula is for.
        dtype: The dtype of parameters, gradients and states.
    """
    make = _FORMULAS.get((type(rule).__module__, type(rule).__name__))
    return make(rule, Scratch(dtype)) if make is not None and dtype in _DTYPES else None


def _numbers(rule: Any, names: Sequence[str], states: Sequence[str]) -> list[float] | None:
    """Return hyperparameters of a rule that has these states, in this order.

    Returns:
        The hyperparameters; ``None`` if the rule has different states, or if a hyperparameter is
        not a Python number but, for example, a NumPy float64.
    """
    values = [getattr(rule.hyperparam, name) for name in names]
    is_usual = {*map(type, values)} <= {float, int} and [*rule._state] == [*states]
    return values if is_usual else None


def _sgd(rule: Any, scratch: Scratch) -> Formula | None:
    numbers = _numbers(rule, ['lr'], [])
    if numbers is None:
        return None
    lr, = scratch.rounded(*numbers)

    def update(data: Array, grad: Array) -> None:
        step = scratch(data.size)
        np.multiply(lr, grad, out=step)
        np.subtract(data, step, out=data)

    return update


def _momentum_sgd(rule: Any, scratch: Scratch) -> Formula | None:
    numbers = _numbers(rule, ['lr', 'momentum'], ['v'])
    if numbers is None:
        return None
    lr, momentum = scratch.rounded(*numbers)

    def update(data: Array, grad: Array, v: Array) -> None:
        step = scratch(data.size)
        np.multiply(v, momentum, out=v)
        np.multiply(lr, grad, out=step)
        np.subtract(v, step, out=v)
        np.add(data, v, out=data)

    return update


def _adam(rule: Any, scratch: Scratch) -> Formula | None:
    amsgrad = bool(rule.hyperparam.amsgrad)
    numbers = _numbers(rule, ['beta1', 'beta2', 'eps', 'eta', 'weight_decay_rate'],
                       ['m', 'v', 'vhat'][:2 + amsgrad])
    if numbers is None or rule.hyperparam.adabound:
        return None
    beta1, beta2, eps, eta, weight_decay_rate = numbers
    rule._check_eps(rule._state['m'].dtype.type)
    alpha_t = rule.alpha_t
    if type(alpha_t) is not float:
        return None
    has_decay = 1.0 - eta * weight_decay_rate != 1
    decay, rate_of_m, rate_of_v, small, minus_eta, rate = scratch.rounded(
        1.0 - eta * weight_decay_rate, 1.0 - beta1, 1.0 - beta2, eps, -eta, alpha_t)

    def update(data: Array, grad: Array, m: Array, v: Array, *vhat: Array) -> None:
        step = scratch(data.size)
        np.subtract(grad, m, out=step)
        np.multiply(rate_of_m, step, out=step)
        np.add(m, step, out=m)
        np.multiply(grad, grad, out=step)
        np.subtract(step, v, out=step)
        np.multiply(rate_of_v, step, out=step)
        np.add(v, step, out=v)
        if amsgrad:
            np.maximum(vhat[0], v, out=vhat[0])
            v = vhat[0]
        np.sqrt(v, out=step)
        np.add(step, small, out=step)
        np.divide(rate, step, out=step)
        np.multiply(step, m, out=step)
        np.multiply(minus_eta, step, out=step)
        if has_decay:
            np.multiply(decay, data, out=data)
        np.add(data, step, out=data)

    return update


_DTYPES = np.dtype(np.float32), np.dtype(np.float64)

_FORMULAS: dict[tuple[str, str], Callable[[Any, Scratch], Formula | None]] = {
    ('chainer.optimizers.adam', 'AdamRule'): _adam,
    ('chainer.optimizers.momentum_sgd', 'MomentumSGDRule'): _momentum_sgd,
    ('chainer.optimizers.sgd', 'SGDRule'): _sgd}
