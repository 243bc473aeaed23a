"""Support for snapshots that were written by older versions of Chainer, or with Python 2."""

import warnings
from typing import Any

from chainer_compat.patching.registry import patch


@patch('chainer.training.extensions.exponential_shift', 'chainer.training.extensions.linear_shift')
def shift_of_version_1(module: Any) -> None:
    """All versions: ExponentialShift and LinearShift in snapshots of Chainer 1 could not be loaded.

    Such snapshots contain only the number of calls, which is one higher than in later versions.
    """
    for name in {'ExponentialShift', 'LinearShift'} & set(vars(module)):
        _compute_value(getattr(module, name))


def _compute_value(shift: Any) -> None:
    initialize_original, serialize_original = shift.initialize, shift.serialize

    def initialize(self: Any, trainer: Any) -> None:
        initialize_original(self, trainer)
        if self._lacks_value:
            self._t -= 2
            self._lacks_value = False
            self(trainer)

    def serialize(self: Any, serializer: Any) -> None:
        try:
            serialize_original(self, serializer)
        except KeyError as error:
            if '_last_value' not in str(error):
                raise
            self._lacks_value = True

    shift._lacks_value = False
    shift.initialize, shift.serialize = initialize, serialize


@patch('chainer.training.triggers.minmax_value_trigger')
def best_value(module: Any) -> None:
    """All versions: snapshots of Chainer 1 to 5 with a MinValueTrigger could not be loaded.

    They do not contain the best value, so the trigger fires at its next value.
    """
    serialize_original = module.BestValueTrigger.serialize

    def serialize(self: Any, serializer: Any) -> None:
        try:
            serialize_original(self, serializer)
        except KeyError:
            warnings.warn(f'The snapshot does not contain the best value of {type(self).__name__}; '
                          'the trigger fires at its next value.', stacklevel=2)

    module.BestValueTrigger.serialize = serialize


@patch('chainer.training.extensions.computational_graph')
def dumped_graph(module: Any) -> None:
    """All versions: snapshots of Chainer 1 to 3 with dump_graph could not be loaded.

    They do not record whether the graph was dumped; Chainer now assumes that it was.
    """
    serialize_original = module.DumpGraph.serialize

    def serialize(self: Any, serializer: Any) -> None:
        try:
            serialize_original(self, serializer)
        except KeyError:
            self._flag_called = True

    module.DumpGraph.serialize = serialize


@patch('chainer.serializers.npz', 'chainer.serializers.hdf5')
def text_of_python_2(module: Any) -> None:
    """All versions: text in snapshots that Python 2 wrote, such as the log, could not be loaded."""
    for name in {'NpzDeserializer', 'HDF5Deserializer'} & set(vars(module)):
        _decode(getattr(module, name))


def _decode(deserializer: Any) -> None:
    load = deserializer.__call__

    def call(self: Any, key: str, value: Any) -> Any:
        loaded = load(self, key, value)
        if isinstance(loaded, str) and loaded.startswith(("b'", 'b"', 'np.bytes_(')):
            array = load(self, key, None)
            if array.dtype.kind == 'S':
                return array.item().decode()
        return loaded

    deserializer.__call__ = call
