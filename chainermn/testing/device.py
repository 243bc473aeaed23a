"""The device that a test runs on."""
from __future__ import annotations

from typing import Any

import chainer


def get_device(device_id: int | None = None, use_chainerx: bool = False) -> Any:
    """Returns a Chainer device.

    Args:
        device_id: Number of a GPU, from 0; ``None`` for the host.
        use_chainerx: Whether to use ChainerX's devices in place of NumPy's and CuPy's.
    """
    if use_chainerx:
        return chainer.get_device('native:0' if device_id is None else f'cuda:{device_id}')
    return chainer.get_device('@numpy' if device_id is None else f'@cupy:{device_id}')
