"""Functions that select elements by index, condition or position."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as N

from chainer_compat.pytorch.expressions.arrays import product
from chainer_compat.pytorch.tensors.arrays import Expression, check_floats, shared
from chainer_compat.pytorch.unsupported import Unsupported


def get_item(f: Any, x: Any) -> Any:
    """``x[slices]``, with ``long`` for integer arrays and ``flip`` for negative steps."""
    return element(f, x, f.slices, f.raw('slices'))


def element(f: Any, x: Any, slices: tuple[Any, ...], known: tuple[Any, ...]) -> Any:
    """Return elements of the first input.

    Args:
        f: The function.
        x: The input.
        slices: The index, as values of the graph.
        known: The index in the example run.
    """
    key, flipped = _key(f, slices, known)
    y = x[key]
    return torch.flip(y, flipped) if flipped else y


def scatter_add(f: Any, x: Any, b: Any) -> Any:
    """``x.index_put(indices, b, accumulate=True)``, with element numbers as indices."""
    shape = f.in_shapes[0]
    key, flipped = _key(f, f.slices, f.raw('slices'))
    numbers = f.call(torch.arange, product(shape)).reshape(shape)[key]
    if flipped:
        numbers = torch.flip(numbers, flipped)
    return x.reshape(-1).index_add(0, numbers.reshape(-1), b.reshape(-1)).reshape(shape)


def integers(x: Any, dtype: Any) -> Any:
    """Return indices in a dtype that PyTorch and ONNX accept; masks are not changed."""
    return x if dtype in ('bool', 'int64') else x.long()


def _key(f: Any, slices: tuple[Any, ...], known: tuple[Any, ...]) -> tuple[Any, list[int]]:
    """Return an index without negative steps, and the axes of the result to flip."""
    key: list[Any] = []
    flipped = []
    given = sum(each is not None and each is not Ellipsis for each in slices)
    axis = position = 0
    arrays = [np.asarray(each) for each in known if isinstance(each, list | np.ndarray)]
    for each, example in zip(slices, known, strict=True):
        if each is Ellipsis:
            missing = len(f.in_shapes[0]) - given
            axis, position = axis + missing, position + missing
        elif isinstance(each, slice) and isinstance(each.step, int) and each.step < 0:
            if arrays:
                raise NotImplementedError('negative steps combined with index arrays')
            size = f.in_shapes[0][axis]
            if isinstance(size, int):
                indices = range(*each.indices(size))
                low, high = (indices[-1], indices[0] + 1) if len(indices) else (0, 0)
                each = slice(low, high, -each.step)
            elif each == slice(None, None, -1):
                each = slice(None)
            else:
                raise NotImplementedError('negative steps over the batch, except [::-1]')
            flipped.append(position)
        elif isinstance(each, list):
            each = f.constant(np.asarray(each))
        elif isinstance(example, np.ndarray):
            each = integers(each, example.dtype)
        elif isinstance(each, int) and any(array.ndim for array in arrays):
            each = f.constant(np.array([each]))  # as in NumPy, an index like the other arrays
            position += 1
        key.append(each)
        position += not isinstance(each, int)
        axis += each is not None and each is not Ellipsis
        position -= each is Ellipsis
    return tuple(key), flipped


def permutate(f: Any, x: Any) -> Any:
    """``x.index_select(axis, indices)``, or ``argsort`` of the indices for the inverse."""
    indices = f.indices.long()
    return x.index_select(f.axis, torch.argsort(indices) if f.inv else indices)


def select_item(f: Any, x: Any, t: Any) -> Any:
    """``x.gather(1, t)``."""
    return x.gather(1, t.long().unsqueeze(1)).squeeze(1)


def embed_id(f: Any, x: Any, W: Any) -> Any:
    """``F.embedding(x, W)``, with zeros for ``ignore_label``."""
    x = x if f.in_dtypes[0] == 'int32' else integers(x, f.in_dtypes[0])
    if f.ignore_label is None:
        return N.embedding(x, W)
    ignored = x == f.ignore_label
    y = N.embedding(torch.where(ignored, torch.zeros_like(x), x), W)
    return torch.where(ignored.unsqueeze(-1), torch.zeros_like(y), y)


def maximum_of(function: Any) -> Any:
    """Return the expression of ``F.max`` or ``F.min``."""
    def expression(f: Any, x: Any) -> Any:
        """``torch.amax`` or ``amin``; each of several equal elements gets the whole gradient."""
        axes = tuple(range(len(f.in_shapes[0]))) if f.axis is None else f.axis
        y = function(x.detach() if f.with_gradients else x, axes, keepdim=True)
        if f.with_gradients:
            zero = torch.zeros_like(x)
            y = y + torch.where(x == y, x - x.detach(), zero).sum(axes, keepdim=True)
        return y if f.keepdims else y.squeeze(axes)

    return expression


EXPRESSIONS: dict[str, Callable[..., Any]] = {
    'array.get_item.GetItem': get_item,
    'array.permutate.Permutate': permutate,
    'array.scatter_add.ScatterAdd': scatter_add,
    'array.select_item.SelectItem': select_item,
    'array.where.Where': lambda f, x, y: torch.where(f.condition.bool(), x, y),
    'connection.embed_id.EmbedIDFunction': embed_id,
    'math.maximum.Maximum': lambda f, x, y: torch.where(x >= y, x, y),
    'math.minimum.Minimum': lambda f, x, y: torch.where(x <= y, x, y),
    'math.minmax.ArgMax': lambda f, x: torch.argmax(x, f.axis).int(),
    'math.minmax.ArgMin': lambda f, x: torch.argmin(x, f.axis).int(),
    'math.minmax.Max': maximum_of(torch.amax),
    'math.minmax.Min': maximum_of(torch.amin),
}


def run_get_item(f: Any, x: torch.Tensor) -> torch.Tensor:
    """``x[slices]``, a view as in NumPy."""
    check_floats(x)
    for each in f.slices:
        kind = type(each)
        if kind is slice:
            if each.step is not None and each.step <= 0:
                raise Unsupported
        elif kind is not int and each is not None and each is not Ellipsis:
            raise Unsupported
    if f.slices.count(Ellipsis) > 1:  # an error in NumPy
        raise Unsupported
    y = x[f.slices]
    if not y.numel():
        raise Unsupported
    return y


def run_where(f: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """``torch.where(condition, x, y)``."""
    check_floats(x, y)
    condition = f.condition
    if type(condition) is not np.ndarray or condition.dtype != bool or not condition.size:
        raise Unsupported
    chosen = shared(condition)
    if chosen is None:
        raise Unsupported
    return torch.where(chosen, x, y)


class _Embedding(torch.autograd.Function):
    """An embedding whose gradient uses the IDs at the time of ``backward``, as in Chainer."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, W: torch.Tensor, ignored: int | None) -> torch.Tensor:
        ctx.ids, ctx.n, ctx.ignored = x, len(W), -1 if ignored is None else ignored
        if ignored is None:
            return N.embedding(x.long(), W)
        is_ignored = x == ignored
        y = N.embedding(torch.where(is_ignored, 0, x).long(), W)
        return torch.where(is_ignored.unsqueeze(-1), 0., y)

    @staticmethod
    def backward(ctx: Any, gy: torch.Tensor) -> tuple[None, torch.Tensor, None]:
        return None, torch.ops.aten.embedding_dense_backward(
            gy.contiguous(), ctx.ids.long(), ctx.n, ctx.ignored, False), None


def run_embed_id(f: Any, x: torch.Tensor, W: torch.Tensor) -> torch.Tensor:
    """``F.embedding(x, W)``, with zeros for ``ignore_label``."""
    if not x.numel() or not W.numel() or x.dtype.is_floating_point or (
            not W.dtype.is_floating_point):
        raise Unsupported
    used = x if f.ignore_label is None else x[x != f.ignore_label]
    # Negative IDs count from the end, and IDs that are too large are an error.
    if used.numel() and (used.min() < 0 or used.max() >= len(W)):
        raise Unsupported
    f.retain_inputs((0,))
    f._w_shape = tuple(W.shape)
    return _Embedding.apply(x, W, f.ignore_label)


RECORDED: dict[str, Expression] = {
    'array.get_item.GetItem': run_get_item,
    'array.where.Where': run_where,
    'connection.embed_id.EmbedIDFunction': run_embed_id,
}
