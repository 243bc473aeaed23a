"""The part of a store that one rank has."""
from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import chainer
import numpy as np

from chainermn.kvstore import _messages, _updaters
from chainermn.kvstore._layout import Key, Layout
from chainermn.kvstore._messages import Entry

#: Called as ``updater(key, input, stored)``; changes ``stored`` in place.
Updater = Callable[[Key, Any, Any], None]


class Server:
    """Holds arrays, or parts of arrays, and updates them, one at a time.

    Args:
        rank: Number of this server.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.updater: Updater = _updaters.assign
        self.compressor: Any = None
        self.layouts: list[Layout] = []
        self.stored: dict[int, Any] = {}
        self._states: dict[Key, dict[str, Any]] = {}  # loaded, of keys that are not there yet
        self._lock = threading.RLock()

    def init(self, layouts: Sequence[Layout], parts: Mapping[int, Any]) -> None:
        """Adds keys; ``parts`` is what this server has of them, by number, and becomes its own."""
        with self._lock:
            self.layouts += layouts
            self.stored.update(parts)
            self._restore()

    def update(self, number: int, inputs: Sequence[Any]) -> None:
        """Lets the updater merge the sum of some arrays of the shape of the part."""
        with self._lock:
            stored = self.stored[number]
            device = chainer.backend.get_device_from_array(stored)
            with chainer.using_device(device):
                inputs = [device.send(x) for x in inputs]
                self.updater(self.layouts[number].key, total(inputs), stored)

    def received(self, layout: Layout, entry: Entry) -> Any:
        """The array of an entry that was pushed, of the shape of the part."""
        shape = layout.part_shape(self.rank)
        if entry.kind == _messages.COMPRESSED:
            size = int(np.prod(shape, dtype=np.int64))
            return self.compressor.decompress(
                entry.values.view(np.uint32), size, layout.dtype).reshape(shape)
        values = entry.values.view(layout.dtype)
        if entry.kind == _messages.DENSE:
            return values.reshape(shape)
        dense = np.zeros(shape, layout.dtype)
        rows = layout.rows(self.rank)
        dense[entry.row_ids - rows.start] = values.reshape(len(entry.row_ids), *shape[1:])
        return dense

    def pulled(self, entry: Entry) -> Any:
        """A copy on the host of what an entry asks for."""
        if entry.kind == _messages.ROWS:
            first = self.layouts[entry.number].rows(self.rank).start
            return chainer.cuda.to_cpu(self.copy(entry.number, entry.row_ids - first))
        return chainer.cuda.to_cpu(self.copy(entry.number))

    def copy(self, number: int, row_ids: Any = None) -> Any:
        """A copy of what is stored, or of some rows of it, on its device."""
        with self._lock:
            stored = self.stored[number]
            device = chainer.backend.get_device_from_array(stored)
            with chainer.using_device(device):
                return stored.copy() if row_ids is None else stored[device.send(row_ids)]

    def set_updater(self, updater: Updater) -> None:
        """Replaces the updater, and with it what it remembers."""
        with self._lock:
            self.updater = updater
            self._restore()

    def states(self) -> dict[int, dict[str, Any]]:
        """The states of the optimizer, by number of the key."""
        with self._lock:
            assert isinstance(self.updater, _updaters.OptimizerUpdater)
            states = self.updater.states()
            return {number: states[self.layouts[number].key] for number in self.stored
                    if self.layouts[number].key in states}

    def restore(self, states: dict[Key, dict[str, Any]]) -> None:
        """Sets the states of the optimizer, of keys that are yet to come as well."""
        with self._lock:
            self._states = dict(states)
            self._restore()

    def _restore(self) -> None:
        """Hands the updater the states of those keys that are there now."""
        if not isinstance(self.updater, _updaters.OptimizerUpdater):
            return
        found = [(layout, self._states.pop(layout.key)) for layout in self.layouts
                 if layout.key in self._states]
        for layout, state in found:  # of all servers, so that all of them raise
            self.updater.check(layout, state)
        for layout, state in found:
            if layout.number in self.stored:
                self.updater.restore(layout.key, self.stored[layout.number], {
                    name: layout.part(value, self.rank) if np.shape(value) == layout.shape
                    and value.ndim else value for name, value in state.items()})


def total(xs: Sequence[Any]) -> Any:
    """The sum of arrays, in their order, as a new array; float16 is summed in float32."""
    dtype = xs[0].dtype
    if len(xs) == 1:
        return xs[0].copy()
    found = xs[0].astype(np.float32 if dtype == np.float16 else dtype)
    for x in xs[1:]:
        found += x
    with np.errstate(over='ignore'):
        return found.astype(dtype, copy=False)
