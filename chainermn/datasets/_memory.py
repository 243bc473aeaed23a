"""Estimates whether scattering a dataset would exhaust the memory of a node."""
from __future__ import annotations

import os
import pathlib
import sys
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from chainer.backends import cuda
from chainer.datasets import SubDataset

from chainermn._operations.exceptions import DataSizeError
from chainermn._types import Object

_SAMPLES = 32  # maximum number of elements of a list that are measured
_VISITS = 10_000  # maximum number of objects that are measured
_MAX_DEPTH = 50  # maximum nesting depth of objects


class NodeMemory(NamedTuple):
    """The free memory of a rank's node."""

    name: str
    free: int | None  # bytes; ``None`` if unknown

    @classmethod
    def here(cls) -> NodeMemory:
        """Return the free memory of this node, or of the process's control group if less."""
        try:
            lines = pathlib.Path('/proc/meminfo').read_text().splitlines()
            values = {name: int(rest.split()[0]) * 1024
                      for name, _, rest in (line.partition(':') for line in lines)}
            free: int | None = values['MemAvailable'] + values.get('SwapFree', 0)
        except (OSError, KeyError, ValueError, IndexError):
            free = None
        limits = [each for each in (free, _free_in_group()) if each is not None]
        return cls(os.uname().nodename, min(limits, default=None))


def check(n_bytes: int, shares: Sequence[float], nodes: Sequence[NodeMemory], root: int) -> None:
    """Raise an error if the ranks of a node would receive more data than fits into its memory.

    Args:
        n_bytes: Estimated size of the dataset.
        shares: The fraction of the dataset that each rank receives.
        nodes: The node of each rank.
        root: The rank that has the dataset.

    Raises:
        DataSizeError: If the data does not fit.
    """
    received: dict[str, float] = {}
    free: dict[str, int] = {}
    for rank, (share, node) in enumerate(zip(shares, nodes, strict=True)):
        if rank != root and node.free is not None:
            received[node.name] = received.get(node.name, 0.) + share
            free[node.name] = min(free.get(node.name, node.free), node.free)
    for name, share in received.items():
        if n_bytes * share > free[name]:
            raise DataSizeError(
                f'the dataset needs about {_text(n_bytes)}, of which the ranks on node {name} '
                f'would receive {_text(n_bytes * share)}, but that node has only '
                f'{_text(free[name])} free. Write the dataset to files with '
                'chainermn.datasets.write_shards and read them with '
                'chainermn.iterators.ShardedIterator, or scatter a list of paths.')


def estimate(dataset: Object) -> int:
    """Estimate the size of a dataset in memory in bytes, without reading examples from files.

    An object that customizes how it is pickled counts as small.
    """
    return _Estimate().bytes_of(dataset)


class _Estimate:
    """Visits some of the objects that a dataset consists of."""

    def __init__(self) -> None:
        self._rest = _VISITS

    def bytes_of(self, value: Object, depth: int = 0) -> int:
        """Estimate the size of an object at a nesting depth."""
        self._rest -= 1
        kind = type(value)
        if isinstance(value, (np.ndarray, cuda.ndarray)):
            return int(value.nbytes)
        if self._rest < 0 or depth > _MAX_DEPTH or kind in (str, bytes, bytearray):
            return sys.getsizeof(value)
        if kind in (list, tuple):
            return self._of_items(value, depth)
        if kind is dict:
            return self._of_items([*value.values()], depth)
        if kind is SubDataset:
            n = len(value._dataset)
            return self.bytes_of(value._dataset, depth + 1) * len(value) // n if n else 0
        if _pickles_itself(kind):
            return sys.getsizeof(value)
        attributes = [*getattr(value, '__dict__', {}).values()]
        return self._of_items(attributes, depth) or sys.getsizeof(value)

    def _of_items(self, items: Sequence[Object], depth: int) -> int:
        """Estimate the total size of items from a sample of them; each object counts only once."""
        some = items[::-(-len(items) // _SAMPLES) or 1]
        unique = {id(each): each for each in some}
        n = len(items) if len(unique) == len(some) else len({*map(id, items)})
        total = sum(self.bytes_of(each, depth + 1) for each in unique.values())
        return total * n // max(len(unique), 1)


def _pickles_itself(kind: type) -> bool:
    return any(name in vars(base) for base in kind.__mro__ if base is not object
               for name in ('__getstate__', '__reduce__', '__reduce_ex__'))


def _free_in_group() -> int | None:
    """Return the memory that a container or Slurm job may still use; ``None`` if unlimited."""
    try:
        path = pathlib.Path('/proc/self/cgroup').read_text().splitlines()[-1].split(':', 2)[2]
        group = pathlib.Path('/sys/fs/cgroup' + path)
        limit = (group / 'memory.max').read_text()
        used = int((group / 'memory.current').read_text())
        statistics = dict(line.split() for line in (group / 'memory.stat').read_text().splitlines())
        return int(limit) - used + int(statistics.get('inactive_file', 0))
    except (OSError, ValueError, IndexError):  # ValueError if the limit is "max"
        return None


def _text(n_bytes: float) -> str:
    return f'{n_bytes / 1e9:.3g} GB'
