"""The expected results of the collectives, from the calls of all ranks, in one process."""
from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from fuzz_errors import EQUAL, ERRORS, Call, with_gradients


class Fails(NamedTuple):
    """All ranks raise an error of one of these types."""

    types: tuple[type[BaseException], ...]


class Gives(NamedTuple):
    """Each rank gets its own value."""

    values: list[Any]
    same: bool = False  # whether bitwise equal on all ranks
    close: float | None = None  # tolerance if not equal; at least a few units in the last place


def expected(calls: Sequence[Call]) -> Fails | Gives:
    """The outcome of one call on each rank."""
    size = len(calls)
    for rank, call in enumerate(calls):
        errors = ERRORS[call.operation](call, rank, size)
        if errors:
            return Fails(tuple(errors))
    if size > 1 and len({
            (call.operation, repr(EQUAL[call.operation](call))) for call in calls}) > 1:
        return Fails((ValueError,))
    try:
        with np.errstate(all='ignore'):
            return _VALUES[calls[0].operation](calls)
    except Exception as error:  # such as 1 + 'text' in allreduce_obj
        # NumPy derives private classes from TypeError, which is what ranks raise then.
        return Fails((next(cls for cls in type(error).__mro__ if cls.__module__ == 'builtins'),))


# --- results ---------------------------------------------------------------------------------

def combine(xs: Sequence[np.ndarray], op: str) -> np.ndarray:
    """Combine arrays of one dtype element by element."""
    dtype = xs[0].dtype
    if dtype == np.float16:
        return np.asarray(combine([x.astype('f') for x in xs], op)).astype(dtype)
    if dtype.kind == 'b':
        combined = np.logical_or if op in ('sum', 'max') else np.logical_and
    else:
        combined = {'sum': np.add, 'prod': np.multiply, 'max': np.maximum, 'min': np.minimum}[op]
    return np.asarray(functools.reduce(combined, xs), dtype)


def _mean_of(xs: Sequence[np.ndarray]) -> np.ndarray:
    wide = np.promote_types(xs[0].dtype, np.float32)
    return np.asarray(combine([x.astype(wide) for x in xs], 'sum') / len(xs), xs[0].dtype)


def _every(calls: Sequence[Call], value: Any, **options: Any) -> Gives:
    return Gives([value] * len(calls), **options)


def _at_root(calls: Sequence[Call], value: Any) -> Gives:
    return Gives([value if rank == calls[0]['root'] else None for rank in range(len(calls))])


def _xs(calls: Sequence[Call]) -> list[np.ndarray]:
    return [call['x'].value() for call in calls]


def _objs(calls: Sequence[Call]) -> list[Any]:
    return [call['obj'].make() for call in calls]


def _columns(calls: Sequence[Call]) -> list[tuple[np.ndarray, ...]]:
    return list(zip(*(call['xs'].values() for call in calls), strict=True))


def _reduced_objs(calls: Sequence[Call]) -> Any:
    op = {'sum': operator.add, 'prod': operator.mul, 'max': max, 'min': min}[calls[0]['op']]
    return functools.reduce(op, _objs(calls))


def _means(calls: Sequence[Call]) -> list[Any]:
    """The gradients of each rank's model, by parameter."""
    means = {}
    for i, _ in with_gradients(calls[0]):
        ones = [call['model'].parameters[i] for call in calls]
        means[i] = _mean_of([one.grad() if one.has_grad else np.zeros(one.shape, one.dtype)
                             for one in ones])
    return [[means.get(i) for i in range(len(call['model'].parameters))] for call in calls]


def _data(calls: Sequence[Call]) -> list[Any]:
    first = calls[0]['model'].parameters
    return [[first[i].value() if one.is_initialized else None
             for i, one in enumerate(call['model'].parameters)] for call in calls]


_CLOSE = {None: 0, 'fp16': 4e-3, 'bf16': 3e-2}

_VALUES: dict[str, Callable[[Sequence[Call]], Gives]] = {
    'bcast': lambda cs: _every(cs, cs[cs[0]['root']]['x'].value(), same=True),
    'gather': lambda cs: _at_root(cs, tuple(_xs(cs))),
    'allgather': lambda cs: _every(cs, tuple(_xs(cs)), same=True),
    'allreduce': lambda cs: _every(cs, combine(_xs(cs), cs[0]['op']), same=True),
    'reduce': lambda cs: _at_root(cs, combine(_xs(cs), cs[0]['op'])),
    'allreduce_many': lambda cs: _every(
        cs, tuple(combine(xs, cs[0]['op']) for xs in _columns(cs)), same=True),
    'reduce_scatter': lambda cs: Gives([combine(xs, cs[0]['op']) for xs in _columns(cs)]),
    'alltoall': lambda cs: Gives(_columns(cs)),
    'scatter': lambda cs: Gives(cs[cs[0]['root']]['xs'].values()),
    'multi_node_mean': lambda cs: _every(cs, _mean_of(_xs(cs)), same=True, close=0),
    'bcast_obj': lambda cs: _every(cs, cs[cs[0]['root']]['obj'].make()),
    'gather_obj': lambda cs: _at_root(cs, _objs(cs)),
    'allgather_obj': lambda cs: _every(cs, _objs(cs)),
    'allreduce_obj': lambda cs: _every(cs, _reduced_objs(cs)),
    'scatter_obj': lambda cs: Gives([obj.make() for obj in cs[cs[0]['root']]['objs']]),
    'bcast_data': lambda cs: Gives(_data(cs)),
    'multi_node_mean_grad': lambda cs: Gives(
        _means(cs), close=_CLOSE[cs[0]['compression']]),
    'barrier': lambda cs: _every(cs, None),
    'split': lambda cs: Gives([_group(cs, rank) for rank in range(len(cs))]),
    'new_group': lambda cs: Gives([
        list(map(int, cs[0]['ranks'])) if rank in cs[0]['ranks'] else None
        for rank in range(len(cs))]),
}


def _group(calls: Sequence[Call], rank: int) -> list[int]:
    """The ranks of the group of a rank, in the order of the group."""
    mine = [one for one in range(len(calls)) if calls[one]['color'] == calls[rank]['color']]
    return sorted(mine, key=lambda one: (calls[one]['key'], one))
