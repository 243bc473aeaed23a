"""Merges states that are split over ranks, as if one rank had saved them."""
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from chainer_compat.updates.sharded_states import ENTRY
from chainermn.extensions._checkpointing.rank_file import accumulated, sharded_states

_SUFFIX = f'/{ENTRY}'

#: The sharded states in one file, by name.
Shard = dict[str, np.ndarray]


def read_shard(arrays: Mapping[str, np.ndarray]) -> Shard:
    """Read the sharded states in one file; the result is empty if the states are not sharded."""
    return {key: arrays[key] for key in sharded_states(list(arrays))}


def read_sums(arrays: Mapping[str, np.ndarray]) -> Shard:
    """Read the accumulated gradients in one file; the result is empty if there are none."""
    return {key: arrays[key] for key in accumulated(arrays)}


def mean_of_sums(of_ranks: Sequence[Shard]) -> dict[str, np.ndarray]:
    """Return accumulated gradients for all ranks, whose mean is the mean of the saved gradients."""
    means: dict[str, np.ndarray] = {}
    for key in sorted(set[str]().union(*of_ranks)):
        saved = [sums[key] for sums in of_ranks if key in sums]
        if f'/{key}'.endswith('/chainermn/accumulation/count'):
            means[key] = saved[0]
        else:  # a rank has no gradient if its loss did not use the parameter
            total = np.sum(saved, axis=0, dtype=np.float64)
            means[key] = np.asarray(total / len(of_ranks), saved[0].dtype)
    return means


class MergedArrays(Mapping[str, np.ndarray]):
    """The arrays of one file, with the merged states of all files.

    Args:
        arrays: The arrays of the file, by name.
        merged: The merged states, by name.
    """

    def __init__(self, arrays: Mapping[str, np.ndarray], merged: Mapping[str, np.ndarray]) -> None:
        self._arrays = arrays
        self._merged = merged
        self._keys = {key: None for key in arrays if not key.endswith(_SUFFIX)}

    def __getitem__(self, key: str) -> np.ndarray:
        if key.endswith(_SUFFIX):
            raise KeyError(key)
        return self._merged[key] if key in self._merged else self._arrays[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __contains__(self, key: object) -> bool:
        return key in self._merged or key in self._keys  # without reading the array

    def __len__(self) -> int:
        return len(self._keys)
