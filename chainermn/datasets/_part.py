"""Cuts a part out of a data set that is held in memory, without reading a single example.

A part travels to another rank, so it should be small and quick to pickle: of arrays an array is
cut, not a list of rows. What is not known here is not cut. To read the examples of, say, a
``LabeledImageDataset`` would load all images into memory, and would freeze random augmentation.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
from chainer.backends import cuda
from chainer.datasets import (
    ConcatenatedDataset,
    DictDataset,
    SubDataset,
    TransformDataset,
    TupleDataset,
)


class NotInMemoryError(Exception):
    """The data set, or one that it is made of, is of a type whose parts we cannot cut."""


def cut(dataset: Any, indexes: Any) -> Any:
    """Cuts out the examples with the given numbers.

    Args:
        dataset: A data set.
        indexes: 1-dimensional array of integers from 0 to ``len(dataset) - 1``.

    Returns:
        A data set whose ``i``-th example equals ``dataset[indexes[i]]``. It may share memory with
        ``dataset``.

    Raises:
        NotInMemoryError: If the data set cannot be cut.
    """
    if isinstance(dataset, (numpy.ndarray, cuda.ndarray)):
        return _cut_array(dataset, indexes)
    # Not isinstance: a subclass may give other examples than its base class would.
    try:
        cut_this = _CUTTERS[type(dataset)]
    except KeyError:
        raise NotInMemoryError(type(dataset).__name__) from None
    return cut_this(dataset, indexes)


def _cut_array(array: Any, indexes: Any) -> Any:
    if len(indexes) and (numpy.diff(indexes) == 1).all():
        return array[indexes[0]:indexes[-1] + 1]  # a view: no copy on the root
    return array[indexes]


def _cut_list(items: Any, indexes: Any) -> Any:
    return type(items)(items[i] for i in indexes.tolist())


def _cut_tuple_dataset(dataset: Any, indexes: Any) -> Any:
    return TupleDataset(*(cut(column, indexes) for column in dataset._datasets))


def _cut_dict_dataset(dataset: Any, indexes: Any) -> Any:
    return DictDataset(**{key: cut(column, indexes) for key, column in dataset._datasets.items()})


def _cut_sub_dataset(dataset: Any, indexes: Any) -> Any:
    indexes = dataset._start + indexes
    if dataset._order is not None:
        indexes = numpy.asarray(dataset._order, dtype=numpy.intp)[indexes]
    return cut(dataset._dataset, indexes)


def _cut_transform_dataset(dataset: Any, indexes: Any) -> Any:
    return TransformDataset(cut(dataset._dataset, indexes), dataset._transform)


def _cut_concatenated_dataset(dataset: Any, indexes: Any) -> Any:
    lengths = [len(child) for child in dataset._datasets]
    begins = numpy.cumsum([0, *lengths])
    owners = numpy.searchsorted(begins, indexes, side='right') - 1
    parts = [cut(child, indexes[owners == i] - begins[i])
             for i, child in enumerate(dataset._datasets)]
    # The parts one after another hold the examples by owner; this is the way back.
    order = numpy.argsort(numpy.argsort(owners, kind='stable'))
    return SubDataset(ConcatenatedDataset(*parts), 0, len(indexes), order)


_CUTTERS: dict[type, Callable[[Any, Any], Any]] = {
    list: _cut_list,
    tuple: _cut_list,
    TupleDataset: _cut_tuple_dataset,
    DictDataset: _cut_dict_dataset,
    SubDataset: _cut_sub_dataset,
    TransformDataset: _cut_transform_dataset,
    ConcatenatedDataset: _cut_concatenated_dataset,
}
