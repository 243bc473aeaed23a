"""The state of the random number generators that Chainer draws from, as arrays.

Shuffling iterators and dropout draw from ``numpy.random``.  A run that is resumed goes on with the
same numbers only if this state is in the snapshot.
"""
from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np

_PREFIX = 'chainermn/random/'


def capture() -> dict[str, Any]:
    """Returns the states of ``numpy.random`` and ``random``, by name."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, numbers, gauss_next = random.getstate()
    return {
        f'{_PREFIX}numpy/{kind}': np.asarray(keys),
        f'{_PREFIX}numpy/position': np.asarray([position, has_gauss]),
        f'{_PREFIX}numpy/gauss': np.asarray(gauss),
        f'{_PREFIX}python/{version}': np.asarray(numbers, dtype=np.uint32),
        f'{_PREFIX}python/gauss': np.asarray([] if gauss_next is None else [gauss_next]),
    }


def restore(arrays: Mapping[str, Any]) -> None:
    """Sets the states that :func:`capture` returned; does nothing if they are not there."""
    if f'{_PREFIX}numpy/MT19937' in arrays:
        position, has_gauss = arrays[f'{_PREFIX}numpy/position'].tolist()
        np.random.set_state(('MT19937', arrays[f'{_PREFIX}numpy/MT19937'], position, has_gauss,
                             float(arrays[f'{_PREFIX}numpy/gauss'])))
    if f'{_PREFIX}python/3' in arrays:
        gauss = arrays[f'{_PREFIX}python/gauss'].tolist()
        random.setstate((3, tuple(arrays[f'{_PREFIX}python/3'].tolist()),
                         gauss[0] if gauss else None))
