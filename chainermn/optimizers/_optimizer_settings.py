"""The settings of an optimizer, such as the learning rate, which must be the same on all ranks.

If they differ, the replicas drift apart. So the ranks compare a digest of the settings whenever
they average gradients, in the message that the consistency check sends anyway. The digest is
recomputed only if a setting has changed.
"""
from __future__ import annotations

import array
import math
import operator
import zlib
from collections.abc import Iterable, Iterator, Mapping

import chainer
import numpy as np
from chainer import optimizer_hooks

from chainermn._operations.call_signature import Caller
from chainermn._types import Object, Optimizer, Parameter

#: Parameters with their paths, in sorted order.
Named = list[tuple[str, Parameter]]
#: Hooks, by name.
Hooks = dict[str, Object]

_USUAL = 'enabled'  # the settings of most parameters
_LARGEST = 1024  # maximum size of an array that is compared
_SHORT = 8  # maximum size of an array whose values are shown
_IMMUTABLE = frozenset({float, int, bool, str, type(None)})
_is_enabled = operator.attrgetter('enabled')

_HOOKS_OF_CHAINER = (
    optimizer_hooks.GradientClipping, optimizer_hooks.GradientHardClipping,
    optimizer_hooks.GradientLARS, optimizer_hooks.GradientNoise, optimizer_hooks.Lasso,
    optimizer_hooks.WeightDecay)
#: Attributes of these hooks. Subclasses may have others, which may differ between ranks.
_ARGUMENTS = ('rate', 'threshold', 'lower_bound', 'upper_bound', 'weight_decay', 'eps', 'eta')


class OptimizerSettings:
    """The settings of one optimizer.

    The settings are its hyperparameters, loss scale and hooks, its update rules and per-parameter
    settings, the disabled parameters, and ``t``, which differs if only some ranks have loaded a
    snapshot. (Without states, as in SGD, ``t`` is ignored.) User-defined hooks may only read, for
    example to write a log, so if they differ, there is only a warning.

    Args:
        actual_optimizer: The optimizer.
        name: Name of its proxy, for error messages.
        creator: The function that creates the proxy and has the argument ``compare_settings``.
        options: Options of the proxy, by name, which must always be the same on all ranks.
        is_compared: Whether ranks compare the settings.
        noise: Whether all ranks generate the noise of the optimizer's hooks, and whether all ranks
            generate the noise of the update rules' hooks.

    Attributes:
        caller: The caller of operations that compare the settings.
        is_compared: Whether ranks compare the settings.

    Example:
        >>> from chainermn.optimizers import proxy
        >>> sgd = chainer.optimizers.SGD(lr=0.1 * (1 + comm.rank)).setup(model)
        >>> settings = proxy.OptimizerSettings(sgd, 'my optimizer', 'create_my_optimizer')
        >>> settings.compare(sorted(model.namedparams()))
        >>> with comm.called_by(settings.caller):
        ...     comm.barrier()
        Traceback (most recent call last):
            ...
        chainermn.CollectiveMismatchError: ...options of my optimizer differ between ranks...
          lr: 0.1 on rank 0; 0.2 on rank 1...
    """

    def __init__(self, actual_optimizer: Optimizer, name: str, creator: str,
                 options: Mapping[str, str] | None = None, is_compared: bool = True,
                 noise: tuple[bool, bool] = (True, True)) -> None:
        self.caller = Caller(
            name, options, 'Use the same options, hooks and learning-rate extensions on all '
            'ranks, and load snapshots on all ranks. To allow different hyperparameters and hooks, '
            f'pass compare_settings=False to {creator}.',
            warning=(f'hooks of {name} differ between ranks', 'If they change gradients or '
                     'parameters, the models drift apart. In this case, add them on all ranks.'))
        if is_compared:
            self.caller.remember_place()
        self.is_compared = is_compared
        self._noise = noise
        self._optimizer = actual_optimizer
        self._named: Named = []
        self._rules: list[Object] = []
        self._of_chainer: list[chainer.UpdateRule] = []  # the rules that have settings
        self._hookable: Object = None
        #: The hyperparameters of these rules, often only the reference to their parent.
        self._hyperparams: list[dict[str, Object]] = []
        #: The hooks of the optimizer before and after updates, then the hooks of these rules.
        self._hooks: list[Hooks] = []
        self._has_state = self._has_more = False
        self._has_arrays = False  # or other hyperparameters that may change in place
        self._seen: list[Object] = []
        self._seen_others: list[Object] = []
        self._digest_of_others = self._digest_of_hooks = self._digest = 0

    @staticmethod
    def are_known(optimizer: Optimizer) -> bool:
        """Return whether an optimizer has the settings of a Chainer optimizer.

        Args:
            optimizer: Any optimizer.

        Example:
            >>> from chainermn.optimizers.proxy import OptimizerSettings
            >>> OptimizerSettings.are_known(chainer.optimizers.Adam())
            True
        """
        return hasattr(getattr(optimizer, 'hyperparam', None), '__dict__') and all(
            hasattr(optimizer, name) for name in ('t', '_loss_scale', '_use_fp32_update',
                                                  '_hookable'))

    def forget(self) -> None:
        """Stop comparing settings.

        Example:
            >>> from chainermn.optimizers.proxy import OptimizerSettings
            >>> OptimizerSettings(chainer.optimizers.SGD(), 'mine', 'create_mine').forget()
        """
        self._seen, self._seen_others = [], []
        self.caller.set_state(dict, dict)
        self.caller.set_digests(0, 0)

    def compare(self, named: Named, with_t: bool = True) -> None:
        """Make the ranks compare the current settings in their next collective operation.

        Args:
            named: All parameters with their paths, in sorted order.
            with_t: Whether ``t`` must be the same if the rules have states.

        Example:
            >>> from chainermn.optimizers.proxy import OptimizerSettings
            >>> sgd = chainer.optimizers.SGD().setup(model)
            >>> settings = OptimizerSettings(sgd, 'my optimizer', 'create_my_optimizer')
            >>> settings.compare(sorted(model.namedparams()))
            >>> with comm.called_by(settings.caller):
            ...     comm.barrier()
        """
        optimizer = self._optimizer
        rules = [param.update_rule for _, param in named]
        if rules != self._rules or optimizer._hookable is not self._hookable:
            self._note_rules(rules)
        self._named = named
        # Put the values that are cheap to read into one list. This takes most of the time.
        numbers = optimizer.hyperparam.__dict__.values()
        seen = [*(map(_comparable, numbers) if self._has_arrays else numbers),
                optimizer._loss_scale,
                optimizer._use_fp32_update, *map(_is_enabled, self._of_chainer),
                *map(len, self._hyperparams), any(self._hooks)]
        if self._has_more:
            seen.append(self._hooks_and_hyperparams())
        if not _are_equal(seen, self._seen):
            self._note_change(seen)
        elif not self._has_state:
            return
        t = optimizer.t if self._has_state and with_t else 0
        if type(t) is not int:  # faster than always converting it
            t = int(t)
        self.caller.set_digests(self._digest ^ t, self._digest_of_hooks)

    def _note_rules(self, rules: list[Object]) -> None:
        self._rules, self._hookable = rules, self._optimizer._hookable
        self._of_chainer = [rule for rule in rules if isinstance(rule, chainer.UpdateRule)]
        self._hyperparams = [vars(rule.hyperparam) for rule in self._of_chainer]
        self._hooks = [hooks for hookable in (self._optimizer, *self._of_chainer)
                       for hooks in _hooks(hookable)]
        self._has_state = any(type(rule).init_state is not chainer.UpdateRule.init_state
                              for rule in self._of_chainer)
        self._seen, self._seen_others = [], []

    def _hooks_and_hyperparams(self) -> list[Object]:
        """Return the hooks and the hyperparameters of update rules."""
        return [[[*zip(values, map(_comparable, values.values()), strict=True)]
                 for values in self._hyperparams], [[*hooks.items()] for hooks in self._hooks],
                [_arguments(hook) for hooks in self._hooks for hook in hooks.values()],
                self._noise_state()]

    def _note_change(self, seen: list[Object]) -> None:
        """Recompute the digests."""
        numbers = _values(self._optimizer.hyperparam).values()
        has_more = any(self._hooks) or any(len(values) > 1 for values in self._hyperparams)
        if has_more != self._has_more:
            self._has_more = has_more
            seen = [*seen, self._hooks_and_hyperparams()] if has_more else seen[:-1]
        hyperparams = [*vars(self._optimizer.hyperparam).values()]
        self._has_arrays = not _IMMUTABLE.issuperset(map(type, hyperparams))
        if self._has_arrays:
            seen[:len(hyperparams)] = map(_comparable, hyperparams)
        self._seen = seen
        others = seen[len(hyperparams):]
        if not _are_equal(others, self._seen_others):
            self._seen_others = others
            # Skip the usual settings, because a separate error reports models that differ.
            special = [item for item in self._other_texts().items() if item[1] != _USUAL]
            self._digest_of_others = zlib.crc32(repr(special).encode())
            self._digest_of_hooks = zlib.crc32(repr(self._user_hooks()).encode())
            self.caller.set_state(self._texts, self._user_hooks)
        values = [*map(_comparable, numbers)]
        try:
            text = array.array('d', values).tobytes()  # 1 equals 1.0
        except (TypeError, OverflowError):  # not only numbers
            text = repr([float(value) if isinstance(value, int) else value
                         for value in values]).encode()
        self._digest = zlib.crc32(text, self._digest_of_others)

    def _noise_state(self) -> int | None:
        """Return a digest of the state from which all ranks generate the same noise on the CPU.

        On a GPU, CuPy generates the noise, but the state of its generator cannot be read.
        """
        by_optimizer, by_rules = self._noise
        hooks = self._hooks[:2] * by_optimizer + self._hooks[2:] * by_rules
        if any(_draws_noise(hook) for each in hooks for hook in each.values()) and any(
                param.device.xp is np for _, param in self._named):
            _, keys, position, _, _ = np.random.get_state(legacy=True)
            return zlib.crc32(np.asarray(keys).tobytes(), int(position))
        return None

    def _texts(self) -> dict[str, str]:
        """Return all settings by name."""
        optimizer = self._optimizer
        numbers = {'t': optimizer.t if self._has_state else None, **_values(optimizer.hyperparam)}
        return {name: _text(value) for name, value in numbers.items()} | self._other_texts()

    def _other_texts(self) -> dict[str, str]:
        scale = self._optimizer._loss_scale
        texts = {'loss scale': str(scale if scale is None else float(scale)),
                 'use_fp32_update': str(self._optimizer._use_fp32_update),
                 'update rules': _listed(sorted({
                     type(rule).__qualname__ for rule in self._rules if rule is not None}))}
        for name, hooks in zip(('hooks', 'hooks after updates'), _hooks(self._optimizer),
                               strict=True):
            texts[name] = _listed(_described(hooks))
        if (state := self._noise_state()) is not None:
            texts['state of numpy.random (GradientNoise needs the same seed on all ranks)'] = (
                f'{state:08x}')
        for path, param in self._named:
            rule = param.update_rule
            if not isinstance(rule, chainer.UpdateRule):
                texts[f'update of {path}'] = 'no Chainer update rule'
                continue
            texts[f'update of {path}'] = ', '.join([
                _USUAL if rule.enabled else 'disabled',
                *(f'{name} {_text(value)}' for name, value in _values(rule.hyperparam).items()),
                *(f'hook {text}' for hooks in _hooks(rule) for text in _described(hooks))])
        return texts

    def _user_hooks(self) -> dict[str, str]:
        """Return the names of the hooks that are not Chainer's, by the setting they belong to."""
        texts = {}
        for name, hooks in zip(('hooks', 'hooks after updates'), _hooks(self._optimizer),
                               strict=True):
            texts[name] = _listed(_user_hook_names(hooks))
        for path, param in self._named:
            if isinstance(param.update_rule, chainer.UpdateRule) and (
                    names := [name for hooks in _hooks(param.update_rule)
                              for name in _user_hook_names(hooks)]):
                texts[f'hooks of {path}'] = _listed(names)
        return texts


def _hooks(hookable: Object) -> tuple[Hooks, Hooks]:
    """Return the hooks that an optimizer or update rule calls before and after an update."""
    hooks = hookable._hookable  # None if an optimizer is not set up
    return ({}, {}) if hooks is None else (hooks._pre_update_hooks, hooks._post_update_hooks)


def _described(hooks: Hooks) -> Iterator[str]:
    """Yield descriptions of the hooks that are Chainer's."""
    for name, hook in hooks.items():
        if isinstance(hook, _HOOKS_OF_CHAINER):
            values = _listed(f'{key}={_text(value)}' for key, value in _arguments(hook).items())
            kind = type(hook).__name__
            yield f'{"" if name == kind else f"{name}: "}{kind}({values})'


def _user_hook_names(hooks: Hooks) -> Iterator[str]:
    """Yield the names of the hooks that are not Chainer's."""
    for name, hook in hooks.items():
        if not isinstance(hook, _HOOKS_OF_CHAINER):
            yield str(name)


def _arguments(hook: Object) -> dict[str, Object]:
    """Return the arguments with which a Chainer hook changes gradients."""
    if not isinstance(hook, _HOOKS_OF_CHAINER):
        return {}
    return {name: _comparable(vars(hook)[name]) for name in _ARGUMENTS if name in vars(hook)}


def _draws_noise(hook: Object) -> bool:
    """Return whether a hook generates noise with numpy.random or CuPy."""
    return isinstance(hook, optimizer_hooks.GradientNoise) and (
        hook.noise_func.__module__ == optimizer_hooks.GradientNoise.__module__)


def _values(hyperparam: Object) -> dict[str, Object]:
    """Return the hyperparameters that are not inherited from the parent."""
    return {name: value for name, value in vars(hyperparam).items() if name != '_parent'}


def _are_equal(values: list[Object], others: list[Object]) -> bool:
    """Compare lists. Values that cannot be compared, such as arrays, are compared by identity."""
    try:
        return values == others
    except Exception:
        return False


def _comparable(value: Object) -> Object:
    """Return a value whose ``repr`` is the same on all ranks, unless the setting differs.

    Negative zero counts as zero, and all NaNs count as the same value.
    """
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and not value.ndim):
        value = value.item()
    if isinstance(value, float):
        return value + 0. if value == value else math.nan
    if isinstance(value, np.ndarray) and value.size <= _LARGEST and not value.dtype.hasobject:
        if value.dtype.kind in 'biuf':
            value = np.where(np.isnan(value), math.nan, value + 0.)
        return f'array {zlib.crc32(value.tobytes())}'
    if isinstance(value, (tuple, list)):
        return [*map(_comparable, value)]
    return value if value is None or isinstance(value, (int, float, str)) else 'an object'


def _text(value: Object) -> str:
    is_short = isinstance(value, np.ndarray) and value.size <= _SHORT
    return str(value.tolist() if is_short else _comparable(value))


def _listed(texts: Iterable[str]) -> str:
    return ', '.join(texts) or 'none'
