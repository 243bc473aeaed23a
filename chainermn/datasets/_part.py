"""Cuts a shard out of a dataset in memory, without reading a single example.

A shard is sent to another rank, so it should be small and quick to pickle: the shard of an array is
an array, not a list of rows. Datasets of unknown types are not cut: reading the examples of a
``LabeledImageDataset`` would load all images into memory, and would freeze random augmentation.
"""
from __future__ import annotations

from collections.abc import Callable

import numpy as np
from chainer.backends import cuda
from chainer.datasets import (
    ConcatenatedDataset,
    DictDataset,
    SubDataset,
    TransformDataset,
    TupleDataset,
)

from chainermn._operations.exceptions import ChainerMNError
from chainermn._types import Array, Dataset, Object


class NotInMemoryError(ChainerMNError):
    """The dataset, or a dataset inside it, has a type that cannot be cut."""


def cut(dataset: Dataset, indexes: np.ndarray) -> Dataset:
    """Cut out the examples at the given indexes.

    Args:
        dataset: A dataset.
        indexes: 1-dimensional array of integers from 0 to ``len(dataset) - 1``.

    Returns:
        A dataset whose ``i``-th example equals ``dataset[indexes[i]]``. It may share memory with
        ``dataset``.

    Raises:
        NotInMemoryError: If the dataset cannot be cut.
    """
    if isinstance(dataset, (np.ndarray, cuda.ndarray)):
        return _cut_array(dataset, indexes)
    # Compare the exact type: a subclass may return different examples than its base class.
    try:
        cut_this = _CUTTERS[type(dataset)]
    except KeyError:
        raise NotInMemoryError(type(dataset).__name__) from None
    return cut_this(dataset, indexes)


def _cut_array(array: Array, indexes: np.ndarray) -> Array:
    if len(indexes) and (np.diff(indexes) == 1).all():
        return array[indexes[0]:indexes[-1] + 1]  # a view: no copy on the root
    return array[indexes]


def _cut_list(items: list[Object] | tuple[Object, ...], indexes: np.ndarray) -> Dataset:
    return type(items)(items[i] for i in indexes.tolist())


def _cut_tuple_dataset(dataset: TupleDataset, indexes: np.ndarray) -> Dataset:
    return TupleDataset(*(cut(column, indexes) for column in dataset._datasets))


def _cut_dict_dataset(dataset: DictDataset, indexes: np.ndarray) -> Dataset:
    return DictDataset(**{key: cut(column, indexes) for key, column in dataset._datasets.items()})


def _cut_sub_dataset(dataset: SubDataset, indexes: np.ndarray) -> Dataset:
    indexes = dataset._start + indexes
    if dataset._order is not None:
        indexes = np.asarray(dataset._order, dtype=np.intp)[indexes]
    return cut(dataset._dataset, indexes)


def _cut_transform_dataset(dataset: TransformDataset, indexes: np.ndarray) -> Dataset:
    return TransformDataset(cut(dataset._dataset, indexes), dataset._transform)


def _cut_concatenated_dataset(dataset: ConcatenatedDataset, indexes: np.ndarray) -> Dataset:
    lengths = [len(child) for child in dataset._datasets]
    begins = np.cumsum([0, *lengths])
    owners = np.searchsorted(begins, indexes, side='right') - 1
    parts = [cut(child, indexes[owners == i] - begins[i])
             for i, child in enumerate(dataset._datasets)]
    # The concatenated parts are sorted by owner; restore the original order.
    order = np.argsort(np.argsort(owners, kind='stable'))
    return SubDataset(ConcatenatedDataset(*parts), 0, len(indexes), order)


_CUTTERS: dict[type, Callable[..., Dataset]] = {
    list: _cut_list,
    tuple: _cut_list,
    TupleDataset: _cut_tuple_dataset,
    DictDataset: _cut_dict_dataset,
    SubDataset: _cut_sub_dataset,
    TransformDataset: _cut_transform_dataset,
    ConcatenatedDataset: _cut_concatenated_dataset,
}
