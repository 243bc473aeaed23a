"""Functions that change shapes and axes, or join and split arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as N

from chainer_compat.pytorch.expressions.running import NOTHING, Retained
from chainer_compat.pytorch.tensors import memory_format
from chainer_compat.pytorch.tensors.arrays import Expression, check_floats
from chainer_compat.pytorch.tensors.gpu_arrays import DTYPES
from chainer_compat.pytorch.unsupported import Unsupported


def dtype_of(numpy_dtype: Any) -> torch.dtype:
    """Return the PyTorch dtype for a NumPy dtype."""
    return torch.from_numpy(np.empty(0, numpy_dtype)).dtype


def product(sizes: Any) -> Any:
    """Return the number of elements, which can depend on the batch size."""
    count = 1
    for size in sizes:
        count = count * size
    return count


def widths(begins: Any, ends: Any) -> list[Any]:
    """Return padding widths in the order of ``F.pad``: from the last axis to the first."""
    return [size for pair in reversed(list(zip(begins, ends, strict=True))) for size in pair]


def reshape(x: Any, shape: tuple[Any, ...]) -> Any:
    """Return ``x.reshape(shape)``, with -1 for the only size that depends on the batch size."""
    known = [size for size in shape if isinstance(size, int)]
    if len(known) == len(shape) - 1 and min(known, default=1) > 0:
        shape = tuple(size if isinstance(size, int) else -1 for size in shape)
    return x.reshape(shape)


def broadcast(f: Any, *xs: Any) -> Any:
    """``torch.broadcast_tensors(*xs)``."""
    ys = torch.broadcast_tensors(*xs)
    return tuple(ys[i] for i in range(len(xs)))


def as_strided(f: Any, x: Any) -> Any:
    """``x.contiguous().as_strided(shape, strides, offset)``."""
    if not f.is_contiguous(0):
        raise NotImplementedError('an input that is not contiguous')
    return x.contiguous().as_strided(f.shape, f.strides, f.storage_offset)


def depth2space(f: Any, x: Any) -> Any:
    """Reshape and permute: the order of channels differs from ``pixel_shuffle``."""
    c, h, w = f.in_shapes[0][1:]
    r, c = f.r, c // f.r ** 2
    return x.reshape(-1, r, r, c, h, w).permute(0, 3, 4, 1, 5, 2).reshape(-1, c, h * r, w * r)


def space2depth(f: Any, x: Any) -> Any:
    """Reshape and permute: the order of channels differs from ``pixel_unshuffle``."""
    c, h, w = f.in_shapes[0][1:]
    r = f.r
    return x.reshape(-1, c, h // r, r, w // r, r).permute(0, 3, 5, 1, 2, 4).reshape(
        -1, r * r * c, h // r, w // r)


def pad(f: Any, x: Any) -> Any:
    """``F.pad(x, widths, mode)``, with widths from the last axis to the first."""
    ndim = len(f.in_shapes[0])
    sizes = np.broadcast_to(np.asarray(f.pad_width), (ndim, 2)).tolist()
    if f.mode == 'constant':
        value = f.keywords.get('constant_values', 0)
        if not isinstance(value, int | float):
            raise NotImplementedError('constant_values with several values')
        return N.pad(x, widths(*zip(*sizes, strict=True)), value=value)
    mode = {'edge': 'replicate', 'reflect': 'reflect', 'wrap': 'circular'}.get(f.mode)
    padded = [i for i in range(ndim) if any(sizes[i])]
    if mode is None or f.keywords:
        raise NotImplementedError('a mode other than constant, edge, reflect and wrap')
    if (padded and padded[0] < 2) or ndim not in (3, 4, 5):
        raise NotImplementedError('in these modes: padding of the first two axes, or arrays with '
                                  'fewer than 3 or more than 5 axes')
    inner = widths(*zip(*sizes[2:], strict=True))
    if not f.with_gradients:
        return N.pad(x, inner, mode)
    # As in Chainer, gradients of the padding are ignored.
    return N.pad(x.detach(), inner, mode) + N.pad(x - x.detach(), inner)


def pad_sequence(f: Any, *xs: Any) -> Any:
    """``torch.stack`` of the arrays, each padded with ``F.pad``."""
    length = f.out_shapes[0][1]
    rest = [0, 0] * (len(f.in_shapes[0]) - 1)
    return torch.stack([
        N.pad(x, [*rest, 0, length - shape[0]], value=f.padding)
        for x, shape in zip(xs, f.in_shapes, strict=True)])


def repeat(f: Any, x: Any) -> Any:
    """``torch.repeat_interleave(x, repeats, axis)``."""
    repeats = f.repeats[0] if len(f.repeats) == 1 else f.constant(np.asarray(f.repeats))
    return torch.repeat_interleave(x, repeats, f.axis)


def resize_images(f: Any, x: Any) -> Any:
    """``F.interpolate``; for ``'nearest'``, ``x[:, :, rows][:, :, :, columns]``."""
    from chainer.functions.array.resize_images import compute_indices_and_weights

    size = f.out_H, f.out_W
    if f.mode == 'bilinear':
        return N.interpolate(x, size, mode='bilinear', align_corners=bool(f.align_corners))
    v, u, *_ = compute_indices_and_weights(
        size, f.in_shapes[0][2:], f.mode, f.align_corners, np)
    rows, columns = (f.constant(each.astype(np.int64).reshape(-1)) for each in (v, u))
    return x.index_select(2, rows).index_select(3, columns)


def rollaxis(f: Any, x: Any) -> Any:
    """``torch.movedim(x, axis, start)``, or ``start - 1`` if the axis moves to the end."""
    ndim = len(f.in_shapes[0])
    axis, start = f.axis % ndim, f.start + ndim * (f.start < 0)
    return torch.movedim(x, axis, start - (axis < start))


def separate(f: Any, x: Any) -> Any:
    """``torch.unbind(x, axis)``."""
    return _parts(torch.unbind(x, f.axis), len(f.out_shapes))


def split_axis(f: Any, x: Any) -> Any:
    """``torch.split(x, sizes, axis)``."""
    sizes = [shape[f.axis] for shape in f.out_shapes]
    return _parts(torch.split(x, sizes, f.axis), len(sizes))


def squeeze(f: Any, x: Any) -> Any:
    """``x.squeeze(axes)``."""
    axes = f.axis
    if axes is None:
        axes = tuple(i for i, size in enumerate(f.in_shapes[0]) if isinstance(size, int)
                     and size == 1)
    return x.squeeze(axes)


def transpose(f: Any, x: Any) -> Any:
    """``x.permute(axes)``."""
    axes = f.axes
    if axes is None:
        axes = range(len(f.in_shapes[0]))[::-1]
    return x.permute(tuple(int(axis) for axis in axes))


def transpose_sequence(f: Any, *xs: Any) -> Any:
    """``torch.stack`` of the elements at each position."""
    return tuple(
        torch.stack([xs[i][position] for i in range(shape[0])])
        for position, shape in enumerate(f.out_shapes))


def _parts(ys: Any, count: int) -> Any:
    return tuple(ys[i] for i in range(count))


EXPRESSIONS: dict[str, Callable[..., Any]] = {
    'array.as_strided.AsStrided': as_strided,
    'array.broadcast.Broadcast': broadcast,
    'array.broadcast.BroadcastTo': lambda f, x: x.expand(f._shape),
    'array.cast.Cast': lambda f, x: x.to(dtype_of(f.type)),
    'array.concat.Concat': lambda f, *xs: torch.cat(list(xs), f.axis),
    'array.copy.Copy': lambda f, x: x,
    'array.depth2space.Depth2Space': depth2space,
    'array.diagonal.Diagonal': lambda f, x: torch.diagonal(x, f.offset, f.axis1, f.axis2),
    'array.dstack.Dstack': lambda f, *xs: torch.dstack(xs),
    'array.expand_dims.ExpandDims': lambda f, x: x.unsqueeze(f.axis),
    'array.flip.Flip': lambda f, x: torch.flip(x, (f.axis,)),
    'array.fliplr.FlipLR': lambda f, x: torch.fliplr(x),
    'array.flipud.FlipUD': lambda f, x: torch.flipud(x),
    'array.hstack.Hstack': lambda f, *xs: torch.hstack(xs),
    'array.moveaxis.Moveaxis': lambda f, x: torch.movedim(x, f.source, f.destination),
    'array.pad.Pad': pad,
    'array.pad_sequence.PadSequence': pad_sequence,
    'array.repeat.Repeat': repeat,
    'array.reshape.Reshape': lambda f, x: reshape(x, f.shape),
    'array.resize_images.ResizeImages': resize_images,
    'array.rollaxis.Rollaxis': rollaxis,
    'array.separate.Separate': separate,
    'array.space2depth.Space2Depth': space2depth,
    'array.split_axis.SplitAxis': split_axis,
    'array.squeeze.Squeeze': squeeze,
    'array.stack.Stack': lambda f, *xs: torch.stack(list(xs), f.axis),
    'array.swapaxes.Swapaxes': lambda f, x: x.transpose(f.axis1, f.axis2),
    'array.tile.Tile': lambda f, x: torch.tile(x, f.reps),
    'array.transpose.Transpose': transpose,
    'array.transpose_sequence.TransposeSequence': transpose_sequence,
    'array.vstack.Vstack': lambda f, *xs: torch.vstack(xs),
    'math.identity.Identity': lambda f, *xs: xs,
    'math.sum.SumTo': lambda f, x: x.sum_to_size(f._shape),
}


def run_reshape(f: Any, x: torch.Tensor) -> torch.Tensor:
    """``x.reshape(shape)``."""
    _check(x)
    if len(f.shape) < 3:
        x = memory_format.with_ordered_gradient(x)
    return x.reshape(f.shape)


def run_transpose(f: Any, x: torch.Tensor) -> torch.Tensor:
    """``x.permute(axes)``."""
    _check(x)
    return x.permute(f.axes if f.axes is not None else tuple(reversed(range(x.ndim))))


def run_broadcast_to(f: Any, x: torch.Tensor) -> torch.Tensor:
    """``x.expand(shape)``."""
    _check(x)
    if any([size <= 0 for size in f._shape]):  # PyTorch keeps the size of an axis for -1
        raise Unsupported
    return x.expand(f._shape)


def run_split(f: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """``torch.tensor_split(x, indices, axis)``."""
    _check(x)
    indices = f.sections if f.indices is None else tuple(f.indices)
    if isinstance(indices, tuple):
        if not all([isinstance(i, int | np.integer) and i >= 0 for i in indices]):
            raise Unsupported
        indices = tuple(map(int, indices))
    ys = torch.tensor_split(x, indices, f.axis)
    f._xp = np
    f._shapes = [tuple(y.shape) for y in ys]
    return tuple(ys)


def run_separate(f: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """``torch.unbind(x, axis)``."""
    _check(x)
    ys = torch.unbind(x, f.axis)
    f._xp, f._shape, f._dtype = np, tuple(ys[0].shape), DTYPES[x.dtype]
    return tuple(ys)


def run_squeeze(f: Any, x: torch.Tensor) -> torch.Tensor:
    """``x.squeeze(axes)``."""
    _check(x)
    if f.axis is None:
        return x.squeeze()
    if any([x.shape[axis] != 1 for axis in f.axis]):  # an error in NumPy
        raise Unsupported
    return x.squeeze(f.axis)


def _check(x: torch.Tensor) -> None:
    check_floats(x)
    if not x.numel():
        raise Unsupported


def _set_in_ndim(f: Any, x: torch.Tensor) -> None:
    f._in_ndim = x.ndim


def _set_in_shape(f: Any, x: torch.Tensor) -> None:
    f._in_shape = tuple(x.shape)


RETAINED: dict[str, Retained] = {
    'array.concat.Concat': NOTHING,
    'array.expand_dims.ExpandDims': NOTHING,
    'array.moveaxis.Moveaxis': Retained(attributes=_set_in_ndim),
    'array.rollaxis.Rollaxis': Retained(attributes=_set_in_ndim, shapes=True),
    'array.stack.Stack': NOTHING,
    'array.swapaxes.Swapaxes': NOTHING,
    'array.tile.Tile': Retained(attributes=_set_in_shape),
}

RECORDED: dict[str, Expression] = {
    'array.broadcast.BroadcastTo': run_broadcast_to,
    'array.reshape.Reshape': run_reshape,
    'array.separate.Separate': run_separate,
    'array.split_axis.SplitAxis': run_split,
    'array.squeeze.Squeeze': run_squeeze,
    'array.transpose.Transpose': run_transpose,
}
