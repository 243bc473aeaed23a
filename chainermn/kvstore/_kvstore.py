"""The store as its users see it: keys, arrays, and what is checked before anything is done."""
from __future__ import annotations

import abc
import warnings
from collections.abc import Sequence
from typing import Any

import chainer
import numpy as np

from chainermn.kvstore import _arguments
from chainermn.kvstore._layout import Layout
from chainermn.kvstore._server import total
from chainermn.kvstore._settings import Settings
from chainermn.kvstore.row_sparse import RowSparse


class KVStore(Settings):
    """Arrays by key, to which workers push and from which they pull.

    Make one with :func:`chainermn.kvstore.create`, which says how the types differ.

    A key is an int or a str.  Wherever one key and its value can be given, a list of keys and a
    list of values can be too.  A value is a NumPy or CuPy array or a :class:`RowSparse`, or a list
    of them, one for each device of this process.

    ``priority``, a number or a list with one for each key, is accepted and has no effect: a call
    has done its work when it returns.
    """

    #: Whether values stay on the devices they are on.
    _on_device = False

    # --- who ---------------------------------------------------------------------------------

    @property
    def type(self) -> str:
        """The name of the type that was given to :func:`create`."""
        return self._type

    @property
    def rank(self) -> int:
        """Number of this worker, from 0.  A store without other workers has worker 0."""
        return self._rank

    @property
    def num_workers(self) -> int:
        """Number of workers that share the store."""
        return self._num_workers

    # --- values ------------------------------------------------------------------------------

    def init(self, key: Any, value: Any) -> None:
        """Adds keys, with their first values; each key once, before it is pushed or pulled.

        In the ``dist`` types every rank calls it with the same keys, dtypes and shapes, and the
        values of rank 0 are used.

        Args:
            key: Key, or list of keys.
            value: For each key an array or a :class:`RowSparse`.  With the latter the key becomes
                a row-sparse one, of which rows can be pulled.

        Raises:
            ValueError: If a key is there already, or, on every rank, the ranks differ.
            TypeError: If a key or a value is of a wrong type.
        """
        try:
            keys = _arguments.keys_of(key)
            layouts: list[Layout] = []
            values = []
            for one, (x, *more) in zip(keys, _arguments.values_of(key, value), strict=True):
                if more:
                    raise ValueError('init takes one value for each key')
                if one in self._layouts or one in keys[:len(layouts)]:
                    raise ValueError(f'key {one!r} was initialized before; push to it')
                number = len(self._layouts) + len(layouts)
                layouts.append(Layout.of(
                    one, number, tuple(x.shape), x.dtype, isinstance(x, RowSparse),
                    self._num_workers, self._bound if self._may_cut() else float('inf')))
                values.append(self._placed(x.todense() if isinstance(x, RowSparse) else x))
        except Exception as error:
            self._refuse('init', error)
        self._agree('init', ', '.join(map(str, layouts)))
        self._init(layouts, values)
        self._layouts.update({layout.key: layout for layout in layouts})

    def push(self, key: Any, value: Any, priority: Any = 0) -> None:
        """Pushes values: the updater merges them into the store.

        Several values for one key are summed first.  ``dist_sync``: every rank calls it with the
        same keys; the values of all ranks are summed, by rank, and the updater is called once.
        ``dist_async``: the updater is called for what this rank pushed, when it arrives.

        Args:
            key: Key, or list of keys.
            value: For each key an array or a :class:`RowSparse`, or a list of them.
            priority: Has no effect.

        Raises:
            ValueError: If a key was not initialized, or a shape is not that of the key.
            TypeError: If a dtype is not that of the key, or an argument is of a wrong type.
            Exception: What the updater raises.
        """
        try:
            layouts = [self._layout(one) for one in _arguments.keys_of(key)]
            merged = [self._merged(layout, values) for layout, values in zip(
                layouts, _arguments.values_of(key, value), strict=True)]
        except Exception as error:
            self._refuse('push', error)
        self._push(layouts, merged)

    def pull(self, key: Any, out: Any = None, priority: Any = 0) -> Any:
        """Gets the values of keys.  ``dist_sync``: every rank calls it with the same keys.

        Row-sparse keys are passed over with a warning; see :meth:`row_sparse_pull`.

        Args:
            key: Key, or list of keys.
            out: For each key an array, or a list of them, into which the value is written; of the
                dtype and shape of the key.
            priority: Has no effect.

        Returns:
            Without ``out`` a new array, or a list of new arrays for a list of keys (``None`` for a
            row-sparse key).  They are on the host, but where values stay on their devices.

        Raises:
            ValueError: If a key was not initialized, or a shape is not that of the key.
            TypeError: If a dtype is not that of the key, or an argument is of a wrong type.
        """
        try:
            layouts = [self._layout(one) for one in _arguments.keys_of(key)]
            outs = [[]] * len(layouts) if out is None else _arguments.lists_of(key, out, 'out')
            for layout, one in zip(layouts, outs, strict=True):
                for x in one if not layout.is_row_sparse else ():
                    _arguments.check_out(x, layout)
        except Exception as error:
            self._refuse('pull', error)
        dense = [layout for layout in layouts if not layout.is_row_sparse]
        if len(dense) < len(layouts):
            warnings.warn('pull passes over row-sparse keys; use row_sparse_pull', UserWarning,
                          stacklevel=2)
        pulled = {layout.number: x for layout, (x,) in zip(dense, self._pull(
            dense, [[None]] * len(dense)), strict=True)} if dense else {}
        for layout, one in zip(layouts, outs, strict=True):
            for x in one if not layout.is_row_sparse else ():
                _arguments.write(x, pulled[layout.number])
        if out is not None:
            return None
        found = [pulled.get(layout.number) for layout in layouts]
        return found if isinstance(key, (tuple, list)) else found[0]

    def row_sparse_pull(self, key: Any, out: Any = None, priority: Any = 0,
                        row_ids: Any = None) -> Any:
        """Gets some rows of row-sparse keys.

        ``dist_sync``: every rank calls it with the same keys; the rows may differ.

        Args:
            key: Key, or list of keys.
            out: For each key an array or a :class:`RowSparse`, or a list of them, of the dtype and
                shape of the key.  It gets the rows that are asked for; all others become 0.
            priority: Has no effect.
            row_ids: One-dimensional array of integers, in any order and with repetitions; or a
                list with one for each key, or a list of them for the outputs of each key.

        Returns:
            Without ``out`` a new :class:`RowSparse`, or a list of them for a list of keys.

        Raises:
            ValueError: If a key was not initialized or is not row-sparse, or a row is not there.
            TypeError: If an argument is of a wrong type.
        """
        try:
            layouts = [self._layout(one) for one in _arguments.keys_of(key)]
            outs = [[None]] * len(layouts) if out is None else \
                _arguments.lists_of(key, out, 'out')
            for layout, one in zip(layouts, outs, strict=True):
                if not layout.is_row_sparse:
                    raise ValueError(f'key {layout.key!r} was not initialized with a RowSparse; '
                                     'use pull')
                for x in one if out is not None else ():
                    _arguments.check_out(x, layout)
            ids = _arguments.row_ids_of(row_ids, key, outs, layouts)
        except Exception as error:
            self._refuse('row_sparse_pull', error)
        # Where all outputs of a key get the same rows, these are asked for once.
        asked = [its[:1] if all(one is its[0] for one in its) else its for its in ids]
        found = []
        for layout, one, its_ids, its_rows in zip(
                layouts, outs, asked, self._pull(layouts, asked), strict=True):
            for n, x in enumerate(one):
                some_ids, rows = its_ids[n % len(its_ids)], its_rows[n % len(its_rows)]
                if x is None:
                    found.append(RowSparse(some_ids, rows, layout.shape))
                else:
                    _arguments.write_rows(x, some_ids, rows)
        if out is not None:
            return None
        return found if isinstance(key, (tuple, list)) else found[0]

    # --- the end -----------------------------------------------------------------------------

    def close(self) -> None:
        """Says that this worker is done with the store, which it must not use any more.

        In a ``dist_async`` store this rank goes on serving the others until all of them are done
        too.  Stores that are not closed are closed at the end of the program.
        """

    def __enter__(self) -> KVStore:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    # --- how the types differ ----------------------------------------------------------------

    @abc.abstractmethod
    def _init(self, layouts: Sequence[Layout], values: Sequence[Any]) -> None:
        """Gives the servers their parts of new keys."""

    @abc.abstractmethod
    def _push(self, layouts: Sequence[Layout], values: Sequence[Any]) -> None:
        """Gets values, arrays or of type RowSparse, to the servers' updaters."""

    @abc.abstractmethod
    def _pull(self, layouts: Sequence[Layout], row_ids: Sequence[Sequence[Any]]
              ) -> list[list[Any]]:
        """Returns new arrays, by key: for each of its ``row_ids`` these rows; for None all."""

    def _layout(self, key: Any) -> Layout:
        if key not in self._layouts:
            there = ', '.join(map(repr, list(self._layouts)[:10])) or 'none'
            raise ValueError(f'key {key!r} was not initialized; call init({key!r}, value) first '
                             f'(of the keys that were: {there})')
        return self._layouts[key]

    def _placed(self, x: Any) -> Any:
        """A copy of an array where the store keeps its arrays."""
        return x.copy() if self._on_device else np.array(chainer.cuda.to_cpu(x))

    def _merged(self, layout: Layout, values: Sequence[Any]) -> Any:
        """The sum of what was passed for the devices of this process."""
        for x in values:
            _arguments.check_fits(x, layout)
        if layout.is_row_sparse and all(isinstance(x, RowSparse) for x in values):
            values = [x.unique() for x in values]
            return RowSparse(np.concatenate([x.row_ids for x in values]),
                             np.concatenate([x.rows for x in values]), layout.shape).unique()
        arrays = [x.todense() if isinstance(x, RowSparse) else x for x in values]
        if self._on_device:
            device = chainer.backend.get_device_from_array(arrays[0])
            return total([device.send(x) for x in arrays])
        return total([chainer.cuda.to_cpu(x) for x in arrays])
