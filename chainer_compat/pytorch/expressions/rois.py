"""Pooling of regions of interest, for object detection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch


def average_pooling(f: Any, x: Any, rois: Any, index: Any) -> Any:
    """``torch.einsum('rchw,rih,rjw->rcij', x[index], rows, columns)``, with masks of each bin."""
    rows, columns = (each.to(x.dtype) for each in _bins(f, rois, 0))
    total = torch.einsum('rchw,rih,rjw->rcij', x[index.long()], rows, columns)
    counts = rows.sum(2)[:, None, :, None] * columns.sum(2)[:, None, None]
    return total / torch.clamp(counts, min=1)


def max_pooling(f: Any, x: Any, rois: Any, index: Any) -> Any:
    """``torch.max`` of ``torch.where(rows, x[index], -inf)``, then of columns, with bin masks."""
    return _maximum(x[index.long()], *_bins(f, rois, 0))


def pooling(f: Any, x: Any, rois: Any) -> Any:
    """Like ``max_pooling``, with the index of the image in ``rois``, and 0 for empty bins."""
    corners = f.constant(np.array([2, 1, 4, 3]))
    y = _maximum(x[rois[:, 0].long()], *_bins(f, rois.index_select(1, corners), 1))
    return torch.where(torch.isinf(y), torch.zeros_like(y), y)


def average_align(f: Any, x: Any, rois: Any, index: Any) -> Any:
    """``torch.einsum`` as in average pooling, with the weights of a bilinear interpolation."""
    rows, columns = (weights.sum(2) / counts for weights, _, counts in _samples(f, rois))
    return torch.einsum('rchw,rih,rjw->rcij', x[index.long()], rows, columns)


def max_align(f: Any, x: Any, rois: Any, index: Any) -> Any:
    """``torch.max`` of bilinearly interpolated samples."""
    (rows, in_rows, _), (columns, in_columns, _) = _samples(f, rois)
    y = torch.einsum('rchw,rikh,rjlw->rcijkl', x[index.long()], rows, columns)
    is_inside = in_rows[:, None, :, None, :, None] & in_columns[:, None, None, :, None, :]
    return torch.max(_where(is_inside, y).flatten(4), 4)[0]


def _bins(f: Any, rois: Any, more: int) -> list[Any]:
    """Return masks of the rows and columns of each bin."""
    masks = []
    for axis, out in enumerate((f.outh, f.outw)):
        begin, end = (torch.round(rois[:, i] * f.spatial_scale).double().unsqueeze(1)
                      for i in (axis, axis + 2))
        stride = torch.clamp(end - begin + more, min=1) / out
        bins = f.constant(np.arange(out, dtype='d'))
        low, high = (begin + edge for edge in (
            torch.floor(bins * stride), torch.ceil((bins + 1) * stride)))
        places = f.constant(np.arange(f.in_shapes[0][2 + axis]))
        masks.append((places >= low.unsqueeze(2)) & (places < high.unsqueeze(2)))
    return masks


def _maximum(x: Any, rows: Any, columns: Any) -> Any:
    y = torch.max(_where(rows[:, None, :, :, None], x[:, :, None]), 3)[0]
    return torch.max(_where(columns[:, None, None], y[:, :, :, None]), 4)[0]


def _where(condition: Any, x: Any) -> Any:
    return torch.where(condition, x, torch.full_like(x, float('-inf')))


def _samples(f: Any, rois: Any) -> list[tuple[Any, Any, Any]]:
    """Return, for rows and columns: weights by bin and sample, valid samples, their number."""
    found = []
    for axis, (out, ratio) in enumerate(zip((f.outh, f.outw), f.sampling_ratio, strict=True)):
        begin, end = ((rois[:, i] * f.spatial_scale)[:, None, None] for i in (axis, axis + 2))
        size = torch.clamp(end - begin, min=1) / out
        counts = torch.ceil(size) if ratio is None else torch.full_like(size, ratio)
        numbers = f.call(torch.arange, counts.max().long().item())
        bins = f.constant(np.arange(out)[:, None])
        points = begin + (bins + (numbers + .5) / counts) * size
        limit = f.in_shapes[0][2 + axis]
        counted = (points >= -1) & (points <= limit) & (numbers < counts)
        distances = torch.clamp(points, 0, limit - 1).unsqueeze(3) - f.constant(np.arange(limit))
        weights = torch.relu(1 - torch.abs(distances)) * counted.unsqueeze(3)
        found.append((weights, counted, counts))
    return found


EXPRESSIONS: dict[str, Callable[..., Any]] = {
    'pooling.roi_average_align_2d.ROIAverageAlign2D': average_align,
    'pooling.roi_average_pooling_2d.ROIAveragePooling2D': average_pooling,
    'pooling.roi_max_align_2d.ROIMaxAlign2D': max_align,
    'pooling.roi_max_pooling_2d.ROIMaxPooling2D': max_pooling,
    'pooling.roi_pooling_2d.ROIPooling2D': pooling,
}
