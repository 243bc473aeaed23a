"""Each optimizer has a compressor of its own, since its state belongs to one model."""
from __future__ import annotations

import copy
import weakref
from typing import TYPE_CHECKING, Protocol

from chainermn._process import runtime

if TYPE_CHECKING:
    from chainermn.communicators.compression import Compressor, PowerSGD


class _User(Protocol):
    compression: Compressor | PowerSGD | None


class _CompressorUsers(runtime.Part):
    def __init__(self) -> None:
        self.users: weakref.WeakSet[_User] = weakref.WeakSet()

    def in_child(self) -> bool:
        return True


def own_compressor(compressor: Compressor | PowerSGD | None) -> Compressor | PowerSGD | None:
    """Return a compressor that no other optimizer uses.

    Args:
        compressor: The compressor of a new optimizer.

    Returns:
        The compressor, or a copy without state if it has state and another optimizer uses it.

    Raises:
        ValueError: If it cannot be copied.
    """
    users = runtime.get(_CompressorUsers).users
    if compressor is None or not hasattr(compressor, 'reset') or all(
            each.compression is not compressor for each in users):
        return compressor
    try:
        own = copy.deepcopy(compressor)
    except Exception as error:
        raise ValueError(
            f'the compressor {type(compressor).__name__} is already used by another multi-node '
            f'optimizer, and has state that cannot be copied ({type(error).__name__}: {error}). '
            'Create a separate compressor for each optimizer.') from error
    own.reset()
    return own


def register(user: _User) -> None:
    """Remember who uses a compressor."""
    runtime.get(_CompressorUsers).users.add(user)
