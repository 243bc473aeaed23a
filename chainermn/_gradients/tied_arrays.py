"""Finds arrays that share memory: views of one array, or the same array twice."""
from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence

import chainer
import numpy as np

from chainermn._transport import array_buffers
from chainermn._types import Array, DeviceArray

_base = operator.attrgetter('base')

#: Like ``id``, but without its audit event, which is slow because of the hook in ``exit_status``.
identity = object.__hash__


def sharing_memory(arrays: Sequence[Array]) -> list[list[int]]:
    """Find the arrays that share memory.

    Args:
        arrays: Arrays on any devices.

    Returns:
        The indices of arrays that share memory, in groups of two or more.

    Example:
        >>> x, y = np.zeros(4), np.zeros(4)
        >>> chainermn.optimizers.proxy.sharing_memory([x, y, x[2:], x[:2]])
        [[0, 2, 3]]
    """
    if _are_apart(arrays):
        return []
    found = {i: [i] for i in range(len(arrays))}
    active: list[tuple[int, int]] = []  # end and index of arrays that may overlap the next one
    for begin, end, i in sorted((*_bounds(array), i) for i, array in enumerate(arrays)):
        active = [(last, j) for last, j in active if last > begin]
        for _, j in active:
            if found[i] is not found[j] and _shares(arrays[i], arrays[j]):
                found[i] += found[j]
                for k in found[j]:
                    found[k] = found[i]
        active.append((end, i))
    return sorted(sorted(group) for group in {id(group): group for group in found.values()}.values()
                  if len(group) > 1)


def _are_apart(arrays: Sequence[Array]) -> bool:
    """Return whether a quick check of the owners of the memory shows that no arrays share memory.

    If it returns ``False``, the arrays may or may not share memory.
    """
    bases = [*map(_base, arrays)]
    if [*map(type, bases)].count(type(None)) == len(bases):
        return len({*map(identity, arrays)}) == len(arrays)
    owners = [array if base is None else base for array, base in zip(arrays, bases, strict=True)]
    if len({*map(identity, owners)}) < len(arrays):
        return False
    if all([getattr(owner, 'base', owner) is None for owner in owners]):
        return True
    # Gradients of PyTorch: tensors, whose storages may be parts of the same block of memory.
    ranges = []
    for owner in owners:
        if hasattr(owner, 'untyped_storage'):
            storage = owner.untyped_storage()
            begin, size = storage.data_ptr(), storage.nbytes()
        elif type(owner) is np.ndarray and owner.base is None:
            begin, size = owner.__array_interface__['data'][0], owner.nbytes
        else:
            return False
        ranges.append((begin, begin + size))
    ranges.sort()
    return all([end <= begin for (_, end), (begin, _) in itertools.pairwise(ranges)])


def _shares(x: Array, y: Array) -> bool:
    return bool(chainer.backend.get_array_module(x).shares_memory(x, y))


def _bounds(array: Array) -> tuple[int, int]:
    """Return the address of the first byte, and the address after the last byte."""
    of_device: DeviceArray = array
    begin = (of_device.data.ptr if array_buffers.on_device(array)
             else array.__array_interface__['data'][0])
    if array.flags.c_contiguous or not array.size:
        return begin, begin + array.nbytes
    steps = [(n - 1) * stride for n, stride in zip(array.shape, array.strides, strict=True)]
    return (begin + sum(step for step in steps if step < 0),
            begin + sum(step for step in steps if step > 0) + array.itemsize)
