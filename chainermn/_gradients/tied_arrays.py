"""Which arrays share memory: views of one array, or the same array twice."""
from __future__ import annotations

import operator
from collections.abc import Sequence

import chainer

from chainermn._transport import array_buffers
from chainermn._types import Array, DeviceArray

_base = operator.attrgetter('base')


def sharing_memory(arrays: Sequence[Array]) -> list[list[int]]:
    """Return which arrays share memory.

    Args:
        arrays: Arrays, on any devices.

    Returns:
        The indices of arrays that share memory, in groups of two or more.

    Example:
        >>> x, y = np.zeros(4), np.zeros(4)
        >>> chainermn.optimizers.proxy.sharing_memory([x, y, x[2:], x[:2]])
        [[0, 2, 3]]
    """
    bases = [*map(_base, arrays)]
    owners = {id(array if base is None else base)
              for array, base in zip(arrays, bases, strict=True)}
    if len(owners) == len(arrays) and all(
            base is None or getattr(base, 'base', base) is None for base in bases):
        return []  # usually: each has its own memory, or that of an array that owns it
    found = {i: [i] for i in range(len(arrays))}
    active: list[tuple[int, int]] = []  # end and index of arrays that may reach further
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


def _shares(x: Array, y: Array) -> bool:
    return bool(chainer.backend.get_array_module(x).shares_memory(x, y))


def _bounds(array: Array) -> tuple[int, int]:
    """Return the addresses of the first byte and after the last one."""
    of_device: DeviceArray = array
    begin = (of_device.data.ptr if array_buffers.on_device(array)
             else array.__array_interface__['data'][0])
    if array.flags.c_contiguous or not array.size:
        return begin, begin + array.nbytes
    steps = [(n - 1) * stride for n, stride in zip(array.shape, array.strides, strict=True)]
    return (begin + sum(step for step in steps if step < 0),
            begin + sum(step for step in steps if step > 0) + array.itemsize)
