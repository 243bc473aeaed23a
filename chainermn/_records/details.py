"""Differences between parameters and functions in a detailed update of two records."""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

#: Descriptions of a parameter or gradient: its path, and the function that uses it.
_TEXTS = {'before': 'the parameter {}{} before the update', 'own': "the rank's gradient of {}{}",
          'mean': 'the mean gradient of {}{}', 'after': 'the parameter {}{} after the update'}


def places(a: Mapping[str, Any], b: Mapping[str, Any], names: Sequence[str] = 'AB',
            is_same_batch: bool = True, limit: float | str = '') -> Iterator[str]:
    """Yield descriptions of the parameters and functions that differ in a detailed update.

    They are in the order of the computation, so the first one is closest to the cause.

    Args:
        a: The details of the update in one run or on one rank.
        b: The details of the update in the other run or on the other rank.
        names: The names of the two runs or ranks.
        is_same_batch: Whether both have the same batch and random numbers.
        limit: If not empty, the relative difference up to which norms count as the same.
    """
    if not a or not b:
        return
    yield from parameters(a, b, ['before'], limit)
    functions = ([each for each in details.get('functions', []) if not limit or each[0] != 'Cast']
                 for details in (a, b))
    for one, two in zip(*functions, strict=False) if is_same_batch else ():
        if one[0] != two[0]:
            yield (f'{names[0]} calls {one[0]} at {one[1]}, where {names[1]} calls {two[0]} at '
                   f'{two[1]}')
            break
        if any(_differs(*each, limit) for each in zip(one[3:], two[3:], strict=False)):
            where = f' in {one[2]}' if one[2] else ''
            yield f'the output of {one[0]}{where}, called at {one[1]}{_norms(one[3], two[3])}'
            break
    yield from parameters(a, b, ['own', 'mean'] if is_same_batch else ['mean'], limit)
    yield from hyperparameters(a.get('hyperparameters', {}), b.get('hyperparameters', {}))
    yield from parameters(a, b, ['after'], limit)


def hyperparameters(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[str]:
    """Yield descriptions of the hyperparameters that differ in an update."""
    for name, value in a.items():
        if value != (other := b.get(name, value)):
            yield f'the hyperparameter {name}: {value} | {other}'


def parameters(a: Mapping[str, Any], b: Mapping[str, Any], keys: Iterable[str],
               limit: float | str = '') -> Iterator[str]:
    """Yield, for each key, a description of the first parameter or gradient that differs."""
    for key in keys:
        one, two = a.get(key, {}), b.get(key, {})
        for path in one:
            if path in two and _differs(one[path], two[path], limit):
                yield _TEXTS[key].format(path, _use(a, path)) + _norms(one[path], two[path])
                break


def _use(details: Mapping[str, Any], path: str) -> str:
    """Return a note on the function that uses a parameter, or ''."""
    link = path.rpartition('/')[0] or '/'
    return next((f' (of {label}, called at {place})' for label, place, of, *_ in details.get(
        'functions', []) if of == link), '')


def _differs(a: list[Any] | None, b: list[Any] | None, limit: float | str) -> bool:
    """Return whether two digests differ."""
    if a == b or not limit or not a or not b:
        return a != b
    return bool(relative_all(a[1:2], b[1:2]).max(initial=0) > limit)


def _norms(a: list[Any] | None, b: list[Any] | None) -> str:
    """Return a note on how much two arrays differ, or '' if their norms are unknown."""
    if not a or not b or len(a) < 2 or len(b) < 2:
        return ''
    value = relative(a[1], b[1])
    return f', relative difference of the norms {value:.1e}' if value else ', within rounding'


def relative(a: Any, b: Any) -> float | None:
    """Return the relative difference of two numbers; ``None`` if one is unknown."""
    return None if '-' in (a, b) else float(relative_all([a], [b])[0])


def relative_all(a: Sequence[Any], b: Sequence[Any]) -> np.ndarray:
    """Return the relative differences of numbers; 0 where one is unknown."""
    if '-' in a or '-' in b:
        known = [('0', '0') if '-' in pair else pair for pair in zip(a, b, strict=True)]
        a, b = zip(*known, strict=True)
    x, y = np.array(a, 'd'), np.array(b, 'd')
    with np.errstate(all='ignore'):
        found = np.abs(x - y) / np.maximum(np.abs(x), np.abs(y))
    found[(x == y) | (np.isnan(x) & np.isnan(y))] = 0
    found[np.isnan(found)] = np.inf
    return found
