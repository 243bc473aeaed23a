"""Joins the states of a ChainerMN optimizer of which each rank has one shard."""
from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import chainer
import numpy as np

#: The name of the snapshot entry with the elements that the state next to it covers: the first
#: element, the end, and the shape of the parameter.
ENTRY = 'sharded_elements'


class StateShard(NamedTuple):
    """The state of some elements of a parameter: flat arrays in C order.

    If it covers all elements, its arrays keep their original shapes.
    """

    begin: int
    end: int
    state: dict[str, Any]


def join(path: str, shape: tuple[int, ...], parts: Iterable[StateShard]) -> dict[str, Any]:
    """Join the parts of the state of a parameter.

    Args:
        path: The path of the parameter, for error messages.
        shape: The shape of the parameter.
        parts: The parts, in any order; they may overlap.

    Returns:
        The state of all elements; values that do not belong to elements are from the largest part.

    Raises:
        ValueError: If elements are missing.
    """
    size = math.prod(shape)
    parts = sorted(parts, key=lambda part: part[:2])
    for part in parts:
        if part.end - part.begin == size:
            return dict(part.state)
    end, used = 0, []
    for part in parts:
        if part.begin <= end < part.end:
            used.append((end - part.begin, part))
            end = part.end
    if end < size:
        raise ValueError(
            f'the state of {path} is incomplete: the ranks loaded files of a different number of '
            'ranks, or only some of the files. Load the snapshot with '
            'chainermn.create_multi_node_checkpointer, which joins the files of all ranks.')
    _, largest = max(used, key=lambda each: each[1].end - each[1].begin)
    state = dict(largest.state)
    for key, value in state.items():
        if has_size(value, largest.end - largest.begin):
            xp = chainer.backend.get_array_module(value)
            state[key] = xp.concatenate([part.state[key][skip:] for skip, part in used]
                                        ).reshape(shape)
    return state


def has_size(value: Any, size: int) -> bool:
    """Return whether a value is an array of ``size`` elements."""
    return isinstance(value, chainer.get_array_types()) and value.size == size


def merge(shards: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Merge the sharded states in the files of all ranks.

    Args:
        shards: The arrays of each file, by name, or at least those of the sharded states.

    Returns:
        The complete states, by name.

    Raises:
        ValueError: If elements of a state are missing.
    """
    merged: dict[str, np.ndarray] = {}
    for entry in sorted(key for key in shards[0] if key.endswith(f'/{ENTRY}')):
        prefix = entry.removesuffix(ENTRY)
        shape = tuple(shards[0][entry][2:].tolist())
        parts = [StateShard(int(shard[entry][0]), int(shard[entry][1]), {
            key.removeprefix(prefix): shard[key] for key in shard
            if key.startswith(prefix) and key != entry}) for shard in shards]
        for key, value in join(prefix, shape, parts).items():
            merged[prefix + key] = value
    return merged


def load_shard(serializer: Any, target: Any) -> dict[str, tuple[int, int]]:
    """Return which elements each state in a snapshot covers.

    Args:
        serializer: A Chainer deserializer.
        target: The model.

    Returns:
        The first element and the end, by path, of parameters that a sharded optimizer saved.
    """
    found: dict[str, tuple[int, int]] = {}
    for path, _ in target.namedparams():
        try:
            entry = serializer[path](ENTRY, None)
        except KeyError:  # saved by an optimizer that is not sharded
            continue
        if entry is not None:
            found[path] = int(entry[0]), int(entry[1])
    return found
