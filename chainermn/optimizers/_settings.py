"""The settings of an optimizer, such as the learning rate, which must be equal on all ranks.

If they differ, replicas drift apart.  So the ranks compare a digest of them at each exchange, in
the message that starts it anyway.  The digest is computed again only if a setting has changed.
"""
from __future__ import annotations

import math
import zlib
from collections.abc import Iterable

import numpy as np
from chainer import optimizer_hooks

from chainermn._signature import Caller
from chainermn._types import Object, Optimizer, Parameter

#: Parameters with their paths, sorted.
Named = list[tuple[str, Parameter]]
#: Hooks, by name.
Hooks = dict[str, Object]

_USUAL = 'enabled'  # the settings of most parameters
_ODD = 0x9E3779B1  # spreads a number over 32 bits


class OptimizerSettings:
    """The settings of one optimizer.

    These are its hyperparameters, loss scale and hooks, those of single parameters, the disabled
    parameters, and ``t``, which differs if only some ranks have loaded a snapshot.  Of a hook they
    contain its name, and the numbers in it if it is one of Chainer's.

    Args:
        actual_optimizer: The optimizer.
        caller: The caller of the exchange.
    """

    def __init__(self, actual_optimizer: Optimizer, caller: Caller) -> None:
        self._optimizer = actual_optimizer
        self._caller = caller
        self._named: Named = []
        self._rules: list[Object] = []  # of the parameters that have one
        self._hyperparams: list[dict[str, Object]] = []  # of these rules
        self._hooks: list[Hooks] = []  # before and after an update of each of these rules
        self._seen: tuple[list[Object], list[Object]] = [], []
        self._digest_of_others = self._digest = 0

    def forget(self) -> None:
        """Let the ranks compare no settings."""
        self._seen = [], []
        self._caller.set_state(0, dict)

    def compare(self, named: Named) -> None:
        """Let the ranks compare the current settings in their next exchange.

        Args:
            named: All parameters with their paths, sorted.
        """
        optimizer = self._optimizer
        rules = [rule for _, param in named if (rule := param.update_rule) is not None]
        if rules != self._rules:
            self._rules = rules
            self._hyperparams = [vars(rule.hyperparam) for rule in rules]
            self._hooks = [hooks for rule in rules for hooks in _hooks(rule)]
        self._named = named
        before, after = _hooks(optimizer)
        numbers = [optimizer._loss_scale, *vars(optimizer.hyperparam).values()]
        others = [
            optimizer._use_fp32_update, [*before], [*after], [rule.enabled for rule in rules],
            [(n, *values.values()) for n, values in enumerate(self._hyperparams)
             if len(values) > 1],  # one is the parent
            [(n, *hooks) for n, hooks in enumerate(self._hooks) if hooks],
            [_numbers_of(hook) for hooks in (before, after) if hooks for hook in hooks.values()]]
        seen_numbers, seen_others = self._seen
        has_changed = not _are_equal(others, seen_others)
        if has_changed or not _are_equal(numbers, seen_numbers):
            if has_changed:
                # Not what all parameters have: different models have an error of their own.
                special = [item for item in self._other_texts().items() if item[1] != _USUAL]
                self._digest_of_others = zlib.crc32(repr(special).encode())
            self._seen = numbers, others
            self._digest = hash((self._digest_of_others, *map(_comparable, numbers)))
        self._caller.set_state(self._digest ^ optimizer.t * _ODD, self._texts)

    def _texts(self) -> dict[str, str]:
        """Return all settings by name."""
        optimizer = self._optimizer
        numbers = {'t': optimizer.t, 'loss scale': optimizer._loss_scale,
                   **_own(optimizer.hyperparam)}
        return {name: _text(value) for name, value in numbers.items()} | self._other_texts()

    def _other_texts(self) -> dict[str, str]:
        texts = {'use_fp32_update': str(self._optimizer._use_fp32_update)}
        for name, hooks in zip(('hooks', 'hooks after updates'), _hooks(self._optimizer),
                               strict=True):
            texts[name] = _listed(f'{name}{_arguments(_numbers_of(hook))}'
                                  for name, hook in hooks.items())
        for path, param in self._named:
            rule = param.update_rule
            if rule is not None:
                before, after = _hooks(rule)
                texts[f'update of {path}'] = ', '.join([
                    _USUAL if rule.enabled else 'disabled',
                    *(f'{name} {_text(value)}' for name, value in _own(rule.hyperparam).items()),
                    *(f'hook {name}' for name in (*before, *after))])
        return texts


def _hooks(hookable: Object) -> tuple[Hooks, Hooks]:
    """Return the hooks of an optimizer or update rule: those before and after an update."""
    hooks = hookable._hookable
    return hooks._pre_update_hooks, hooks._post_update_hooks


def _own(hyperparam: Object) -> dict[str, Object]:
    """Return the hyperparameters that are not those of the parent."""
    return {name: value for name, value in vars(hyperparam).items() if name != '_parent'}


def _numbers_of(hook: Object) -> dict[str, Object]:
    """Return what decides how a hook of Chainer changes gradients; others may hold anything."""
    if not type(hook).__module__.startswith('chainer.optimizer_hooks.'):
        return {}
    numbers = {name: value for name, value in vars(hook).items() if _is_comparable(value)}
    if isinstance(hook, optimizer_hooks.GradientNoise):
        numbers['state of numpy.random'] = _random_state()
    return numbers


def _random_state() -> int:
    """Return a digest of the state from which hooks draw on the CPU."""
    _, keys, position, _, _ = np.random.get_state(legacy=True)
    return zlib.crc32(np.asarray(keys).tobytes(), int(position))


def _are_equal(values: list[Object], others: list[Object]) -> bool:
    """Compare lists.  Arrays in them are equal if they are the same object."""
    try:
        return values == others
    except ValueError:
        return False


def _is_comparable(value: Object) -> bool:
    return value is None or isinstance(value, (int, float, str, np.number, np.bool_))


def _comparable(value: Object) -> float:
    """Return a number whose hash is equal on all ranks."""
    if isinstance(value, str):
        return zlib.crc32(value.encode())
    if value is None or not _is_comparable(value) or math.isnan(value):
        return -1
    return value


def _text(value: Object) -> str:
    if isinstance(value, np.generic):
        value = value.item()
    return str(value) if _is_comparable(value) else 'an object'


def _listed(texts: Iterable[str]) -> str:
    return ', '.join(texts) or 'none'


def _arguments(values: dict[str, Object]) -> str:
    return f'({_listed(f"{name}={_text(value)}" for name, value in values.items())})' * bool(values)
