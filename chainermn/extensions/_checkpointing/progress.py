"""The progress of iterators in their epochs, for ranks that load the file of another rank.

If a different number of ranks saved the checkpoint, their datasets had different lengths. So model,
optimizer and iteration are loaded as saved, but each iterator continues at the same fraction of the
same epoch in a new order. With an order sampler that can resume, it continues at the same sample of
the same order. Iterators whose ``has_global_position`` is true save a position for all ranks, which
any rank can load.
"""
from __future__ import annotations

import json
from collections.abc import Mapping
from fractions import Fraction

import chainer
import numpy as np

from chainermn._types import Object
from chainermn.extensions._checkpointing.parts import SavedParts
from chainermn.extensions._epoch_length import samples_per_epoch

EPOCHS = 'chainermn/epochs'  # name of the array with the values of epoch_detail, as JSON

_ORDERS = 'order', '_order'  # names under which Chainer's iterators save their order

#: In longer datasets, iterators may continue one sample earlier, because epoch_detail is rounded.
_MAX_LENGTH = 10**6


def capture_epochs(parts: SavedParts) -> dict[str, np.ndarray]:
    """Return the ``epoch_detail`` of all iterators.

    They are needed because an iterator that does not shuffle saves its position, but not the length
    of its dataset.

    Returns:
        A dict with one array.
    """
    details = {}
    for prefix, iterator in parts.iterators.items():
        try:
            details[prefix] = float(iterator.epoch_detail)
        except (AttributeError, TypeError, ZeroDivisionError):  # no such attribute, or no samples
            continue
    return {EPOCHS: np.frombuffer(json.dumps(details).encode(), np.uint8)}


def note_epochs(arrays: Mapping[str, np.ndarray], iterators: Mapping[str, Object]) -> None:
    """Tell the order samplers of iterators which epochs the iterators will load.

    Args:
        arrays: The saved arrays by name.
        iterators: The iterators to load, by the prefix of the names of their arrays.
    """
    for prefix, iterator in iterators.items():
        note_epoch = getattr(getattr(iterator, 'order_sampler', None), 'note_epoch', None)
        if note_epoch is not None and f'{prefix}epoch' in arrays:
            note_epoch(int(arrays[f'{prefix}epoch']))


def compare_iterators(arrays: Mapping[str, np.ndarray], iterators: Mapping[str, Object],
                      saved_by: int | None, is_replica: bool
                      ) -> tuple[dict[str, IteratorProgress], list[str]]:
    """Compare the iterators of a checkpoint with the iterators to load.

    Args:
        arrays: The saved arrays by name.
        iterators: The iterators to load, by the prefix of the names of their arrays.
        saved_by: Number of ranks that saved the checkpoint; ``None`` if it has not changed.
        is_replica: Whether this rank loads the file of another rank.

    Returns:
        A pair. The first element has the progress of the iterators that cannot load the saved
        arrays, by prefix. The second one is a list with an error message for each of the other
        iterators whose dataset is too short for the saved position.
    """
    progress, problems = {}, []
    for prefix, iterator in iterators.items():
        if getattr(iterator, 'has_global_position', False):
            continue
        if saved_by is not None or (is_replica and _needs_own_order(arrays, prefix, iterator)):
            progress[prefix] = IteratorProgress(arrays, prefix, iterator, saved_by)
        elif problem := _find_problem(arrays, prefix, iterator):
            problems.append(problem)
    return progress, problems


def _needs_own_order(arrays: Mapping[str, np.ndarray], prefix: str, iterator: Object) -> bool:
    """Return whether an iterator cannot load the order of another rank."""
    if hasattr(getattr(iterator, 'order_sampler', None), 'resume'):
        return True  # each rank has its own samples
    serializer = chainer.serializers.DictionarySerializer()
    serializer.save(iterator)
    return any(arrays[prefix + key].shape != array.shape
               for key, array in serializer.target.items()
               if key in _ORDERS and prefix + key in arrays)


def _find_problem(arrays: Mapping[str, np.ndarray], prefix: str, iterator: Object) -> str | None:
    """Return an error message if the dataset is too short for the saved position, else ``None``.

    The lengths of orders are compared when they are loaded.
    """
    length, key = _length(iterator), prefix + 'current_position'
    if not length or key not in arrays or _order(arrays, prefix) is not None:
        return None
    position = arrays[key].item()
    return (f'{key} is {position} in the file, but the dataset of the script has {length} '
            'examples') if position > length else None


def _order(arrays: Mapping[str, np.ndarray], prefix: str) -> np.ndarray | None:
    """Return the saved order of an iterator; ``None`` if it does not shuffle."""
    return next((arrays[prefix + key] for key in _ORDERS if prefix + key in arrays
                 and arrays[prefix + key].ndim), None)


class IteratorProgress:
    """The progress of a saved iterator, from which another iterator continues.

    Args:
        arrays: The saved arrays by name.
        prefix: Prefix of the names of the iterator's arrays.
        iterator: The iterator to load.
        size: Number of ranks that saved the checkpoint; ``None`` if it has not changed.
    """

    def __init__(self, arrays: Mapping[str, np.ndarray], prefix: str, iterator: Object,
                 size: int | None) -> None:
        self._saved: dict[str, float] = {
            key: arrays[prefix + key].item() for key in (
                'epoch', 'is_new_epoch', 'current_position', 'previous_epoch_detail')
            if prefix + key in arrays}
        self._epoch = int(self._saved.get('epoch', 0))
        #: The order of this rank, if its order sampler continues at the same sample.
        self._own_order: np.ndarray | None = None
        order = _order(arrays, prefix)
        resume = getattr(getattr(iterator, 'order_sampler', None), 'resume', None)
        if resume is not None and order is not None:
            self._own_order, self._position = resume(
                order, int(self._saved.get('current_position', 0)), self._epoch, size)
            self._length = len(self._own_order)
        else:
            self._length = _length(iterator)
            details = json.loads(arrays[EPOCHS].tobytes()) if EPOCHS in arrays else {}
            detail = details.get(prefix, self._saved.get('previous_epoch_detail', self._epoch))
            fraction = Fraction(detail).limit_denominator(_MAX_LENGTH) - self._epoch
            self._position = min(max(int(fraction * self._length), 0), max(self._length - 1, 0))

    def value(self, key: str, current: Object) -> Object:
        """Return a value to load.

        Args:
            key: Name of the value.
            current: The current value, which is kept if the value to load is unknown.
        """
        if key in _ORDERS and isinstance(current, np.ndarray):
            if self._own_order is not None:
                np.copyto(current, self._own_order)
        elif key in self._saved:
            return {'epoch': self._epoch,
                    'is_new_epoch': bool(self._saved.get('is_new_epoch')),
                    'current_position': self._position,
                    'previous_epoch_detail': self._epoch + (
                        self._position / self._length if self._length else 0.)}[key]
        return current


def _length(iterator: Object) -> int:
    try:
        return samples_per_epoch(iterator)
    except (AttributeError, TypeError):  # there is no dataset, or it has no length
        return 0
