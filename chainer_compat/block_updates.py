"""Update rules compute blocks of many parameters, or of a part of one, which stay in the cache.

Results are bitwise identical to those of one parameter after another.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from chainer_compat.torch_kernels.dispatch import with_kernel

if TYPE_CHECKING:
    from chainer_compat.updates import Array, Member

#: Elements of a block, whose temporary arrays should stay in the cache. Smaller ones spend more
#: time in Python: for MomentumSGD of ResNet-50, 1 << 14 took twice as long.
BLOCK = 1 << 17


class Block:
    """A part of a parameter, or several parameters, as update rules use it."""

    def __init__(self, data: Array, grad: Array) -> None:
        self.data = data
        self.grad = grad
        self.dtype = data.dtype


@with_kernel('updates.update_group')
def update_group(rule: Any, members: list[Member], grads: list[Array]) -> None:
    """Update parameters.

    Args:
        rule: The rule of the first. The rules of all are equal.
        members: Their arrays.
        grads: Their gradients.
    """
    names, states = [*rule._state], rule._state
    try:
        for arrays, grad in _blocks(members, grads):
            rule._state = dict(zip(names, arrays[1:], strict=True))
            rule.update_core_cpu.__wrapped__(rule, Block(arrays[0], grad))  # not PyTorch
    finally:
        rule._state = states


def _blocks(members: list[Member], grads: list[Array]) -> Iterator[tuple[list[Array], Array]]:
    """Yield arrays of at most ``BLOCK`` elements: data and states, and the gradient.

    Changes of the arrays are written back when the next ones are asked for.
    """
    flats: list[list[Array]] = []  # of small parameters: data, states and gradient
    size = 0
    for member, grad in zip(members, grads, strict=True):
        flat = [*member.flat, grad.reshape(-1)]
        if 2 * member.size >= BLOCK:
            for start in range(0, member.size, BLOCK):
                *arrays, part = (array[start:start + BLOCK] for array in flat)
                yield arrays, part
            continue
        if size + member.size > BLOCK:
            yield from _joined(flats)
            flats, size = [], 0
        flats.append(flat)
        size += member.size
    if flats:
        yield from _joined(flats)


def _joined(flats: list[list[Array]]) -> Iterator[tuple[list[Array], Array]]:
    *arrays, grad = flats[0] if len(flats) == 1 else map(np.concatenate, zip(*flats, strict=True))
    yield arrays, grad
    if len(flats) == 1:
        return
    start = 0
    for flat in flats:
        stop = start + flat[0].size
        for array, joined in zip(flat, arrays, strict=False):  # without the gradient
            array[...] = joined[start:stop]
        start = stop
