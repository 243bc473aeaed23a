"""Parameters of a model to one flat buffer and back."""
from __future__ import annotations

import contextlib
import functools
import itertools
import operator
from collections.abc import Sequence
from typing import Any

import chainer
import numpy as np

from chainermn import _signature
from chainermn._transport import array_buffers, batched_copy, parameter_paths

_FLOATS = frozenset(map(np.dtype, ('float16', 'float32', 'float64')))
_dtype_of, _shape_of = operator.attrgetter('dtype'), operator.attrgetter('shape')
_is_writeable = operator.attrgetter('flags.writeable')


def parameters(model: Any, attribute: str, zero_fill: bool = False) -> dict[str, Any]:
    """Returns the arrays of a model by path, in the order that all ranks share.

    Args:
        model: A ``chainer.Link``.
        attribute: ``'data'`` or ``'grad'``.
        zero_fill: Gives initialized parameters without a gradient one of zeros.

    Returns:
        The arrays of the initialized parameters that have one, sorted by path; a parameter that
        is found under two paths appears once.
    """
    if not isinstance(model, chainer.Link):
        raise TypeError(f'expected a model (chainer.Link) but got {type(model)}')
    paths, owners = parameter_paths.named_once(model)
    if attribute == 'grad':
        with contextlib.suppress(RuntimeError):  # a parameter that is not initialized
            grads = [owner.grad for owner in owners]
            # The usual case needs no closer look at each, of which there may be thousands.
            if _are_numpy(grads) and {*map(_dtype_of, grads)} <= _FLOATS and all(
                    map(_is_writeable, grads)):
                return Described(paths, grads)
    arrays: dict[str, Any] = {}
    for path, owner in zip(paths, owners, strict=True):
        array = owner.raw_array
        if array is None:
            continue
        if attribute == 'grad':
            if zero_fill:
                fill_with_zeros(owner)
            array = owner.grad
            if array is None:
                continue
        arrays[path] = _exchangeable(path, attribute, array)
    return arrays


class Alike(list[Any]):
    """Host arrays of one dtype, and their shapes, so that they are looked up once."""

    def __init__(self, arrays: list[Any], shapes: tuple[tuple[int, ...], ...]) -> None:
        super().__init__(arrays)
        self.shapes = shapes


class Described(dict[str, Any]):
    """Host arrays by path, with what has to be equal on all ranks.  Not to be changed."""

    def __init__(self, paths: tuple[str, ...], arrays: list[Any]) -> None:
        super().__init__(zip(paths, arrays, strict=True))
        dtypes, shapes = _dtypes(arrays), shapes_of(arrays)
        self.described = _described(paths, dtypes, shapes)
        self.arrays = Alike(arrays, shapes) if len(dtypes) == 1 else arrays


def listed(arrays: dict[str, Any]) -> list[Any]:
    """The arrays without their paths."""
    return arrays.arrays if isinstance(arrays, Described) else [*arrays.values()]


def shapes_of(arrays: Sequence[Any]) -> tuple[tuple[int, ...], ...]:
    """The shape of each."""
    return arrays.shapes if isinstance(arrays, Alike) else tuple(map(_shape_of, arrays))


def fill_with_zeros(parameter: Any) -> None:
    """Gives an initialized parameter without a gradient one of zeros."""
    if parameter.grad is None:
        parameter.grad = chainer.backend.get_array_module(parameter.array).zeros_like(
            parameter.array)


def describe(arrays: dict[str, Any], places: bool = False) -> dict[str, str]:
    """What has to be equal on all ranks.  Not to be changed.

    Args:
        arrays: By path.
        places: Whether where they are has to be equal; in a mixed model it always has.
    """
    if isinstance(arrays, Described):
        return arrays.described
    xs = [*arrays.values()]
    described = _described(tuple(arrays), _dtypes(xs), shapes_of(xs))
    if not _are_numpy(xs):
        on_device = [path for path, array in arrays.items() if array_buffers.on_device(array)]
        if places or len(on_device) < len(arrays):
            return {**described, **{path: f'{described[path]} on device' for path in on_device}}
    return described


def _are_numpy(arrays: Sequence[Any]) -> bool:
    return [*map(type, arrays)].count(np.ndarray) == len(arrays)


def _dtypes(arrays: Sequence[Any]) -> tuple[Any, ...]:
    """The dtype of each, or just the one that all have."""
    dtypes = tuple(map(_dtype_of, arrays))
    return dtypes[:1] if dtypes and dtypes.count(dtypes[0]) == len(dtypes) else dtypes


@functools.lru_cache(maxsize=64)
def _described(paths: tuple[str, ...], dtypes: tuple[Any, ...], shapes: tuple[Any, ...]
               ) -> _signature.Described:
    if len(dtypes) == 1:
        dtypes *= len(paths)
    return _signature.Described({path: f'{dtype} {shape}' for path, dtype, shape
                              in zip(paths, dtypes, shapes, strict=True)})


def check_finite(model: Any) -> None:
    """Raises ValueError if a gradient is not finite."""
    for path, parameter in sorted(model.namedparams(), key=path_of):
        grad = None if parameter.array is None else parameter.grad
        if grad is not None and not bool(
                chainer.backend.get_array_module(grad).isfinite(grad).all()):
            raise ValueError(f'Parameters diverged after allreduce: the mean gradient of {path} '
                             'is not finite.')


def by_dtype(arrays: Sequence[Any]) -> list[list[Any]]:
    """Groups arrays that can share a buffer, keeping their order."""
    if isinstance(arrays, Alike):
        return [arrays]
    groups: dict[Any, list[Any]] = {}
    for array in arrays:
        on_host = type(array) is np.ndarray or not array_buffers.on_device(array)
        key = array.dtype if on_host else (array.dtype, 'on device')
        if key in groups:
            groups[key].append(array)
        else:
            groups[key] = [array]
    return list(groups.values())


def pack(arrays: Sequence[Any], dtype: Any = None, batched: bool = False,
         scale: float | None = None) -> Any:
    """Returns the elements of all arrays, each in C order, as one flat array.

    A single contiguous array of the right dtype is not copied, unless it is scaled.

    Args:
        arrays: At least one array.
        dtype: Of the result, by default that of the first array.
        batched: Whether a device copies all at once.  Then dtypes have to be floating-point.
        scale: Multiplies the elements, before they are rounded to that dtype.
    """
    dtype = arrays[0].dtype if dtype is None else dtype
    xp = chainer.backend.get_array_module(arrays[0])
    if scale is None:
        if len(arrays) == 1 and arrays[0].flags.c_contiguous:
            return arrays[0].reshape(-1).astype(dtype, copy=False)
        if xp is np:
            return np.concatenate(arrays, None, dtype=dtype, casting='unsafe')
    buffer = xp.empty(sum(array.size for array in arrays), dtype)
    placed = _placed(arrays)
    if batched:
        placed = batched_copy.pack(buffer, placed, 1 if scale is None else scale)
    for start, array in placed:
        piece = buffer[start:start + array.size].reshape(array.shape)
        if scale is None:
            piece[...] = array
        else:
            _scale(array, scale, piece)
    return buffer


def unpack(buffer: Any, arrays: Sequence[Any], scale: float | None = None,
           batched: bool = False) -> None:
    """Copies a flat array into the arrays, in place, multiplied by ``scale`` and cast to theirs.

    float16 is multiplied in float32 and rounded once.
    """
    xp = chainer.backend.get_array_module(arrays[0])
    placed = _placed(arrays)
    if batched and scale is not None and array_buffers.on_device(buffer):
        placed = batched_copy.unpack(buffer, placed, scale)
    for start, array in placed:
        piece = buffer[start:start + array.size].reshape(array.shape)
        if scale is not None:
            _scale(piece, scale, array)
        elif not (array.size and xp.may_share_memory(piece, array)):
            array[...] = piece


def unpacked(buffer: Any, arrays: Sequence[Any], batched: bool = False) -> list[Any]:
    """Returns a flat array as arrays like the given ones.

    They are views of it if all are of its dtype.
    """
    if all(array.dtype == buffer.dtype for array in arrays):
        return [buffer[start:start + array.size].reshape(array.shape)
                for start, array in _placed(arrays)]
    xp = chainer.backend.get_array_module(buffer)
    results = [xp.empty(array.shape, array.dtype) for array in arrays]
    unpack(buffer, results, 1, batched)
    return results


def _scale(x: Any, scale: float, out: Any) -> None:
    """Multiplies in the wider dtype of both, but not in float16, and rounds once."""
    wide = np.result_type(x.dtype, out.dtype, np.float32)
    chainer.backend.get_array_module(x).multiply(
        x, wide.type(scale), out=out, dtype=wide, casting='same_kind')


def _placed(arrays: Sequence[Any]) -> list[tuple[int, Any]]:
    """Each array with its start in the buffer."""
    ends = itertools.accumulate((array.size for array in arrays), initial=0)
    return list(zip(ends, arrays, strict=False))


#: Sorts ``namedparams()`` by path.
path_of = operator.itemgetter(0)


def _exchangeable(path: str, attribute: str, array: Any) -> Any:
    try:
        array_buffers.checked(array)
    except TypeError as error:
        raise TypeError(f'parameter {path}: {error}') from None
    if attribute == 'grad' and array.dtype.kind != 'f':
        raise TypeError(f'parameter {path}: gradients of dtype {array.dtype} cannot be averaged')
    if isinstance(array, np.ndarray) and not array.flags.writeable:
        raise ValueError(f'parameter {path}: its {"gradient" if attribute == "grad" else "array"} '
                         'is read-only, but has to be overwritten; assign a copy of it')
    return array
