"""Optimizer states that Chainer 7.8.1 does not save, so that resumed runs differ."""

from typing import Any

from chainer_compat.fixes.saved_state import is_deserializer
from chainer_compat.patching.registry import patch

_POWER = 'beta_power'
_COPY = 'fp32_param'


@patch('chainer.optimizers.msvag')
def state_of_msvag(msvag: Any) -> None:
    """All versions: MSVAG did not save ``beta_power``, the power of beta in the next update.

    It is now part of the state of the update rule. For older snapshots, it is computed from the
    number of updates.
    """
    rule = msvag.MSVAGRule
    serialize = rule.serialize

    def get_power(self: Any) -> float:
        power: float = (self.state or {}).get(_POWER, self._first_power)
        return power

    def set_power(self: Any, power: float) -> None:
        if self.state is None:  # in the constructor
            self._first_power = power
        else:
            self.state[_POWER] = power

    def serialize_with_power(self: Any, serializer: Any) -> None:
        power = None if self.state is None else self.state.pop(_POWER, None)
        try:
            serialize(self, serializer)
            if is_deserializer(serializer):
                power = _load(serializer, _POWER)
                if power is None:
                    power = self.hyperparam.beta ** (self.t + 1)
            elif power is not None:
                serializer(_POWER, power)
        finally:  # a full disk, for example, must not change the next update
            if power is not None and self.state is not None:
                self.state[_POWER] = float(power)

    rule.beta_power = property(get_power, set_power)
    rule.serialize = serialize_with_power


@patch('chainer.optimizer')
def mixed_precision_states(optimizer: Any) -> None:
    """All versions: snapshots lost the float32 copies of parameters and the dynamic loss scale.

    The copies (``use_fp32_update``) kept their old values when a snapshot was loaded.
    """
    serialize = optimizer.Optimizer.serialize

    def serialize_all(self: Any, serializer: Any) -> None:
        is_loading = is_deserializer(serializer)
        serialize(self, serializer)
        if self._loss_scaling_is_dynamic:
            for name in ('_loss_scale', '_loss_scaling_isnan_ever'):
                if not is_loading:
                    serializer(name.lstrip('_'), getattr(self, name))
                elif (value := _load(serializer, name.lstrip('_'))) is not None:
                    setattr(self, name, type(getattr(self, name))(value))
        for name, param in self.target.namedparams():
            rule = param.update_rule
            if rule is None or not rule._use_fp32_update:
                continue
            copy = rule._fp32_param
            if is_loading:
                array = _load(serializer[name], _COPY)
                rule._fp32_param = None if array is None else type(param)(
                    param.device.send(array), name=param.name)
            elif copy is not None and copy.array is not None:
                serializer[name](_COPY, copy.array)

    optimizer.Optimizer.serialize = serialize_all


@patch('chainer.optimizer')
def states_before_the_first_update(optimizer: Any) -> None:
    """All versions: a snapshot taken before the first update could not be loaded.

    It contains no states, because the first update creates them.
    """
    serialize = optimizer.UpdateRule.serialize

    def serialize_with_states(self: Any, serializer: Any) -> None:
        t = _load(serializer, 't') if is_deserializer(serializer) else None
        try:
            serialize(self, serializer)
        except KeyError:
            if t is None or int(t):
                raise
            self._state = None

    optimizer.UpdateRule.serialize = serialize_with_states


@patch('chainer.optimizer')
def updates_of_parameters(optimizer: Any) -> None:
    """All versions: optimizer snapshots of Chainer 1 and 2 could not be loaded.

    They contain a single number of updates for all parameters.
    """
    serialize = optimizer.Optimizer.serialize

    class WithUpdates(optimizer.serializer_module.Deserializer):
        def __init__(self, serializer: Any, t: int) -> None:
            self._serializer, self._t = serializer, t

        def __getitem__(self, key: str) -> Any:
            return WithUpdates(self._serializer[key], self._t)

        def __call__(self, key: str, value: Any) -> Any:
            return self._t if key == 't' else self._serializer(key, value)

    def serialize_with_updates(self: Any, serializer: Any) -> None:
        if is_deserializer(serializer) and (t := _load(serializer, 't')) is not None:
            # In files of later versions, parameters without a number are new.
            numbers = (_load(serializer[name], 't') for name, _ in self.target.namedparams())
            if all(number is None for number in numbers):
                serializer = WithUpdates(serializer, int(t))
        serialize(self, serializer)

    optimizer.Optimizer.serialize = serialize_with_updates


def _load(serializer: Any, key: str) -> Any:
    """Return an entry of a snapshot, or None if there is none."""
    try:
        return serializer(key, None)
    except KeyError:
        return None
