"""The settings of an optimizer, such as the learning rate, which must be equal on all ranks.

If they differ, replicas drift apart.  So the ranks compare a digest of them at each exchange, in
the message that starts it anyway.  The digest is computed again only if a setting has changed.
"""
from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator

import chainer
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
_LARGEST = 1024  # elements of an array that is compared

_HOOKS_OF_CHAINER = (
    optimizer_hooks.GradientClipping, optimizer_hooks.GradientHardClipping,
    optimizer_hooks.GradientLARS, optimizer_hooks.GradientNoise, optimizer_hooks.Lasso,
    optimizer_hooks.WeightDecay)
#: Their attributes; a subclass may have others, which may differ between ranks.
_ARGUMENTS = ('rate', 'threshold', 'lower_bound', 'upper_bound', 'weight_decay', 'eps', 'eta')


class OptimizerSettings:
    """The settings of one optimizer.

    These are its hyperparameters, loss scale and hooks, its update rules and those of single
    parameters, the disabled parameters, and ``t``, which differs if only some ranks have loaded a
    snapshot; without states, as in SGD, ``t`` does not matter.  Hooks of the program may only read,
    for example to write a log, so ranks whose hooks differ are only warned.

    Args:
        actual_optimizer: The optimizer.
        caller: The caller of the exchange.
    """

    def __init__(self, actual_optimizer: Optimizer, caller: Caller) -> None:
        self._optimizer = actual_optimizer
        self._caller = caller
        self._named: Named = []
        self._usual_lengths: list[int] = []
        self._rules: list[Object] = []
        self._of_chainer: list[chainer.UpdateRule] = []  # those of them that have settings
        self._dicts: list[dict[str, Object]] = []  # hyperparameters and hooks of these
        self._has_state = False
        self._seen: list[Object] = []
        self._seen_others: list[Object] = []
        self._digest_of_others = self._digest_of_hooks = self._digest = 0

    @staticmethod
    def are_known(optimizer: Optimizer) -> bool:
        """Return whether an optimizer has the settings of Chainer's."""
        return hasattr(getattr(optimizer, 'hyperparam', None), '__dict__') and all(
            hasattr(optimizer, name) for name in ('t', '_loss_scale', '_use_fp32_update',
                                                  '_hookable'))

    def forget(self) -> None:
        """Let the ranks compare no settings."""
        self._seen, self._seen_others = [], []
        self._caller.set_state(dict, dict)
        self._caller.set_digests(0, 0)

    def compare(self, named: Named, with_t: bool = True) -> None:
        """Let the ranks compare the current settings in their next exchange.

        Args:
            named: All parameters with their paths, sorted.
            with_t: Whether ``t`` must be equal, if the rules have states.
        """
        optimizer = self._optimizer
        rules = [param.update_rule for _, param in named]
        if rules != self._rules:
            self._note_rules(rules)
        self._named = named
        lengths = [*map(len, self._dicts)]
        others = [rules, [rule.enabled for rule in self._of_chainer], optimizer._use_fp32_update,
                  lengths]
        before, after = _hooks(optimizer)
        if before or after:
            others += [*before.items(), None, *after.items()]
            others += [_arguments(hook) for hooks in (before, after) for hook in hooks.values()]
        if lengths != self._usual_lengths:
            others += [[*values.values()] for values in self._dicts]
        seen = [optimizer._loss_scale, *vars(optimizer.hyperparam).values(), others]
        if not _are_equal(seen, self._seen):
            self._note_change(others)
            self._seen = seen
            numbers = [float(value) if isinstance(value, int) else value  # 1 equals 1.0
                       for value in map(_comparable, seen[:-1])]
            self._digest = zlib.crc32(repr(numbers).encode(), self._digest_of_others)
        elif not self._has_state:
            return
        t = optimizer.t if self._has_state and with_t else 0
        self._caller.set_digests(self._digest ^ t * _ODD, self._digest_of_hooks)

    def _note_rules(self, rules: list[Object]) -> None:
        self._rules = rules
        self._of_chainer = [rule for rule in rules if isinstance(rule, chainer.UpdateRule)]
        self._dicts = [values for rule in self._of_chainer
                       for values in (vars(rule.hyperparam), *_hooks(rule))]
        self._usual_lengths = [1, 0, 0] * len(self._of_chainer)  # a rule knows its parent
        self._has_state = any(type(rule).init_state is not chainer.UpdateRule.init_state
                              for rule in self._of_chainer)

    def _note_change(self, others: list[Object]) -> None:
        """Compute the digest of settings other than numbers, if one of these has changed."""
        if self._seen and _are_equal(others, self._seen_others):
            return
        self._seen_others = others
        # Not what all parameters have: different models have an error of their own.
        special = [item for item in self._other_texts().items() if item[1] != _USUAL]
        self._digest_of_others = zlib.crc32(repr(special).encode())
        self._digest_of_hooks = zlib.crc32(repr(self._hooks_of_program()).encode())
        self._caller.set_state(self._texts, self._hooks_of_program)

    def _texts(self) -> dict[str, str]:
        """Return all settings by name."""
        optimizer = self._optimizer
        numbers = {'t': optimizer.t if self._has_state else None,
                   'loss scale': optimizer._loss_scale, **_own(optimizer.hyperparam)}
        return {name: _text(value) for name, value in numbers.items()} | self._other_texts()

    def _other_texts(self) -> dict[str, str]:
        texts = {'use_fp32_update': str(self._optimizer._use_fp32_update),
                 'update rules': _listed(sorted({
                     type(rule).__qualname__ for rule in self._rules if rule is not None}))}
        for name, hooks in zip(('hooks', 'hooks after updates'), _hooks(self._optimizer),
                               strict=True):
            texts[name] = _listed(_described(hooks))
        for path, param in self._named:
            rule = param.update_rule
            if not isinstance(rule, chainer.UpdateRule):
                texts[f'update of {path}'] = 'no update rule of Chainer'
                continue
            texts[f'update of {path}'] = ', '.join([
                _USUAL if rule.enabled else 'disabled',
                *(f'{name} {_text(value)}' for name, value in _own(rule.hyperparam).items()),
                *(f'hook {text}' for hooks in _hooks(rule) for text in _described(hooks))])
        return texts

    def _hooks_of_program(self) -> dict[str, str]:
        """Return the hooks that are not Chainer's."""
        texts = {}
        for name, hooks in zip(('hooks', 'hooks after updates'), _hooks(self._optimizer),
                               strict=True):
            texts[name] = _listed(_others(hooks))
        for path, param in self._named:
            if isinstance(param.update_rule, chainer.UpdateRule) and (
                    names := [name for hooks in _hooks(param.update_rule)
                              for name in _others(hooks)]):
                texts[f'hooks of {path}'] = _listed(names)
        return texts


def _hooks(hookable: Object) -> tuple[Hooks, Hooks]:
    """Return the hooks of an optimizer or update rule: those before and after an update."""
    hooks = hookable._hookable
    return hooks._pre_update_hooks, hooks._post_update_hooks


def _described(hooks: Hooks) -> Iterator[str]:
    """Describe the hooks that are Chainer's."""
    for name, hook in hooks.items():
        if isinstance(hook, _HOOKS_OF_CHAINER):
            values = _listed(f'{key}={_text(value)}' for key, value in _arguments(hook).items())
            kind = type(hook).__name__
            yield f'{"" if name == kind else f"{name}: "}{kind}({values})'


def _others(hooks: Hooks) -> Iterator[str]:
    """Return the names of the hooks that are not Chainer's."""
    for name, hook in hooks.items():
        if not isinstance(hook, _HOOKS_OF_CHAINER):
            yield str(name)


def _arguments(hook: Object) -> dict[str, Object]:
    """Return the numbers with which a hook of Chainer changes gradients."""
    if not isinstance(hook, _HOOKS_OF_CHAINER):
        return {}
    arguments = {name: _comparable(vars(hook)[name]) for name in _ARGUMENTS if name in vars(hook)}
    if isinstance(hook, optimizer_hooks.GradientNoise) and (
            hook.noise_func.__module__ == optimizer_hooks.GradientNoise.__module__):
        arguments['state of numpy.random, which needs equal seeds'] = _random_state()
    return arguments


def _random_state() -> int:
    """Return a digest of the state from which Chainer draws noise on the CPU."""
    _, keys, position, _, _ = np.random.get_state(legacy=True)
    return zlib.crc32(np.asarray(keys).tobytes(), int(position))


def _own(hyperparam: Object) -> dict[str, Object]:
    """Return the hyperparameters that are not those of the parent."""
    return {name: value for name, value in vars(hyperparam).items() if name != '_parent'}


def _are_equal(values: list[Object], others: list[Object]) -> bool:
    """Compare lists.  What cannot be compared, such as an array, is equal if it is the same."""
    try:
        return values == others
    except Exception:
        return False


def _comparable(value: Object) -> Object:
    """Return a value whose ``repr`` is equal on all ranks, unless the setting differs."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray) and value.size <= _LARGEST and not value.dtype.hasobject:
        return f'array {zlib.crc32(value.tobytes())}' if value.ndim else value.item()
    if isinstance(value, (tuple, list)):
        return [*map(_comparable, value)]
    return value if value is None or isinstance(value, (int, float, str)) else 'an object'


def _text(value: Object) -> str:
    return str(_comparable(value))


def _listed(texts: Iterable[str]) -> str:
    return ', '.join(texts) or 'none'
