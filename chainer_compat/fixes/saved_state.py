"""State of extensions and triggers that Chainer 7.8.1 does not save.

Without it, a resumed run differs from an uninterrupted one. Files that were saved without these
patches can still be loaded: missing values keep their initial values, with a warning.
"""

import json
import warnings
from typing import Any

from chainer_compat.patching.registry import edit, patch

#: Passed to a deserializer instead of the current value: it then returns the saved array unchanged.
_AS_SAVED = None


@patch('chainer.reporter')
def summary_state(reporter: Any) -> None:
    """All versions: loading a summary changed the dtype of its sums, and thus later means.

    Non-integer weights could not be loaded.
    """
    serialize_original = reporter.Summary.serialize

    def serialize(self: Any, serializer: Any) -> None:
        if not is_deserializer(serializer):
            serialize_original(self, serializer)
            return
        try:
            for name in ('_x', '_x2', '_n'):
                setattr(self, name, _load_number(serializer, name, getattr(self, name)))
        except KeyError:
            warnings.warn('The snapshot does not contain the statistics that were collected '
                          'before; the next averages only include new values.', stacklevel=2)

    reporter.Summary.serialize = serialize


@patch('chainer.training.triggers.early_stopping_trigger')
def early_stopping_state(module: Any) -> None:
    """All versions: EarlyStoppingTrigger saved no state, so resuming restarted its patience."""

    def serialize(self: Any, serializer: Any) -> None:
        _serialize_trigger(self._interval_trigger, serializer['interval_trigger'])
        _serialize_trigger(self._max_trigger, serializer['max_trigger'])
        try:
            self.best = _number(serializer, 'best', self.best)
            self.count = _number(serializer, 'count', self.count)
        except KeyError:
            warnings.warn('The snapshot does not contain the best value of EarlyStoppingTrigger; '
                          'its patience restarts.', stacklevel=2)
            return
        # Save a single summary instead of the dictionary, whose keys HDF5 cannot store.
        self._summary._summaries[self.monitor].serialize(serializer['summary'])

    module.EarlyStoppingTrigger.serialize = serialize


@patch('chainer.training.extensions.micro_average')
def micro_average_state(module: Any) -> None:
    """All versions: MicroAverage did not save its trigger, and could not load sums of floats."""

    def serialize(self: Any, serializer: Any) -> None:
        _serialize_trigger(self._trigger, serializer['_trigger'])
        self._numerator = _number(serializer, '_numerator', self._numerator)
        self._denominator = _number(serializer, '_denominator', self._denominator)

    module.MicroAverage.serialize = serialize


@patch('chainer.training.extensions.plot_report')
def plot_report_state(module: Any) -> None:
    """All versions: PlotReport did not save its trigger or the values since the last point."""
    serialize_data = module.PlotReport.serialize

    def serialize(self: Any, serializer: Any) -> None:
        serialize_data(self, serializer)
        _serialize_trigger(self._trigger, serializer['_trigger'])
        self._summary.serialize(serializer['_summary'])

    module.PlotReport.serialize = serialize


@patch('chainer.training.extensions.parameter_statistics')
def parameter_statistics_state(module: Any) -> None:
    """All versions: ParameterStatistics saved no state."""

    def serialize(self: Any, serializer: Any) -> None:
        _serialize_trigger(self._trigger, serializer['_trigger'])
        self._summary.serialize(serializer['_summary'])

    module.ParameterStatistics.serialize = serialize


@patch('chainer.training.extensions.variable_statistics_plot')
def variable_statistics_state(module: Any) -> None:
    """All versions: VariableStatisticsPlot saved no state."""

    def serialize(self: Any, serializer: Any) -> None:
        _serialize_trigger(self._trigger, serializer['_trigger'])
        samples = self._samples
        try:
            samples.counter = serializer('counter', samples.counter)
            used = min(samples.counter, samples.size)
            for name in ('data', 'idxs'):
                serializer(name, getattr(samples, name)[:used])
        except KeyError:
            warnings.warn('The snapshot does not contain the samples of VariableStatisticsPlot; '
                          'the plot starts with new ones.', stacklevel=2)

    module.VariableStatisticsPlot.serialize = serialize


@patch('chainer.training.extensions.multistep_shift', 'chainer.training.extensions.warmup_shift')
def shift_state(module: Any) -> None:
    """All versions: MultistepShift and WarmupShift set the initial value again after resuming.

    If the warm-up was over, WarmupShift never corrected it.
    """
    for name in {'MultistepShift', 'WarmupShift'} & set(vars(module)):
        _save_value(getattr(module, name))


@patch(*[f'chainer.training.extensions.{name}_shift'
         for name in ('exponential', 'inverse', 'linear', 'polynomial', 'step')])
def shift_of_integers(module: Any) -> None:
    """All versions: a trainer that had started could not load PolynomialShift, LinearShift etc.

    Loading raised TypeError if the current value was an int and the saved value a float.
    """
    name = module.__name__.rpartition('.')[2].title().replace('_', '')
    shift = getattr(module, name)
    serialize_original = shift.serialize

    def serialize(self: Any, serializer: Any) -> None:
        try:
            serialize_original(self, serializer)
        except TypeError:
            self._last_value = _load_number(serializer, '_last_value', self._last_value)

    shift.serialize = serialize


def _save_value(shift: Any) -> None:
    """Make an extension save and restore its hyperparameter, even if other code has set it."""
    initialize_original, serialize_original = shift.initialize, shift.serialize

    def initialize(self: Any, trainer: Any) -> None:
        initialize_original(self, trainer)
        self._shifted = self._optimizer or trainer.updater.get_optimizer('main')
        if self._last_value is not None:  # resuming
            setattr(self._shifted, self._attr, self._last_value)

    def serialize(self: Any, serializer: Any) -> None:
        serialize_original(self, serializer)
        if not is_deserializer(serializer):
            serializer('_last_value', getattr(self._shifted, self._attr, self._last_value))
            return
        try:
            self._last_value = _load_number(serializer, '_last_value', self._last_value)
        except KeyError:
            warnings.warn('The snapshot does not contain the last value of '
                          f'{type(self).__name__}; it starts with its initial value.',
                          stacklevel=2)

    shift._shifted = shift._last_value = None
    shift.initialize, shift.serialize = initialize, serialize


@patch('chainer.serializers.hdf5')
def objects_not_in_hdf5(module: Any) -> None:
    """All versions: a missing object in an HDF5 file was an error, unlike in an NPZ file.

    With NPZ files, a missing state of an extension or trigger raises KeyError, which becomes a
    warning. Now HDF5 files behave in the same way.
    """
    deserializer = module.HDF5Deserializer
    get_item, load = deserializer.__getitem__, deserializer.__call__

    def get_item_or_none(self: Any, key: str) -> Any:
        return self if self.group is None else get_item(self, key)

    def load_or_key_error(self: Any, key: str, value: Any) -> Any:
        if self.group is None and self.strict:
            raise MissingGroupError(key)
        return load(self, key, value)

    deserializer.__getitem__, deserializer.__call__ = get_item_or_none, load_or_key_error


class MissingGroupError(KeyError, ValueError):
    """Raised if an object is not in an HDF5 file."""


@edit('chainer.training.trainer')
def finished_shift() -> dict[str, str]:
    """All versions: the learning rate was lost on resume if its extension had already finished.

    After resuming, Trainer.run did not initialize such an extension, for example ExponentialShift
    with a ManualScheduleTrigger.
    """
    return {'if initializer and not finished:':
            "if initializer and not (finished and not hasattr(entry.extension, '_last_value')):"}


@edit('chainer.training.trainer')
def autoload_first() -> dict[str, str]:
    """All versions: snapshots with ``autoload`` loaded the trainer after extensions had started.

    ExponentialShift and similar extensions then used the initial learning rate until their next
    trigger.
    """
    return {'for _, entry in extensions:\n            initializer':
            "for _, entry in sorted(extensions, key=lambda e: "
            "not getattr(e[1].extension, 'autoload', False)):\n            initializer"}


@patch('chainer.training.trainer')
def observation_state(module: Any) -> None:
    """All versions: a trainer did not save its last observation.

    Trainer.run calls the stop trigger before the first update. After resuming, the trigger missed
    the values of the saved iteration.
    """
    serialize_original = module.Trainer.serialize

    def serialize(self: Any, serializer: Any) -> None:
        import numpy

        serialize_original(self, serializer)
        serializer = serializer['observation']
        if is_deserializer(serializer):
            try:
                names = serializer('names', _AS_SAVED)
                if names is not None:
                    self.observation = {
                        name: _load_number(serializer, str(i), None)
                        for i, name in enumerate(json.loads(names.tobytes()))}
            except KeyError:
                pass  # the triggers give a warning
            return
        values = {name: getattr(value, 'array', value)  # the array of a Variable
                  for name, value in self.observation.items()}
        values = {name: value for name, value in values.items() if _is_number(value)}
        # Save the names as bytes, because HDF5 cannot store text.
        serializer('names', numpy.frombuffer(json.dumps(list(values)).encode(), numpy.uint8))
        for i, value in enumerate(values.values()):
            serializer(str(i), value)

    module.Trainer.serialize = serialize


def is_deserializer(serializer: Any) -> bool:
    """Return whether a serializer loads a file."""
    from chainer import serializer as module

    return isinstance(serializer, module.Deserializer)


def _serialize_trigger(trigger: Any, serializer: Any) -> None:
    if hasattr(trigger, 'serialize'):
        trigger.serialize(serializer)


def _number(serializer: Any, key: str, value: Any) -> Any:
    """Save or load a number; the loaded number may have a different type."""
    if is_deserializer(serializer):
        return _load_number(serializer, key, value)
    return serializer(key, value)


def _load_number(serializer: Any, key: str, value: Any) -> Any:
    """Load a number or array with the dtype that was saved."""
    import numpy

    saved = serializer(key, _AS_SAVED)
    if saved is None:  # None was saved, or the serializer ignores missing values
        return value
    saved = numpy.asarray(saved)
    # Python numbers have these dtypes. Keep other dtypes, which determine how sums are rounded.
    return saved.item() if saved.dtype in (int, float) and not saved.ndim else saved[()]


def _is_number(value: Any) -> bool:
    """Return whether an observed value is a number or an array of numbers."""
    dtype = getattr(value, 'dtype', None)
    return isinstance(value, (int, float)) if dtype is None else dtype.kind in 'biufc'
