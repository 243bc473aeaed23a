"""The device of a test."""
from __future__ import annotations

import chainer


def get_device(device_id: int | None = None, use_chainerx: bool = False) -> chainer.backend.Device:
    """Return a Chainer device.

    Args:
        device_id: Index of a GPU; ``None`` for the CPU.
        use_chainerx: Whether to return a ChainerX device instead of NumPy's or CuPy's.

    Returns:
        A ``chainer.backend.Device``.

    Example:
        >>> device = chainermn.testing.get_device()
        >>> device.xp is np
        True
    """
    if use_chainerx:
        return chainer.get_device('native:0' if device_id is None else f'cuda:{device_id}')
    return chainer.get_device('@numpy' if device_id is None else f'@cupy:{device_id}')
