"""Server: stores this rank's shards and updates them with the shards that workers push."""
from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import chainer
import numpy as np

from chainermn.communicators.compression import TwoBit
from chainermn.kvstore import _sharding
from chainermn.kvstore._optimizer_states import OptimizerState
from chainermn.kvstore._optimizer_updater import KeyUpdate, OptimizerUpdater
from chainermn.kvstore._sharding import Buffer, Compress, Entry, Key, KeyLayout, sum_dtype
from chainermn.kvstore.row_sparse import Array

#: Called as ``updater(key, pushed, stored)``; changes ``stored`` in place.
Updater: TypeAlias = Callable[[Key, Array, Array], object]


class Server:
    """Stores one shard of each array that is assigned to a rank. Applies one update at a time.

    Args:
        rank: Rank of this server.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.updater: Updater | OptimizerUpdater = assign
        self.compressor: TwoBit | None = None
        #: Returns the loss scale of pushed gradients. They are divided by it before compression.
        self.loss_scale: Callable[[], float | None] = lambda: None
        self.layouts: list[KeyLayout] = []
        #: This server's shards, by index of the key (``KeyLayout.key_id``).
        self.shards: dict[int, Array] = {}
        #: Factors for the sums of the pushed values of some keys.
        self.scales: dict[Key, float] = {}
        self._loaded: dict[Key, OptimizerState] = {}  # states of keys that are not initialized yet
        self._lock = threading.RLock()

    @property
    def compress(self) -> Compress | None:
        """The function that compresses pushed values, if there is one."""
        return None if self.compressor is None else self._compress

    def _compress(self, x: Array, key: Hashable) -> Array:
        assert self.compressor is not None
        if (scale := self.loss_scale()) is not None:
            x = x.astype(sum_dtype(x.dtype), copy=False)
            x = x / x.dtype.type(scale)
        return self.compressor.compress(x, key)

    def decompress(self, encoded: Array, size: int, dtype: np.dtype) -> Array:
        """Decompress a value that a worker compressed."""
        assert self.compressor is not None
        if (scale := self.loss_scale()) is None:
            return self.compressor.decompress(encoded, size, dtype)
        x = self.compressor.decompress(encoded, size, sum_dtype(dtype))
        with np.errstate(over='ignore'):
            return (x * x.dtype.type(scale)).astype(dtype, copy=False)

    def add_keys(self, layouts: Sequence[KeyLayout], shards: Mapping[int, Array]) -> None:
        """Add keys and this server's shards of them, by index of the key. The server owns them now.

        Raises:
            ValueError: If loaded optimizer states do not match a key. In this case, no key is
                added.
        """
        with self._lock:
            loaded = self._pop_loaded(layouts)
            self.layouts += layouts
            self.shards.update(shards)
            self._restore(loaded)

    def update(self, inputs: Iterable[tuple[int, Sequence[Array]]]) -> None:
        """Update shards once.

        Args:
            inputs: Pairs of the index of a key and arrays to be summed, which have the shape of
                the shard. Each key occurs once. If the updater is a function, it is called for each
                pair before the next pair is read.
        """
        with self._lock:
            if isinstance(self.updater, OptimizerUpdater):
                self.updater.update([self._key_update(key_id, xs) for key_id, xs in inputs])
                return
            for key_id, xs in inputs:
                key, pushed, stored = self._key_update(key_id, xs)
                with chainer.using_device(chainer.backend.get_device_from_array(stored)):
                    _run(self.updater, key, pushed, stored)

    def _key_update(self, key_id: int, inputs: Sequence[Array]) -> KeyUpdate:
        """Return the update of a shard, given the arrays to be summed."""
        layout, stored = self.layouts[key_id], self.shards[key_id]
        scale, dtype = self.scales.get(layout.key, 1.), stored.dtype
        if isinstance(self.updater, OptimizerUpdater):
            scale *= self.updater.rescale_grad
            dtype = self.updater.gradient_dtype(layout.key, dtype)
        device = chainer.backend.get_device_from_array(stored)
        with chainer.using_device(device):
            total = sum_arrays([device.send(x) for x in inputs], dtype, scale)
        return KeyUpdate(layout.key, total, stored)

    def apply(self, entries_of_keys: Iterable[Sequence[Entry]]) -> None:
        """Update shards once with the sums of the values that workers pushed for them."""
        self.update((entries[0].key_id, self._values_of_all(entries))
                    for entries in entries_of_keys)

    def _values_of_all(self, entries: Sequence[Entry]) -> list[np.ndarray]:
        layout = self.layouts[entries[0].key_id]
        return [self.values_of(entry, layout) for entry in entries]

    def values_of(self, entry: Entry, layout: KeyLayout) -> np.ndarray:
        """Return the values of an entry as an array with the shape of the shard."""
        shape = layout.shard_shape(self.rank)
        if entry.kind == _sharding.COMPRESSED:
            size = int(np.prod(shape, dtype=np.int64))
            return self.decompress(
                entry.values.view(np.uint32), size, layout.dtype).reshape(shape)
        length = math.prod(shape if entry.kind == _sharding.DENSE
                           else (len(entry.row_ids), *shape[1:]))
        is_sum = len(entry.values) != length * layout.dtype.itemsize
        values = entry.values.view(sum_dtype(layout.dtype) if is_sum else layout.dtype)
        if entry.kind == _sharding.DENSE:
            return values.reshape(shape)
        dense = np.zeros(shape, values.dtype)
        first = layout.shard_rows(self.rank).start
        dense[entry.row_ids - first] = values.reshape(len(entry.row_ids), *shape[1:])
        return dense

    def reply(self, request: np.ndarray) -> list[Buffer]:
        """Return buffers with the shards, or the rows of shards, that a message requests."""
        return [buffer for entry in _sharding.decode(request)
                for buffer in _sharding.pad(self._read(entry))]

    def _read(self, entry: Entry) -> np.ndarray:
        if entry.kind != _sharding.ROWS:
            return chainer.cuda.to_cpu(self.copy(entry.key_id))
        first = self.layouts[entry.key_id].shard_rows(self.rank).start
        return chainer.cuda.to_cpu(self.copy(entry.key_id, entry.row_ids - first))

    def copy(self, key_id: int, row_ids: np.ndarray | None = None) -> Array:
        """Return a copy of a shard, or of some of its rows, on its device."""
        with self._lock:
            stored = self.shards[key_id]
            device = chainer.backend.get_device_from_array(stored)
            with chainer.using_device(device):
                return stored.copy() if row_ids is None else stored[device.send(row_ids)]

    def set_updater(self, updater: Updater | OptimizerUpdater) -> None:
        """Replace the updater. The optimizer states of the old updater are discarded."""
        with self._lock:
            self.updater = updater
            self._restore(self._pop_loaded(self.layouts))

    def optimizer_states(self) -> dict[int, OptimizerState]:
        """Return the optimizer states of this server's shards, by index of the key."""
        with self._lock:
            assert isinstance(self.updater, OptimizerUpdater)
            states = self.updater.states()
            return {key_id: states[self.layouts[key_id].key] for key_id in self.shards
                    if self.layouts[key_id].key in states}

    @property
    def loaded(self) -> Mapping[Key, OptimizerState]:
        """The loaded optimizer states of keys that are not initialized yet."""
        return self._loaded

    def save_rule(self, layout: KeyLayout, serializer: chainer.AbstractSerializer) -> None:
        """Save the update rule of this server's shard of a key."""
        with self._lock:
            assert isinstance(self.updater, OptimizerUpdater)
            self.updater.save_rule(layout.key, self.shards[layout.key_id], serializer)

    def restore(self, layout: KeyLayout, state: OptimizerState, is_shard: bool) -> None:
        """Set the optimizer states of this server's shard of a key, if it has one.

        Args:
            layout: The layout of the key.
            state: The states.
            is_shard: Whether the states are those of the shard, not of the full array.
        """
        with self._lock:
            if not is_shard:
                self._restore([(layout, state)])
            elif layout.key_id in self.shards:
                assert isinstance(self.updater, OptimizerUpdater)
                self.updater.restore(layout.key, self.shards[layout.key_id], state)

    def replace(self, layout: KeyLayout, value: Array) -> None:
        """Set the value of this server's shard of a key, if it has one, given the full array."""
        with self._lock:
            if layout.key_id in self.shards:
                stored = self.shards[layout.key_id]
                device = chainer.backend.get_device_from_array(stored)
                with chainer.using_device(device):
                    stored[...] = device.send(layout.shard(value, self.rank))

    def load_optimizer_states(self, states: Mapping[Key, OptimizerState]) -> None:
        """Set optimizer states, given for full arrays. Their keys may be initialized later.

        Raises:
            ValueError: If the states do not match the optimizer or an array of any server.
        """
        with self._lock:
            self._loaded = dict(states)
            loaded = self._pop_loaded(self.layouts)
            assert isinstance(self.updater, OptimizerUpdater)
            self.updater.reset()
            self._restore(loaded)

    def _pop_loaded(self, layouts: Sequence[KeyLayout]) -> list[tuple[KeyLayout, OptimizerState]]:
        """Remove and return the loaded states of keys. Errors are the same on all servers."""
        if not isinstance(self.updater, OptimizerUpdater):
            return []
        loaded = [(layout, self._loaded.pop(layout.key)) for layout in layouts
                  if layout.key in self._loaded]
        for layout, state in loaded:
            self.updater.check_state(layout, state)
        return loaded

    def _restore(self, loaded: Sequence[tuple[KeyLayout, OptimizerState]]) -> None:
        for layout, state in loaded:
            if layout.key_id in self.shards:
                assert isinstance(self.updater, OptimizerUpdater)
                self.updater.restore(layout.key, self.shards[layout.key_id], {
                    name: layout.shard(value, self.rank) if isinstance(value, np.ndarray)
                    and value.ndim and value.shape == layout.shape else value
                    for name, value in state.items()})


def _run(updater: Updater, key: Key, pushed: Array, stored: Array) -> None:
    """Call an updater. If it raises an error, add a note with the key and the line."""
    try:
        result: Any = updater(key, pushed, stored)
        if isinstance(result, chainer.get_array_types()) and result is not stored and (
                result.shape == stored.shape):
            raise TypeError(
                'the updater returned a new array, which has no effect. Change stored in place '
                '(stored[...] = result, or stored += change) and return None.')
    except Exception as error:
        # Python 3.10 has no add_note, but other ranks read the notes.
        error.__notes__ = [
            *getattr(error, '__notes__', ()),
            f'in the updater for key {key!r}{_line(updater, error)}']
        raise


def _line(updater: Updater, error: Exception) -> str:
    """Return where an updater raised an error, as text such as ``, at train.py:5``."""
    code = getattr(updater, '__code__', None)
    assert error.__traceback__ is not None
    inner = error.__traceback__.tb_next
    if inner is not None:
        path, line = inner.tb_frame.f_code.co_filename, inner.tb_lineno
    elif code is not None:
        path, line = code.co_filename, code.co_firstlineno
    else:  # C functions have no code object
        return ''
    return f', at {os.path.basename(path)}:{line}'


def assign(key: Key, pushed: Array, stored: Array) -> None:
    """Replace the stored value. This is the default updater."""
    stored[...] = pushed


def sum_arrays(xs: Sequence[Array], dtype: np.dtype, scale: float = 1.) -> Array:
    """Return the sum of arrays, in the given order, times ``scale``, as a new array.

    float16 values are summed and multiplied in float32, so that a mean does not overflow.
    """
    total = xs[0].astype(sum_dtype(dtype))
    for x in xs[1:]:
        total += x
    if scale != 1:
        total *= total.dtype.type(scale)
    with np.errstate(over='ignore'):
        return total.astype(dtype, copy=False)
