"""What callers of a store may pass: one key or a list, one array for each key or a list."""
from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import chainer
import numpy as np

from chainermn.kvstore._layout import Key, Layout
from chainermn.kvstore.row_sparse import RowSparse, as_row_ids


def keys_of(key: Any) -> list[Key]:
    """Returns the keys as a list."""
    keys = list(key) if isinstance(key, (tuple, list)) else [key]
    for i, one in enumerate(keys):
        if isinstance(one, bool) or not (isinstance(one, str) or hasattr(one, '__index__')):
            raise TypeError(f'a key has to be an int or a str, not {one!r}')
        if not isinstance(one, str):
            keys[i] = operator.index(one)
    return keys


def values_of(key: Any, values: Any) -> list[list[Any]]:
    """Returns for each key the list of values that were passed for its devices, checked."""
    return [[checked(x) for x in one] for one in lists_of(key, values, 'value')]


def lists_of(key: Any, values: Any, name: str) -> list[list[Any]]:
    """Returns for each key the list of what was passed for its devices."""
    if not isinstance(key, (tuple, list)):
        lists = [values]
    elif not isinstance(values, (tuple, list)) or len(values) != len(key):
        n = f'{len(values)}' if isinstance(values, (tuple, list)) else type(values).__name__
        raise ValueError(f'{name} has to be a list with one element for each of the {len(key)} '
                         f'keys, not {n}')
    else:
        lists = list(values)
    lists = [list(one) if isinstance(one, (tuple, list)) else [one] for one in lists]
    if not all(lists):
        raise ValueError(f'{name} has an empty list for a key')
    return lists


def checked(x: Any) -> Any:
    """Returns a value that can be in a store, or raises TypeError."""
    if isinstance(x, RowSparse):
        checked(x.rows)
        return x
    if isinstance(x, np.generic):
        x = np.asarray(x)
    if isinstance(x, chainer.Variable):
        raise TypeError('a value has to be an array, not a chainer.Variable; pass its .array or '
                        '.grad')
    if not isinstance(x, chainer.get_array_types()) or isinstance(x, np.ma.MaskedArray):
        raise TypeError(f'a value has to be a numpy or cupy array or a RowSparse, not {type(x)}')
    if x.dtype.kind not in 'biufc' or not x.dtype.isnative:
        raise TypeError(f'arrays of dtype {x.dtype} cannot be in a store')
    return x


def check_fits(x: Any, layout: Layout) -> None:
    """Raises if ``x`` has not the dtype and shape of a key."""
    if x.dtype != layout.dtype:
        raise TypeError(f'key {layout.key!r} has the dtype {layout.dtype}, not {x.dtype}; cast '
                        f'before the call, e.g. x.astype(numpy.{layout.dtype})')
    if tuple(x.shape) != layout.shape:
        raise ValueError(f'key {layout.key!r} has the shape {layout.shape}, not {tuple(x.shape)}')


def check_out(out: Any, layout: Layout) -> None:
    """Raises if a value cannot be written into ``out``."""
    if isinstance(out, np.generic) or not getattr(getattr(out, 'flags', None), 'writeable', True):
        raise ValueError('out is read-only')
    checked(out)
    check_fits(out, layout)


def row_ids_of(row_ids: Any, key: Any, outs: Sequence[Sequence[Any]],
               layouts: Sequence[Layout]) -> list[list[np.ndarray]]:
    """Returns the row numbers for each output of each key, each number once, in order."""
    def is_one(x: Any) -> bool:
        return isinstance(x, chainer.get_array_types()) or (
            isinstance(x, (tuple, list)) and all(isinstance(i, (int, np.integer)) for i in x))

    if row_ids is None:
        raise TypeError('row_sparse_pull needs row_ids, the numbers of the rows to pull')
    if is_one(row_ids):
        row_ids = [row_ids] * len(outs)
    elif not isinstance(key, (tuple, list)):
        row_ids = [row_ids]
    if not isinstance(row_ids, (tuple, list)) or len(row_ids) != len(outs):
        raise ValueError(f'row_ids has to be one array, or a list for {len(outs)} keys')
    found = []
    for ids, out, layout in zip(row_ids, outs, layouts, strict=True):
        if is_one(ids):
            ids = [ids]
        if len(ids) not in (1, len(out)):
            raise ValueError(f'key {layout.key!r} has {len(out)} outputs but {len(ids)} row_ids')
        ids = [np.unique(as_row_ids(one, layout.shape[0])) for one in ids]
        found.append(ids * len(out) if len(ids) == 1 else ids)
    return found


def write(out: Any, x: Any) -> None:
    """Writes an array into another one, wherever both are."""
    if isinstance(out, chainer.backends.cuda.ndarray):
        with chainer.using_device(chainer.backend.get_device_from_array(out)):
            out[...] = chainer.backend.get_device_from_array(out).send(x)
    else:
        out[...] = chainer.cuda.to_cpu(x)


def write_rows(out: Any, ids: np.ndarray, rows: Any) -> None:
    """Writes some rows; all other rows become 0, or are left out of a :class:`RowSparse`."""
    if isinstance(out, RowSparse):
        out.row_ids = ids
        out.rows = chainer.backend.get_device_from_array(out.rows).send(rows)
        return
    device = chainer.backend.get_device_from_array(out)
    with chainer.using_device(device):
        out[...] = 0
        out[device.send(ids)] = device.send(rows)
