"""State of iterators that Chainer 7.8.1 does not save: orders drawn in advance, random states."""

from __future__ import annotations

import os
import threading
import weakref
from typing import TYPE_CHECKING, Any

from chainer_compat.patching.registry import edit, patch

if TYPE_CHECKING:
    import numpy

_mutex = threading.RLock()  # a thread of MultiprocessIterator draws orders
os.register_at_fork(after_in_child=lambda: _mutex._at_fork_reinit())  # type: ignore[attr-defined]


class _NextOrders:
    """Maps each order in use to the order that follows it."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[weakref.ref[numpy.ndarray], numpy.ndarray]] = {}

    def __setitem__(self, order: numpy.ndarray, following: numpy.ndarray) -> None:
        key = id(order)
        self._found[key] = weakref.ref(order, lambda _: self._found.pop(key, None)), following

    def get(self, order: numpy.ndarray) -> numpy.ndarray | None:
        found = self._found.get(id(order))
        return found[1] if found is not None and found[0]() is order else None

    def pop(self, order: numpy.ndarray) -> numpy.ndarray | None:
        following = self.get(order)
        self._found.pop(id(order), None)
        return following


_drawn = _NextOrders()
_loaded = _NextOrders()  # orders that a saved iterator had drawn in advance


@patch('chainer.iterators._statemachine', 'chainer.iterators.serial_iterator',
       'chainer.iterators.multithread_iterator', 'chainer.iterators.multiprocess_iterator')
def prefetched_orders(module: Any) -> None:
    """All versions: prefetching iterators did not save the orders that they had drawn in advance.

    They discarded prefetched batches and drew different orders. No iterator saved the random state
    of its order sampler.
    """
    names = vars(module)
    if 'iterator_statemachine' in names:
        _record_orders(module)
    elif 'SerialIterator' in names:
        _save_orders(module.SerialIterator, None)
    elif 'MultithreadIterator' in names:
        _save_orders(module.MultithreadIterator, '_order')
    else:
        _save_orders(module.MultiprocessIterator, 'order')


@edit('chainer.iterators.multiprocess_iterator')
def iterator_without_order() -> dict[str, str]:
    """All versions: a MultiprocessIterator that does not shuffle could not be saved."""
    return {
        'order = self._state.order.copy()':
            'order = None if self._state.order is None else self._state.order.copy()',
        "            serializer('order', order)":
            "            order is None or serializer('order', order)"}


def _record_orders(module: Any) -> None:
    statemachine = module.iterator_statemachine

    def iterator_statemachine(state: Any, batch_size: int, repeat: bool, order_sampler: Any,
                              dataset_len: int) -> Any:
        def next_order(order: numpy.ndarray, position: int) -> numpy.ndarray:
            if not _is_recorded(order_sampler):
                return order_sampler(order, position)
            with _mutex:
                following = _loaded.pop(order)
                if following is None:
                    following = order_sampler(order, position)
                _drawn[order] = following
                return following

        return statemachine(state, batch_size, repeat, next_order, dataset_len)

    module.iterator_statemachine = iterator_statemachine


def _is_recorded(order_sampler: Any) -> bool:
    """Return whether each order is a new array with new random numbers.

    Other samplers may shuffle the same array in place, and MultiNodeOrderSampler draws the same
    order again.
    """
    from chainer.iterators import ShuffleOrderSampler

    return type(order_sampler) is ShuffleOrderSampler


def _save_orders(cls: Any, order_key: str | None) -> None:
    """Make an iterator save its random state and the orders that it has drawn in advance.

    Args:
        cls: Class of the iterator.
        order_key: Name of the saved order, if the iterator prefetches. The original
            ``serialize`` discards the prefetched batches, even when saving.
    """
    from chainer import serializer as serializer_module

    serialize_original = cls.serialize

    def serialize(self: Any, serializer: Any) -> None:
        if not isinstance(serializer, serializer_module.AbstractSerializer):
            serialize_original(self, serializer)  # for pickle
            return
        with _mutex:
            is_saving = isinstance(serializer, serializer_module.Serializer)
            if order_key is None or not is_saving:
                serialize_original(self, serializer)
            else:
                for name in ('current_position', 'epoch', 'is_new_epoch', '_previous_epoch_detail'):
                    serializer(name.lstrip('_'), getattr(self, name))
                if self._state.order is not None or order_key == '_order':
                    serializer(order_key, self._state.order)
            if is_saving and order_key is not None:
                _save_drawn(self, serializer)
            elif not is_saving:
                _load_drawn(self, serializer)
            _serialize_random(self, serializer)

    cls.serialize = serialize


def _save_drawn(iterator: Any, serializer: Any) -> None:
    order = iterator._state.order
    if order is None or not _is_recorded(iterator.order_sampler):
        return
    orders = []
    while (order := _next_order(order)) is not None:
        orders.append(order)
    if orders:
        import numpy

        serializer('next_orders', numpy.stack(orders))


def _next_order(order: numpy.ndarray) -> numpy.ndarray | None:
    """Return the next order: a loaded one that is not in use yet, or the one that was drawn."""
    loaded = _loaded.get(order)
    return _drawn.get(order) if loaded is None else loaded


def _load_drawn(iterator: Any, serializer: Any) -> None:
    order = iterator._state.order
    if order is not None:  # maybe the same array as before, with different values
        _loaded.pop(order)
        _drawn.pop(order)
    try:
        orders = serializer('next_orders', None)
    except KeyError:
        return
    for following in () if orders is None or order is None else orders:
        _loaded[order] = following
        order = following


def _serialize_random(iterator: Any, serializer: Any) -> None:
    """Save or load the random state, unless it is the global one."""
    import numpy

    random = getattr(iterator.order_sampler, '_random', None)
    if not isinstance(random, numpy.random.RandomState) or random is numpy.random.mtrand._rand:
        return
    state: Any = random.get_state(legacy=False)
    if state['bit_generator'] != 'MT19937':
        return
    try:
        state['state'] = {'key': serializer('order_keys', state['state']['key']),
                          'pos': serializer('order_position', state['state']['pos'])}
        random.set_state(state)
    except KeyError:
        pass  # an older file
