"""OptimizerUpdater: updates arrays of a store with a Chainer optimizer."""
from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from typing import Any, NamedTuple, TypeAlias

import chainer
import numpy as np
from chainer import optimizer_hooks

from chainer_compat.updates import one_pass, update_hooks
from chainermn.kvstore import _arguments
from chainermn.kvstore._optimizer_states import OptimizerState
from chainermn.kvstore._sharding import Key, KeyLayout
from chainermn.kvstore.row_sparse import Array
from chainermn.optimizers import is_elementwise
from chainermn.optimizers.proxy import OptimizerSettings

_Hook: TypeAlias = Callable[[chainer.optimizer.UpdateRule, chainer.Parameter], object]

# Hooks that treat each element independently, so they can be called for a shard.
_ELEMENTWISE_HOOKS = (optimizer_hooks.WeightDecay, optimizer_hooks.Lasso,
                      optimizer_hooks.GradientHardClipping, optimizer_hooks.GradientNoise)

#: Name of the float32 copy (use_fp32_update) of a float16 array among the states.
_COPY = 'fp32_param'


class KeyUpdate(NamedTuple):
    """The update of an array."""

    key: Key
    #: The gradient, with the dtype ``OptimizerUpdater.gradient_dtype``. It may be overwritten.
    pushed: Array
    stored: Array


class OptimizerUpdater:
    """Applies a Chainer optimizer, with the pushed values as gradients.

    Hyperparameters and hooks are read from the optimizer at each update. The optimizer may be set
    up with a model, which is not changed.

    Args:
        optimizer: The optimizer.
        rescale_grad: Factor by which the server multiplies the sum of the gradients.
        compare_settings: Whether ranks compare the settings of the optimizer in each push.

    Raises:
        TypeError: If ``optimizer`` has no update rules.
        ValueError: If a hook needs all parameters together.
    """

    def __init__(self, optimizer: chainer.optimizer.GradientMethod, rescale_grad: float = 1.,
                 compare_settings: bool = True) -> None:
        _arguments.check_optimizer(optimizer, 'set_optimizer needs a Chainer optimizer with '
                                   'update rules (chainer.optimizer.GradientMethod)')
        self.optimizer = optimizer
        self.rescale_grad = float(rescale_grad)
        self.settings = OptimizerSettings(
            optimizer, 'the optimizer of the KVStore', 'set_optimizer',
            is_compared=compare_settings)
        #: Whether gradients are multiplied by the loss scale of the optimizer.
        self.is_loss_scaled = False
        #: How many times a key is updated with each gradient, if not once.
        self.repeats: dict[Key, int] = {}
        #: Keys for which only the hooks are called.
        self.disabled: Set[Key] = frozenset()
        #: Number of updates before the first gradient of a key.
        self.starts: dict[Key, int] = {}
        #: Called with the states by key when a file of states was loaded.
        self.on_load: Callable[[Mapping[Key, OptimizerState]], object] = lambda states: None
        self._rules: dict[Key, chainer.optimizer.UpdateRule] = {}
        self._parameters: dict[Key, chainer.Parameter] = {}
        rule = self.new_rule()
        self._is_rule_elementwise = is_elementwise(rule) and not (
            rule._hookable._pre_update_hooks or rule._hookable._post_update_hooks)
        self._hooks('pre'), self._hooks('post')  # these may raise an error

    @property
    def is_elementwise(self) -> bool:
        """Whether shards of a parameter can be updated independently."""
        hooks = [*self._hooks('pre'), *self._hooks('post')]
        return self._is_rule_elementwise and all(
            type(hook) in _ELEMENTWISE_HOOKS for hook in hooks)

    @property
    def has_hooks(self) -> bool:
        """Whether the optimizer has hooks."""
        return bool([*self._hooks('pre'), *self._hooks('post')])

    def check(self, layout: KeyLayout) -> None:
        """Raise an error if the optimizer cannot update an array."""
        if layout.dtype.kind != 'f':
            raise TypeError(f'key {layout.key!r} has dtype {layout.dtype}, but optimizers only '
                            'update floating-point arrays. Use another store for this key.')
        if layout.is_split and not self.is_elementwise:
            raise ValueError(f'a hook of the optimizer cannot update shards of {layout}. Add the '
                             'hook before init, or create the store with a larger '
                             'bigarray_bound.')

    def gradient_dtype(self, key: Key, dtype: np.dtype) -> np.dtype:
        """Return the dtype of the gradients: float32 if a float32 copy of the array is updated."""
        is_copied = dtype == np.float16 and self._rule(key)._use_fp32_update
        return np.dtype(np.float32) if is_copied else dtype

    def update(self, key_updates: Sequence[KeyUpdate]) -> None:
        """Update arrays in place, in one pass, as ``Optimizer.update`` does.

        Args:
            key_updates: The updates, at most one for each array.
        """
        parameters = [(self._parameter(update), range(self.repeats.get(update.key, 1)))
                      for update in key_updates]
        self._call_hooks('pre', parameters)
        for n in range(max([len(times) for _, times in parameters], default=0)):
            one_pass.update([parameter for parameter, times in parameters if n in times],
                           is_repeated=True)
        self._call_hooks('post', parameters)
        for (parameter, _), update in zip(parameters, key_updates, strict=True):
            parameter.grad = None
            if parameter.array is not update.stored:
                update.stored[...] = parameter.array

    def _parameter(self, update: KeyUpdate) -> chainer.Parameter:
        """Return a parameter with the array, its gradient and its rule. It is cached."""
        key, pushed, stored = update
        parameter = self._parameters.get(key)
        if parameter is None or parameter.array is not stored:
            is_usual = self.gradient_dtype(key, stored.dtype) == stored.dtype
            parameter = (chainer.Parameter if is_usual else _Parameter)(stored)
            self._parameters[key] = parameter
        parameter.update_rule = self._rule(key)
        parameter.update_rule.enabled = key not in self.disabled
        parameter.grad = pushed
        parameter._loss_scale = self.optimizer._loss_scale if self.is_loss_scaled else None
        return parameter

    def _call_hooks(self, timing: str, parameters: Sequence[tuple[chainer.Parameter, range]]
                    ) -> None:
        hooks = self._hooks(timing)
        for parameter, times in parameters:
            for hook in hooks:
                update_hooks.prepare(hook, [parameter])
                for _ in times:
                    hook(parameter.update_rule, parameter)

    def states(self) -> dict[Key, OptimizerState]:
        """Return the states of all keys that were updated."""
        return {key: {'t': rule.t, **{name: chainer.cuda.to_cpu(value) if hasattr(value, 'shape')
                                      else value for name, value in _states_of(rule).items()}}
                for key, rule in self._rules.items() if rule.state is not None}

    def check_state(self, layout: KeyLayout, state: OptimizerState) -> None:
        """Raise ValueError if ``state`` does not fit this optimizer and the full array."""
        expected = {'t': 0, **self._rule_with_states(np.zeros(layout.shape, layout.dtype)).state}
        if _COPY in state and layout.dtype == np.float16:
            expected[_COPY] = np.zeros(layout.shape, np.float32)
        if set(expected) != set(state):
            raise ValueError(f'the states of key {layout.key!r} are {sorted(state)}, but '
                             f'{type(self.optimizer).__name__} has {sorted(expected)}. Load '
                             'states that were saved with the same optimizer.')
        for name, value in expected.items():
            if np.shape(value) != np.shape(state[name]):
                raise ValueError(f'the state {name!r} of key {layout.key!r} has shape '
                                 f'{np.shape(state[name])}, but must have shape {np.shape(value)}. '
                                 'Load states that were saved with the same keys.')

    def restore(self, key: Key, stored: Array, state: OptimizerState) -> None:
        """Set the states of a shard."""
        rule = self._rule_with_states(stored)
        device = chainer.backend.get_device_from_array(stored)
        rule._state = {
            name: device.send(np.array(chainer.cuda.to_cpu(state[name]), value.dtype))
            if hasattr(value, 'dtype') else type(value)(state[name])
            for name, value in rule.state.items() if name in state}
        rule.t = int(state['t'])
        wide = state.get(_COPY)
        # The value of the key may have changed since the states were saved.
        if wide is not None and rule._use_fp32_update and (
                chainer.cuda.to_cpu(stored) == np.asarray(wide).astype(stored.dtype)).all():
            rule._fp32_param = chainer.Parameter(device.send(np.array(wide, np.float32)))
        self._rules[key] = rule

    def save_rule(self, key: Key, stored: Array, serializer: chainer.AbstractSerializer) -> None:
        """Save the update rule of a shard as Chainer does."""
        rule = copy.copy(self._rule(key))  # the thread of a server may update the rule
        if rule.state is None and rule.t:  # Chainer cannot load a count without states
            rule._state = self._rule_with_states(stored, is_updated=False).state
        elif rule.state is not None:
            rule._state = {name: value.copy() if hasattr(value, 'copy') else value
                           for name, value in rule.state.items()}
        rule.serialize(serializer)
        if rule._fp32_param is not None:
            serializer(_COPY, rule._fp32_param.array.copy())

    def load_rule(self, serializer: chainer.AbstractSerializer) -> OptimizerState:
        """Load an update rule that Chainer or :meth:`save_rule` saved. Return its states."""
        rule = self.new_rule()
        rule.serialize(serializer)
        state = {'t': rule.t, **(rule.state or {})}
        if rule._use_fp32_update and (
                wide := loaded(serializer, _COPY, None)) is not None:
            state[_COPY] = wide
        return state

    @property
    def has_states(self) -> bool:
        """Whether the update rules have states."""
        rule = self._rule_with_states(np.zeros(1, np.float32))
        return bool(rule.state) or rule._use_fp32_update

    def forget(self, key: Key, t: int) -> None:
        """Drop the states of a key, which was updated ``t`` times."""
        self._rules.pop(key, None)
        self.starts[key] = t

    def reset(self) -> None:
        """Drop the states of all keys."""
        self._rules.clear()

    def _rule(self, key: Key) -> chainer.optimizer.UpdateRule:
        if key not in self._rules:
            self._rules[key] = self.new_rule()
            self._rules[key].t = self.starts.get(key, 0)
        return self._rules[key]

    def _rule_with_states(self, stored: Array, is_updated: bool = True
                          ) -> chainer.optimizer.UpdateRule:
        """Return a rule with its states, by default including those that its first update adds."""
        rule = self.new_rule()
        is_copied = rule._use_fp32_update and stored.dtype == np.float16
        parameter = chainer.Parameter(stored.astype(np.float32 if is_copied else stored.dtype))
        parameter.grad = parameter.xp.zeros_like(parameter.array)
        rule._init_states(parameter)
        if not is_updated:
            return rule
        rule.t = 1
        with np.errstate(all='ignore'):
            rule.update_core(parameter)
        return rule

    def new_rule(self) -> chainer.optimizer.UpdateRule:
        """Create an update rule as ``Optimizer.setup`` does for each parameter."""
        rule = self.optimizer.create_update_rule()
        if self.optimizer._use_fp32_update:
            rule.use_fp32_update()
        return rule

    def _hooks(self, timing: str) -> Collection[_Hook]:
        hookable = self.optimizer._hookable  # None if the optimizer is not set up
        hooks = getattr(hookable, f'_{timing}_update_hooks', {})
        for name, hook in hooks.items():
            if not getattr(hook, 'call_for_each_param', False):
                raise ValueError(
                    f'the hook {name!r} of the optimizer needs all parameters together, but each '
                    'server has only some of them. Remove the hook, or update on the workers '
                    '(create_kvstore_optimizer(..., update_on_kvstore=False)).')
        return hooks.values()


def _states_of(rule: chainer.optimizer.UpdateRule) -> OptimizerState:
    wide = rule._fp32_param
    return {**(rule.state or {}), **({} if wide is None else {_COPY: wide.array})}


def write_state(state: OptimizerState, serializer: chainer.AbstractSerializer) -> None:
    """Save states that :meth:`OptimizerUpdater.load_rule` returned."""
    for name, value in state.items():
        serializer(name, value)


def loaded(serializer: chainer.AbstractSerializer, name: str, default: object) -> Any:
    """Return a value of a snapshot, or ``default`` if it has none. Save ``default`` if saving."""
    try:
        return serializer(name, default)
    except KeyError:
        return default


class _Parameter(chainer.Parameter):
    """A parameter whose gradient may have a different dtype: float32 for a float16 array."""

    def _set_grad(self, g: Array, *, layout_check: bool = True) -> None:
        self._set_grad_without_check(g)
