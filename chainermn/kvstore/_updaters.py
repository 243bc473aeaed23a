"""What a server does with what was pushed: assign it, or step an optimizer."""
from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import chainer
import numpy as np
from chainer import optimizer_hooks

from chainermn.kvstore._layout import Key, Layout

# Hooks that treat each element by itself, so that they can be called for a part of a parameter.
_ELEMENTWISE_HOOKS = (optimizer_hooks.WeightDecay, optimizer_hooks.Lasso,
                      optimizer_hooks.GradientHardClipping, optimizer_hooks.GradientNoise)


def assign(key: Key, input: Any, stored: Any) -> None:
    """The updater of a store that was given none."""
    stored[...] = input


class OptimizerUpdater:
    """An updater that lets a Chainer optimizer step, with what was pushed as the gradient.

    Hyperparameters and hooks are read from the optimizer at each step; it may be set up with a
    model, which is not touched.

    Args:
        optimizer: ``chainer.optimizer.GradientMethod``.
        rescale_grad: Number by which what was pushed is multiplied.
    """

    def __init__(self, optimizer: Any, rescale_grad: float = 1.) -> None:
        if not isinstance(optimizer, chainer.optimizer.GradientMethod):
            raise TypeError('set_optimizer takes an optimizer of Chainer with update rules '
                            f'(chainer.optimizer.GradientMethod), not {optimizer!r}')
        self.optimizer = optimizer
        self.rescale_grad = float(rescale_grad)
        self._rules: dict[Key, Any] = {}
        list(self._hooks('pre')), list(self._hooks('post'))  # may refuse

    @property
    def is_elementwise(self) -> bool:
        """Whether a parameter may be updated in parts."""
        hooks = [*self._hooks('pre'), *self._hooks('post')]
        return (self.optimizer.create_update_rule().is_elementwise
                and all(type(hook) in _ELEMENTWISE_HOOKS for hook in hooks))

    def __call__(self, key: Key, input: Any, stored: Any) -> None:
        """Updates ``stored`` in place.  ``input`` may be overwritten."""
        rule = self._rules.get(key)
        if rule is None:
            rule = self._rules[key] = self._new_rule()
        if self.rescale_grad != 1:
            input *= input.dtype.type(self.rescale_grad)
        parameter = chainer.Parameter(stored)
        parameter.grad = input
        for hook in self._hooks('pre'):
            hook(rule, parameter)
        rule.update(parameter)
        for hook in self._hooks('post'):
            hook(rule, parameter)
        if parameter.array is not stored:
            stored[...] = parameter.array

    def states(self) -> dict[Key, dict[str, Any]]:
        """Returns the states of all keys that were updated."""
        return {key: {'t': rule.t, **{name: chainer.cuda.to_cpu(value) if hasattr(value, 'shape')
                                      else value for name, value in (rule.state or {}).items()}}
                for key, rule in self._rules.items()}

    def check(self, layout: Layout, state: Mapping[str, Any]) -> None:
        """Raises ValueError if these are not the states of a key."""
        needed = {'t': 0, **self._rule_with_states(np.zeros(layout.shape, layout.dtype)).state}
        if set(needed) != set(state):
            raise ValueError(f'the states of key {layout.key!r} are {sorted(state)}, but those of '
                             f'{type(self.optimizer).__name__} are {sorted(needed)}')
        for name, value in needed.items():
            if np.shape(value) != np.shape(state[name]):
                raise ValueError(f'the state {name!r} of key {layout.key!r} has the shape '
                                 f'{np.shape(state[name])}, not {np.shape(value)}')

    def restore(self, key: Key, stored: Any, state: Mapping[str, Any]) -> None:
        """Sets the state of a key; ``stored`` is what the server has of its array."""
        rule = self._rule_with_states(stored)
        device = chainer.backend.get_device_from_array(stored)
        for name, value in rule.state.items():
            rule.state[name] = device.send(state[name].astype(value.dtype)) \
                if hasattr(value, 'dtype') else type(value)(state[name])
        rule.t = int(state['t'])
        self._rules[key] = rule

    def _rule_with_states(self, stored: Any) -> Any:
        rule = self._new_rule()
        if rule._use_fp32_update and stored.dtype == np.float16:
            stored = stored.astype(np.float32)  # as the rule's own copy is
        parameter = chainer.Parameter(stored)
        parameter.grad = chainer.backend.get_array_module(stored).zeros_like(stored)
        rule._init_states(parameter)
        return rule

    def _new_rule(self) -> Any:
        rule = self.optimizer.create_update_rule()
        if self.optimizer._use_fp32_update:
            rule.use_fp32_update()
        return rule

    def _hooks(self, timing: str) -> Iterator[Any]:
        hookable = self.optimizer._hookable  # None if it is not set up
        for name, hook in getattr(hookable, f'_{timing}_update_hooks', {}).items():
            if not getattr(hook, 'call_for_each_param', False):
                raise ValueError(
                    f'the hook {name!r} of the optimizer needs all parameters at once, but a '
                    'server has some of them; remove the hook, or update on the workers '
                    '(create_kvstore_optimizer(..., update_on_kvstore=False))')
            yield hook


def describe(optimizer: Any) -> dict[str, Any]:
    """The class and the hyperparameters of an optimizer, as plain data."""
    values = optimizer.hyperparam.get_dict()
    return {'optimizer': f'{type(optimizer).__module__}.{type(optimizer).__qualname__}',
            'hyperparameters': {name: value.item() if isinstance(value, np.generic) else value
                                for name, value in sorted(values.items())}}
