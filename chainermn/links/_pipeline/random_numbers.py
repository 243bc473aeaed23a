"""Random numbers of a forward step, which recomputation draws again."""
from __future__ import annotations

import contextlib
from collections.abc import Iterator

import chainer
import numpy as np

from chainermn._types import Object


def begin(link: chainer.Link) -> Object:
    """Return the state with which a forward step of a link begins.

    The state of CuPy's generator cannot be read; on a device it gets a new seed, from NumPy's.
    """
    state = np.random.get_state()
    _seed(link)
    return state


@contextlib.contextmanager
def again(link: chainer.Link, state: Object) -> Iterator[None]:
    """Draw the numbers since :func:`begin` again; then go on with others."""
    after = np.random.get_state()
    np.random.set_state(state)
    _seed(link)
    try:
        yield
    finally:
        np.random.set_state(after)
        _seed(link)


def _seed(link: chainer.Link) -> None:
    if isinstance(link.device, chainer.backend.GpuDevice):
        import cupy

        cupy.random.seed(np.random.randint(2**31))
