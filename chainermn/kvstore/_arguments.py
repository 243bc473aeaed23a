"""Checks arguments of a store (keys, values, outputs, row indices) and converts them to lists."""
from __future__ import annotations

import inspect
import operator
from collections.abc import Sequence
from typing import SupportsIndex, TypeAlias

import chainer
import numpy as np

from chainermn.kvstore._sharding import Key, KeyLayout
from chainermn.kvstore.row_sparse import Array, RowSparse, as_row_ids

#: One key: a str, an int or a NumPy integer.
KeyLike: TypeAlias = str | SupportsIndex
#: A list or tuple of keys.
KeysLike: TypeAlias = Sequence[KeyLike]
Value: TypeAlias = Array | RowSparse
#: For one key, a value or a list of values, one per device. For several keys, a list of these.
Values: TypeAlias = Value | Sequence[Value | Sequence[Value]]
#: Row indices; or a list of row indices for each key, or for each output of each key.
RowIdsLike: TypeAlias = (
    Array | Sequence[int] | Sequence[Array | Sequence[int] | Sequence[Array | Sequence[int]]])


def as_keys(key: KeyLike | KeysLike) -> list[Key]:
    """Return one or several keys as a list of ints and strings."""
    keys: list[Key] = []
    for one in key if isinstance(key, (tuple, list)) else [key]:
        if isinstance(one, bool) or not (isinstance(one, str) or hasattr(one, '__index__')):
            raise TypeError(f'a key must be an int or a str, not {_described(one)}')
        try:
            keys.append(one if isinstance(one, str) else operator.index(one))
        except TypeError:  # an array of several elements
            raise TypeError(f'a key must be an int or a str, not {_described(one)}. Pass the key '
                            'as the first argument.') from None
    return keys


def _described(key: object) -> str:
    shape: tuple[int, ...] = getattr(key, 'shape', ())
    return f'an array of shape {shape}' if shape else repr(key)


def as_value_lists(key: KeyLike | KeysLike, values: Values) -> list[list[Value]]:
    """Return a list of values for each key, with one value per device."""
    return [[as_value(x) for x in of_key] for of_key in as_lists(key, values, 'value')]


def as_lists(key: KeyLike | KeysLike, values: Values, name: str) -> list[list[Value]]:
    """Return a list of values or outputs for each key, without checking the elements."""
    keys = key if isinstance(key, (tuple, list)) else [key]
    if not isinstance(key, (tuple, list)):
        of_keys: Sequence[Value | Sequence[Value]] = [values]
    elif isinstance(values, (tuple, list)) and len(values) == len(key):
        of_keys = values
    else:
        n = f'{len(values)}' if isinstance(values, (tuple, list)) else type(values).__name__
        raise ValueError(f'{name} must be a list with one element per key: expected {len(key)} '
                         f'elements, got {n}')
    lists = [list(of_key) if isinstance(of_key, (tuple, list)) else [of_key] for of_key in of_keys]
    for one, of_key in zip(keys, lists, strict=True):
        if not of_key:
            raise ValueError(f'{name} has an empty list for key {one!r}')
    return lists


def check_optimizer(optimizer: object, text: str) -> None:
    """Raise TypeError if a store cannot use the update rules of an optimizer.

    Args:
        optimizer: The optimizer.
        text: The beginning of the error message.
    """
    if not isinstance(optimizer, chainer.optimizer.GradientMethod):
        advice = ('. Pass its actual_optimizer: the store combines the gradients of all ranks.'
                  if hasattr(optimizer, 'actual_optimizer') else ', such as '
                  'chainer.optimizers.SGD()')
        raise TypeError(f'{text}, not {type(optimizer).__name__}{advice}')


def check_updater(updater: object) -> None:
    """Raise TypeError if ``updater(key, pushed, stored)`` is not a valid call."""
    if not callable(updater):
        hint = '. Pass an optimizer to set_optimizer.' if hasattr(updater, 'update_rule') or (
            isinstance(updater, chainer.Optimizer)) else ''
        raise TypeError(f'updater must be callable, not {type(updater).__name__}{hint}')
    try:
        signature = inspect.signature(updater)
    except (TypeError, ValueError):  # some C functions have no signature
        return
    try:
        signature.bind('key', 'pushed', 'stored')
    except TypeError:
        name = getattr(updater, '__name__', type(updater).__name__)
        raise TypeError('updater is called as updater(key, pushed, stored), but its signature is '
                        f'{name}{signature}. Pass a function with three arguments.') from None


def as_value(x: Value) -> Value:
    """Return a value that can be stored. Raise TypeError if its type or dtype is unsupported."""
    if isinstance(x, RowSparse):
        as_value(x.rows)
        return x
    if isinstance(x, np.generic):
        x = np.asarray(x)
    if isinstance(x, chainer.Variable):
        raise TypeError('a value must be an array, not a chainer.Variable. Pass its .array or '
                        '.grad.')
    if not isinstance(x, chainer.get_array_types()) or isinstance(x, np.ma.MaskedArray):
        raise TypeError('a value must be a NumPy array, CuPy array or RowSparse (or a list with '
                        f'one per device), not {type(x).__name__}. Convert numbers and lists of '
                        'numbers with np.array(value, np.float32).')
    if x.dtype.kind not in 'biufc' or not x.dtype.isnative:
        raise TypeError(f'a KVStore cannot store arrays of dtype {x.dtype}. Convert the array to '
                        'a numeric dtype in native byte order.')
    return x


def check_fits(x: Value, layout: KeyLayout) -> None:
    """Raise an error if the dtype or shape of a value differs from its key."""
    if x.dtype != layout.dtype:
        raise TypeError(f'key {layout.key!r} has dtype {layout.dtype}, but the array has dtype '
                        f'{x.dtype}; cast it first: x.astype(numpy.{layout.dtype})')
    if tuple(x.shape) != layout.shape:
        raise ValueError(f'key {layout.key!r} has shape {layout.shape}, but the array has shape '
                         f'{tuple(x.shape)}')


def check_output(out: Value, layout: KeyLayout) -> None:
    """Raise an error if the value of a key cannot be written to ``out``."""
    if isinstance(out, np.generic) or not getattr(getattr(out, 'flags', None), 'writeable', True):
        raise ValueError('out must be a writable array')
    as_value(out)
    check_fits(out, layout)


def as_row_lists(row_ids: RowIdsLike | None, key: KeyLike | KeysLike,
                 n_outs: Sequence[int], layouts: Sequence[KeyLayout]) -> list[list[np.ndarray]]:
    """Return a list for each key, with row indices for all its outputs or for each of them.

    The indices are unique and in ascending order.
    """
    def is_one(x: object) -> bool:
        return isinstance(x, chainer.get_array_types()) or (
            isinstance(x, (tuple, list)) and all(isinstance(i, (int, np.integer)) for i in x))

    if row_ids is None:
        raise TypeError('row_sparse_pull needs row_ids, the indices of the rows to pull')
    if is_one(row_ids):
        row_ids = [row_ids] * len(layouts)
    elif not isinstance(key, (tuple, list)):
        row_ids = [row_ids]
    if not isinstance(row_ids, (tuple, list)) or len(row_ids) != len(layouts):
        raise ValueError('row_ids must be one array, or a list with one element for each of the '
                         f'{len(layouts)} keys')
    lists = []
    for ids, n_out, layout in zip(row_ids, n_outs, layouts, strict=True):
        if is_one(ids):
            ids = [ids]
        if len(ids) not in (1, n_out):
            raise ValueError(f'key {layout.key!r} has {n_out} outputs, but row_ids has {len(ids)} '
                             'arrays for it. Pass one array, or one per output.')
        lists.append([np.unique(as_row_ids(one, layout.shape[0])) for one in ids])
    return lists


def write(out: Array, x: Array) -> None:
    """Copy the elements of ``x`` to ``out``, on any devices."""
    if isinstance(out, chainer.backends.cuda.ndarray):
        with chainer.using_device(chainer.backend.get_device_from_array(out)):
            out[...] = chainer.backend.get_device_from_array(out).send(x)
    else:
        out[...] = chainer.cuda.to_cpu(x)


def write_rows(out: Value, ids: np.ndarray, rows: Array) -> None:
    """Copy rows to a :class:`RowSparse`, or to an array and set its other rows to 0."""
    if isinstance(out, RowSparse):
        device = chainer.backend.get_device_from_array(out.rows)
        out.row_ids, out.rows = ids.copy(), device.send(rows).copy()  # other outputs also get them
        return
    device = chainer.backend.get_device_from_array(out)
    with chainer.using_device(device):
        out[...] = 0
        out[device.send(ids)] = device.send(rows)
