"""The progress of iterators in their epochs, for ranks that load the file of another rank.

If another number of ranks saved, their datasets have other lengths. So model, optimizer and
iteration are as saved, but each iterator continues at the same fraction of the same epoch, in an
order of its own; with an order sampler that can resume, at the same sample of the same order.
Iterators with a true ``has_global_position`` save a position of all ranks, which any rank loads.
"""
from __future__ import annotations

import json
from collections.abc import Mapping
from fractions import Fraction

import chainer
import numpy as np

from chainermn._types import Object
from chainermn.extensions._checkpointing.parts import SavedParts

EPOCHS = 'chainermn/epochs'  # name of the array with the values of epoch_detail, as JSON

_ORDERS = 'order', '_order'  # names of the order in Chainer's iterators

#: A longer dataset may continue one sample earlier, as epoch_detail is rounded.
_MAX_LENGTH = 10**6


def capture_epochs(parts: SavedParts) -> dict[str, np.ndarray]:
    """Return the ``epoch_detail`` of all iterators.

    An iterator that does not shuffle saves its position, but not the length of its dataset.

    Returns:
        One array, by its name.
    """
    details = {}
    for prefix, iterator in parts.iterators.items():
        try:
            details[prefix] = float(iterator.epoch_detail)
        except (AttributeError, TypeError, ZeroDivisionError):  # it has none, or no samples
            continue
    return {EPOCHS: np.frombuffer(json.dumps(details).encode(), np.uint8)}


def note_epochs(arrays: Mapping[str, np.ndarray], iterators: Mapping[str, Object]) -> None:
    """Tell the order samplers of iterators the epochs that the iterators will load.

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
        saved_by: Number of ranks that saved; ``None`` if it has not changed.
        is_replica: Whether this rank loads the file of another rank.

    Returns:
        The values to load into iterators that cannot load the saved arrays, by prefix; and an
        error message for each other iterator whose dataset is too short for the saved position.
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
    """Return an error message if the dataset is too short for the saved position, else None.

    The lengths of orders are compared when they are loaded.
    """
    length, key = _length(iterator), prefix + 'current_position'
    if not length or key not in arrays or _order(arrays, prefix) is not None:
        return None
    position = arrays[key].item()
    return (f'{key} is {position} in the file, but the dataset of the program has {length} '
            'examples') if position > length else None


def _order(arrays: Mapping[str, np.ndarray], prefix: str) -> np.ndarray | None:
    """Return the saved order of an iterator; ``None`` if it does not shuffle."""
    return next((arrays[prefix + key] for key in _ORDERS if prefix + key in arrays
                 and arrays[prefix + key].ndim), None)


class IteratorProgress:
    """The progress of a saved iterator, for another iterator.

    Args:
        arrays: The saved arrays by name.
        prefix: Prefix of the names of the iterator's arrays.
        iterator: The iterator to load.
        size: Number of ranks that saved; ``None`` if it has not changed.
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
            key: Its name.
            current: The current value, which stays if the value is unknown.
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
        return len(iterator.dataset)
    except (AttributeError, TypeError):  # it has none, or one without an end
        return 0
