"""Random numbers that a model draws itself, such as noise that it adds to its inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from chainer_compat.pytorch.conversion.tracked_array import Array


def tracked_functions(draw: Callable[[str, Any], Array]) -> dict[str, Callable[..., Array]]:
    """Return functions of ``numpy.random`` by name, computed from two of them.

    Args:
        draw: Draws tracked numbers, called with ``standard_normal`` or ``random_sample`` and the
            shape.
    """
    def normal(loc: Any = 0., scale: Any = 1., size: Any = None) -> Array:
        return draw('standard_normal', _shape(size, loc, scale)) * scale + loc

    def uniform(low: Any = 0., high: Any = 1., size: Any = None) -> Array:
        return draw('random_sample', _shape(size, low, high)) * (high - low) + low

    def gumbel(loc: Any = 0., scale: Any = 1., size: Any = None) -> Array:
        u = draw('random_sample', _shape(size, loc, scale))
        return np.negative(np.log(np.negative(np.log(u)))) * scale + loc

    return {
        'gumbel': gumbel, 'normal': normal, 'uniform': uniform,
        'rand': lambda *size: draw('random_sample', size),
        'randn': lambda *size: draw('standard_normal', size),
        'random': lambda size=None: draw('random_sample', _shape(size)),
        'random_sample': lambda size=None: draw('random_sample', _shape(size)),
        'standard_normal': lambda size=None: draw('standard_normal', _shape(size)),
    }


def _shape(size: Any, *parameters: Any) -> Any:
    return np.broadcast_shapes(*map(np.shape, parameters)) if size is None else size
