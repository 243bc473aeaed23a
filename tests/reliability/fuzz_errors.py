"""Expected errors of calls, and the arguments that must be equal on all ranks."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from fuzz_values import Array, Arrays, Model


class Call(NamedTuple):
    """The call of one rank: an operation of the communicator, with arguments by name."""

    operation: str
    arguments: dict[str, Any]

    def __getitem__(self, name: Any) -> Any:
        return self.arguments[name]


# --- expected errors -------------------------------------------------------------------------

Errors = set[type[BaseException]]


def _root(root: Any, size: int) -> Errors:
    if isinstance(root, bool) or not hasattr(root, '__index__'):
        return {TypeError}
    return set() if 0 <= root < size else {ValueError}


def _array(x: Array) -> Errors:
    return {TypeError} if x.is_bad else set()


def _object(x: Any) -> Errors:
    return {TypeError} if x.is_bad else set()


def _op(op: Any, *dtypes: str) -> Errors:
    if op not in ('sum', 'prod', 'max', 'min'):
        return {ValueError}
    is_complex = any(dtype.startswith('complex') for dtype in dtypes)
    return {TypeError} if is_complex and op in ('max', 'min') else set()


def _dtypes(xs: Arrays) -> list[str]:
    return [x.dtype for x in xs.items if not x.is_bad]


def _sequence(xs: Arrays, size: int) -> Errors:
    """One array for each rank, of one dtype."""
    errors = set().union(*map(_array, xs.items)) if xs.items else set()
    if xs.kind == 'rows':
        if not errors and not xs.items[0].shape:
            errors = {TypeError}
        if not errors and xs.items[0].shape[0] != size:
            errors = {ValueError}
        return errors
    if len(set(_dtypes(xs))) > 1:
        errors = errors | {TypeError}
    return errors | ({ValueError} if len(xs.items) != size else set())


def _out(x: Array, out: Any) -> Errors:
    if out == 'no array':
        return {TypeError}
    if x.kind == 'read-only' and out == 'self':
        return {ValueError}
    if x.kind in ('scalar', 'foreign') and out == 'self':
        return set()  # copied to a new array by the caller
    return {ValueError} if out in ('other shape', 'other dtype', 'read-only') else set()


def _mean(x: Array) -> Errors:
    return _array(x) or (set() if x.dtype.startswith('float') else {TypeError})


def _model(model: Model) -> Errors:
    return {TypeError} if model.parameters is None else set()


def _compression(compression: Any) -> Errors:
    if compression is None or compression in ('fp16', 'bf16'):
        return set()
    return {TypeError, ValueError}


def _gradients(call: Call) -> Errors:
    errors = _compression(call['compression']) | _model(call['model'])
    for _, one in with_gradients(call) if not errors else ():
        if not one.dtype.startswith('float'):
            errors = errors | {TypeError}
    return errors


def _color(call: Call) -> Errors:
    color, key = call['color'], call['key']
    if isinstance(color, (str, float, type(None))) or isinstance(key, (str, float)):
        return {TypeError}
    return {ValueError} if color < 0 else set()


def _members(ranks: Any, size: int) -> Errors:
    if isinstance(ranks, (int, str)) or ranks is None:
        return {TypeError}
    wrong = [rank for rank in ranks if isinstance(rank, (bool, str, float))]
    if wrong:
        return {TypeError}
    is_set = len(ranks) and len(set(ranks)) == len(ranks)
    return set() if is_set and all(0 <= rank < size for rank in ranks) else {ValueError}


ERRORS: dict[str, Callable[[Call, int, int], Errors]] = {
    'refuse': lambda c, rank, size: {
        next(kind for kind in c['error'].__mro__ if kind.__module__ == 'builtins')},
    'bcast': lambda c, rank, size: _root(c['root'], size) or (
        _array(c['x']) if rank == c['root'] else set()),
    'gather': lambda c, rank, size: _root(c['root'], size) | _array(c['x']),
    'allgather': lambda c, rank, size: _array(c['x']),
    'allreduce': lambda c, rank, size: _array(c['x']) or (
        _op(c['op'], c['x'].dtype) | _out(c['x'], c['out'])),
    'reduce': lambda c, rank, size: _root(c['root'], size) | (
        _array(c['x']) | _op(c['op'], c['x'].dtype)),
    'allreduce_many': lambda c, rank, size: set().union(
        {TypeError} if c['xs'].kind == 'rows' else set(), *map(_array, c['xs'].items),
        _op(c['op'], *_dtypes(c['xs']))),
    'reduce_scatter': lambda c, rank, size: _sequence(c['xs'], size) | (
        _op(c['op'], *_dtypes(c['xs']))),
    'alltoall': lambda c, rank, size: _sequence(c['xs'], size),
    'scatter': lambda c, rank, size: _root(c['root'], size) or (
        _sequence(c['xs'], size) if rank == c['root'] else set()),
    'multi_node_mean': lambda c, rank, size: _mean(c['x']),
    'bcast_obj': lambda c, rank, size: _root(c['root'], size) or (
        _object(c['obj']) if rank == c['root'] else set()),
    'gather_obj': lambda c, rank, size: _root(c['root'], size) | _object(c['obj']),
    'allgather_obj': lambda c, rank, size: _object(c['obj']),
    'allreduce_obj': lambda c, rank, size: _object(c['obj']) | _op(c['op']),
    'scatter_obj': lambda c, rank, size: _root(c['root'], size) or (
        _objects(c['objs'], size) if rank == c['root'] else set()),
    'bcast_data': lambda c, rank, size: _model(c['model']),
    'multi_node_mean_grad': lambda c, rank, size: _gradients(c),
    'barrier': lambda c, rank, size: set(),
    'split': lambda c, rank, size: _color(c),
    'new_group': lambda c, rank, size: _members(c['ranks'], size),
}


def _objects(objs: Any, size: int) -> Errors:
    if objs is None:
        return {ValueError}
    errors = set().union(*map(_object, objs)) if objs else set()
    return errors | ({ValueError} if len(objs) != size else set())


# --- arguments that must be equal on all ranks -----------------------------------------------

def _described(items: Any) -> list[Any]:
    return [(x.dtype, x.shape) for x in items]


def _list(xs: Arrays) -> list[Any]:
    return [(str(x.dtype), x.shape) for x in xs.values()]


def _initialized(model: Model) -> list[Any]:
    return [(i, one) for i, one in enumerate(model.parameters) if one.is_initialized]


def with_gradients(call: Call) -> list[Any]:
    """The parameters with gradients to average, by index."""
    return [(i, one) for i, one in _initialized(call['model'])
            if one.has_grad or call['zero_fill']]


EQUAL: dict[str, Callable[[Call], Any]] = {
    'bcast': lambda c: int(c['root']),
    'gather': lambda c: (int(c['root']), c['x'].dtype),
    'allgather': lambda c: c['x'].dtype,
    'allreduce': lambda c: (c['x'].dtype, c['x'].shape, c['op']),
    'reduce': lambda c: (c['x'].dtype, c['x'].shape, c['op'], int(c['root'])),
    'allreduce_many': lambda c: (_list(c['xs']), c['op']),
    'reduce_scatter': lambda c: (_list(c['xs']), c['op']),
    'alltoall': lambda c: c['xs'].items[0].dtype,
    'scatter': lambda c: int(c['root']),
    'multi_node_mean': lambda c: (c['x'].dtype, c['x'].shape),
    'bcast_obj': lambda c: int(c['root']),
    'gather_obj': lambda c: int(c['root']),
    'allgather_obj': lambda c: None,
    'allreduce_obj': lambda c: c['op'],
    'scatter_obj': lambda c: int(c['root']),
    'bcast_data': lambda c: [(i, *_described([one])) for i, one in _initialized(c['model'])],
    'multi_node_mean_grad': lambda c: (
        [(i, *_described([one])) for i, one in with_gradients(c)], c['compression']),
    'barrier': lambda c: None,
    'split': lambda c: None,
    'new_group': lambda c: list(map(int, c['ranks'])),
}
