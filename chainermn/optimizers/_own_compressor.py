"""Each optimizer has a compressor of its own, since its state belongs to one model."""
from __future__ import annotations

import copy
import weakref
from typing import TYPE_CHECKING

from chainermn._process import runtime
from chainermn._types import Object

if TYPE_CHECKING:
    from chainermn.communicators.compression import Compressor, PowerSGD


class _CompressorUsers(runtime.ProcessState):
    def __init__(self) -> None:
        #: Objects with a compressor as their attribute ``compression``.
        self.users: weakref.WeakSet[Object] = weakref.WeakSet()

    def in_child(self) -> bool:
        return True


def own_compressor(compressor: Compressor | PowerSGD | None, user: Object
                   ) -> Compressor | PowerSGD | None:
    """Return a compressor that nobody else uses.

    Args:
        compressor: A compressor.
        user: The object whose attribute ``compression`` it becomes.

    Returns:
        The compressor, or a copy without state if it has state and somebody else uses it.

    Raises:
        ValueError: If it cannot be copied.
    """
    users = runtime.get(_CompressorUsers).users
    if hasattr(compressor, 'reset') and any(each.compression is compressor for each in users):
        try:
            compressor = copy.deepcopy(compressor)
        except Exception as error:
            raise ValueError(
                f'the compressor {type(compressor).__name__} is already used by another multi-node '
                f'optimizer, and has state that cannot be copied ({type(error).__name__}: {error}).'
                ' Create a separate compressor for each optimizer.') from error
        compressor.reset()  # type: ignore[union-attr]
    users.add(user)
    return compressor
