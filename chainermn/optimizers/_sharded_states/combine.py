"""Joins the states of an optimizer whose ranks keep one shard each."""
from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import chainer

from chainermn._types import Model, Object, Serializer
from chainermn.optimizers._sharded_states.partition import Shard

#: The name of the entry in snapshots that tells which elements of a parameter the state beside it
#: belongs to: begin, end, and the shape of the parameter.
ENTRY = 'sharded_elements'


class StateShard(NamedTuple):
    """The state of some elements of a parameter: flat arrays in C order.

    The state of all elements is as the update rule made it.
    """

    begin: int
    end: int
    state: dict[str, Object]


def join(path: str, shape: tuple[int, ...], parts: Iterable[StateShard]) -> dict[str, Object]:
    """Join the parts of the state of a parameter.

    Args:
        path: Path of the parameter, for errors.
        shape: Its shape.
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


def has_size(value: Object, size: int) -> bool:
    """Return whether a value is an array of ``size`` elements."""
    return isinstance(value, chainer.get_array_types()) and value.size == size


def load_shard(serializer: Serializer, target: Model) -> Shard:
    """Load which elements the states in a snapshot belong to.

    Args:
        serializer: A Chainer deserializer.
        target: The model.

    Returns:
        The elements, for each parameter whose state was saved by a sharded optimizer.
    """
    found: Shard = {}
    for path, _ in target.namedparams():
        try:
            entry = serializer[path](ENTRY, None)
        except KeyError:  # saved by an optimizer that is not sharded
            continue
        if entry is not None:
            found[path] = int(entry[0]), int(entry[1])
    return found
