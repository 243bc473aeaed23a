"""Updates in blocks that fit into the cache: many parameters, or a part of a parameter.

Results are bitwise identical to updates of one parameter after another.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from chainer_compat.updates import update_formulas

if TYPE_CHECKING:
    from chainer_compat.updates.update_groups import Array, Member
    from chainer_compat.updates.update_plans import Kept

#: Number of elements of a block, whose temporary arrays should fit into the cache. Smaller blocks
#: spend more time in Python: for ResNet-50 with MomentumSGD, 1 << 14 took twice as long.
BLOCK = 1 << 17

#: Same as above, for rules with a formula: a formula uses only one temporary array.
BLOCK_OF_FORMULA = 1 << 16


class Block:
    """A part of a parameter, or several parameters, with the attributes that update rules read."""

    def __init__(self, data: Array, grad: Array) -> None:
        self.data = data
        self.grad = grad
        self.dtype = data.dtype


def length(formula: object) -> int:
    """Return the number of elements of a block, for a formula or a rule without a formula."""
    return BLOCK if formula is None else min(BLOCK, BLOCK_OF_FORMULA)


def update_group(rule: Any, members: list[Member], grads: list[Array], kept: Kept | None = None
                 ) -> None:
    """Update parameters.

    Args:
        rule: The rule of the first parameter. The rules of all parameters are identical.
        members: The arrays of the parameters.
        grads: The gradients of the parameters.
        kept: The data that PyTorch's kernel has stored for these members.
    """
    formula = update_formulas.find(rule, members[0].dtype)
    blocks = _blocks(members, grads, length(formula))
    if formula is not None:
        for block, states in blocks:
            formula(block.data, block.grad, *states)
        return
    names, of_rule = [*rule._state], rule._state
    try:
        for block, states in blocks:
            rule._state = dict(zip(names, states, strict=True))
            rule.update_core_cpu.__wrapped__(rule, block)  # the original function, not PyTorch
    finally:
        rule._state = of_rule


def _blocks(members: list[Member], grads: list[Array], limit: int
            ) -> Iterator[tuple[Block, list[Array]]]:
    """Yield blocks of at most ``limit`` elements, and their states.

    Changes to the arrays are written back when the next block is requested.
    """
    flats: list[list[Array]] = []  # arrays of small parameters: gradient, data and states
    size = 0
    for member, grad in zip(members, grads, strict=True):
        flat = [grad.reshape(-1), *member.flat]
        if 2 * member.size >= limit:
            for start in range(0, member.size, limit):
                part, data, *states = [array[start:start + limit] for array in flat]
                yield Block(data, part), states
            continue
        if size + member.size > limit:
            yield from _joined(flats)
            flats, size = [], 0
        flats.append(flat)
        size += member.size
    if flats:
        yield from _joined(flats)


def _joined(flats: list[list[Array]]) -> Iterator[tuple[Block, list[Array]]]:
    grad, *arrays = flats[0] if len(flats) == 1 else map(np.concatenate, zip(*flats, strict=True))
    data, *states = arrays
    yield Block(data, grad), states
    if len(flats) == 1:
        return
    start = 0
    for _, *flat in flats:  # without the gradient
        stop = start + flat[0].size
        for array, joined in zip(flat, arrays, strict=True):
            array[...] = joined[start:stop]
        start = stop
