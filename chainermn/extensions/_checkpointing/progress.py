"""How far iterators are in their epochs, for ranks that load the file of another rank.

If another number of ranks saved, their data sets have other lengths.  So model, optimizer and
iteration are as saved, but each iterator continues at the same fraction of the same epoch, in an
order of its own; with an order sampler that can resume, at the same sample of the same order.
Iterators with a true ``has_global_position`` save a position of all ranks, which any rank loads.
"""
from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from fractions import Fraction

import chainer
import numpy as np

from chainermn._types import Object
from chainermn.extensions._checkpointing.state import copy_state, find_parts

EPOCHS = 'chainermn/epochs'  # name of the array with the values of epoch_detail, as JSON

_ORDERS = 'order', '_order'  # names of the order in Chainer's iterators

#: A longer data set may continue one sample earlier, as epoch_detail is rounded.
_MAX_LENGTH = 10**6


def find_iterators(target: object) -> dict[str, Object]:
    """Find the iterators of a trainer or dictionary.

    Returns:
        The iterators, by the prefix of the names of their arrays.
    """
    return {prefix: part for prefix, part in find_parts(target).items()
            if isinstance(part, chainer.dataset.Iterator)
            or (part is not None and 'updater/iterator:' in prefix)}


def find_states(target: object, keys: Iterable[str]) -> set[str]:
    """Return the names of the arrays of iterators, which differ between ranks.

    Args:
        target: The object that was copied.
        keys: Names of the arrays.
    """
    prefixes = tuple(find_iterators(target))
    return {key for key in keys if key.startswith(prefixes)}


def capture_epochs(target: object) -> dict[str, np.ndarray]:
    """Return the ``epoch_detail`` of all iterators.

    An iterator that does not shuffle saves its position, but not the length of its data set.

    Returns:
        One array, by its name.
    """
    details = {}
    for prefix, iterator in find_iterators(target).items():
        try:
            details[prefix] = float(iterator.epoch_detail)
        except (AttributeError, TypeError, ZeroDivisionError):  # it has none, or no samples
            continue
    return {EPOCHS: np.frombuffer(json.dumps(details).encode(), np.uint8)}


def is_loadable(arrays: Mapping[str, np.ndarray], prefix: str, iterator: Object,
                is_resized: bool) -> bool:
    """Return whether an iterator can load the saved arrays of another one of the same job.

    Args:
        arrays: The saved arrays by name.
        prefix: Prefix of the names of the iterator's arrays.
        iterator: The iterator to load.
        is_resized: Whether the job had another number of ranks.
    """
    if getattr(iterator, 'has_global_position', False):
        return True
    if is_resized:
        return False
    if hasattr(getattr(iterator, 'order_sampler', None), 'resume'):
        return False  # each rank has its own samples
    return all(arrays[prefix + key].shape == array.shape
               for key, array in copy_state(iterator).items()
               if key in _ORDERS and prefix + key in arrays)


def find_problem(arrays: Mapping[str, np.ndarray], prefix: str, iterator: Object) -> list[str]:
    """Return a text if the data set is too short for the saved position; otherwise nothing.

    The lengths of orders are compared when they are loaded.
    """
    length, key = _length(iterator), prefix + 'current_position'
    if getattr(iterator, 'has_global_position', False):
        return []
    if not length or key not in arrays or any(
            prefix + order in arrays and arrays[prefix + order].ndim for order in _ORDERS):
        return []
    position = arrays[key].item()
    return [f'{key} is {position} in the file, but the data set of the program has {length} '
            'examples'] if position > length else []


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
        self.order: np.ndarray | None = None
        order = next((arrays[prefix + key] for key in _ORDERS if prefix + key in arrays
                      and arrays[prefix + key].ndim), None)
        resume = getattr(getattr(iterator, 'order_sampler', None), 'resume', None)
        if resume is not None and order is not None:
            self.order, self._position = resume(
                order, int(self._saved.get('current_position', 0)), self._epoch, size)
            self._length = len(self.order)
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
            if self.order is not None:
                np.copyto(current, self.order)
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
