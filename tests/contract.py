"""The contract of the collectives: their arguments, results and errors.

A call is a plain value, which can be printed and drawn at random. A step consists of one call per
rank. ``check`` plays a step and compares the outcome with the results that NumPy computes from all
calls.
"""

from __future__ import annotations

import fractions
import functools
import hashlib
import math
import operator
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import chainer
import numpy as np
from mpi4py import MPI

OPS = ('sum', 'prod', 'max', 'min')
DTYPES = ['bool', 'int8', 'int16', 'int32', 'int64', 'uint8', 'uint16', 'uint32', 'uint64',
          'float16', 'float32', 'float64', 'complex64', 'complex128']
#: From this seed on, values are large or not finite.
WIDE = 100


# --- values ---------------------------------------------------------------------------------------

def numbers(shape: tuple[int, ...], dtype: str, seed: int) -> np.ndarray:
    """Return small numbers whose sums and products over a few ranks are exact in the dtype."""
    n = np.arange(np.prod(shape, dtype=int))
    n = (n * 5 + n // 7 + seed * 3) % 4
    kind = np.dtype(dtype).kind
    if seed >= WIDE and kind in 'iu':
        info = np.iinfo(dtype)
        n = np.random.default_rng(seed).integers(info.min, info.max, n.shape, dtype, endpoint=True)
    elif kind == 'b':
        n = n > 1
    elif kind == 'i':
        n = n - 1
    elif kind == 'f':
        n = n - .5
        if seed >= WIDE:
            n[:1] = (np.nan, np.inf, -np.inf)[seed % 3]
            n[1:2] = 2. ** 15  # sums of float16 overflow
    elif kind == 'c':
        n = n + 1j * ((n + seed) % 3)
    return n.astype(dtype).reshape(shape)


class Odd(np.ndarray):
    """An array whose methods all raise an error. ChainerMN must not call overridden methods."""

    def _raise(self, *args: Any, **kwargs: Any) -> Any:
        raise OSError('a method of a subclass was called')

    __getitem__ = __iter__ = __array_ufunc__ = __array_function__ = tobytes = copy = _raise
    astype = reshape = ravel = flatten = view = _raise


class Grows(np.ndarray):
    """An array whose ``x[i]`` is not a row of the data."""

    def __getitem__(self, i: Any) -> Any:
        return np.append(np.asarray(self)[i], 1)


def strided(x: Any) -> Any:
    """Return the same values with gaps between them in memory."""
    return x.repeat(2, 0).repeat(2, x.ndim - 1)[::2, ..., ::2] if x.ndim > 1 else (
        x.repeat(2)[::2] if x.ndim else x)


def _reversed(x: Any) -> Any:
    back = (..., *(slice(None, None, -1),) * x.ndim)
    return x[back].copy()[back]


def _read_only(x: Any) -> Any:
    x.flags.writeable = False
    return x


def _unaligned(x: Any) -> Any:
    view = np.zeros(x.nbytes + 1, np.uint8)[1:].view(x.dtype).reshape(x.shape)
    view[...] = x
    return view


#: Functions that give a C-ordered array a different layout; the first ones also support GPU arrays.
LAYOUTS: dict[str, Callable[[Any], Any]] = {
    'plain': lambda x: x,
    'fortran': lambda x: x.T.copy().T,
    'strided': strided,
    'negative strides': _reversed,
    'broadcast': lambda x: np.broadcast_to(x[0], x.shape) if x.ndim and len(x) else x,
    'read-only': _read_only,
    'foreign': lambda x: x.astype(x.dtype.newbyteorder('S')),
    'scalar': lambda x: x if x.ndim else x[()],
    'unaligned': _unaligned,
    'matrix': lambda x: x.view(np.matrix) if x.ndim == 2 else x,
    'odd': lambda x: x.view(Odd),
    'grows': lambda x: x.view(Grows) if x.ndim else x,
}
ON_GPU = ('plain', 'fortran', 'strided', 'negative strides')

#: Values that are not supported arrays.
NO_ARRAYS: dict[str, Callable[[], Any]] = {
    'None': lambda: None,
    'number': lambda: 1.5,
    'text': lambda: 'text',
    'a list': lambda: [1., 2.],
    'pair': lambda: (np.zeros(2), np.zeros(2)),
    'dict': dict,
    'Variable': lambda: chainer.Variable(np.zeros(3, 'f')),
    'masked': lambda: np.ma.masked_array([1., 2.], [True, False]),
    **{name: lambda dtype=dtype: np.zeros(3, dtype) for name, dtype in {  # type: ignore[misc]
        'objects': object, 'strings': 'U1', 'bytes': 'S1', 'dates': 'datetime64[s]',
        'longdouble': np.longdouble, 'clongdouble': np.clongdouble,
        'foreign longdouble': np.dtype(np.longdouble).newbyteorder(),
        'structured': [('a', 'f4'), ('b', 'i4')]}.items()},
}


class Array(NamedTuple):
    """An array, or an invalid value in its place."""

    layout: str = 'plain'
    dtype: str = 'float32'
    shape: tuple[int, ...] = (2, 3)
    seed: int = 0

    @property
    def is_bad(self) -> bool:
        return self.layout in NO_ARRAYS

    def grown(self, rows: int) -> Array:
        """Return the same kind of array with more rows."""
        return self._replace(shape=(self.shape[0] + rows, *self.shape[1:])) if self.shape else self

    def value(self) -> np.ndarray:
        """The elements, in C order and native byte order."""
        x = numbers(self.shape, self.dtype, self.seed)
        if self.layout == 'broadcast' and x.ndim:
            x[...] = x[:1]
        return x

    def make(self, xp: Any = np) -> Any:
        """Create it, with NumPy or CuPy."""
        return NO_ARRAYS[self.layout]() if self.is_bad else LAYOUTS[self.layout](
            xp.asarray(self.value()))


class Arrays(NamedTuple):
    """A tuple or list of arrays or objects, the rows of one array, or an invalid value."""

    kind: str  # 'tuple', 'list', 'rows', 'number' or 'None'
    items: tuple[Any, ...] = ()

    def make(self, xp: Any = np) -> Any:
        if self.kind in NO_ARRAYS:
            return NO_ARRAYS[self.kind]()
        items = [item.make(xp) for item in self.items]
        return items[0] if self.kind == 'rows' else tuple(items) if self.kind == 'tuple' else items

    def values(self) -> list[np.ndarray]:
        if self.kind == 'rows':
            return [np.asarray(row) for row in self.items[0].value()]
        return [item.value() for item in self.items]


class Unpicklable:
    def __reduce__(self) -> Any:
        raise OSError('this object stays here')


#: Objects by name. mpi4py sends the buffers of arrays beyond 256 KiB beside the pickle.
OBJECTS: dict[str, Callable[[int], Any]] = {
    'int': lambda seed: seed,
    'text': lambda seed: f'text {seed}',
    'float': lambda seed: math.nan if seed % 3 == 2 else seed / 2,
    'None': lambda seed: None,
    'list': lambda seed: [seed, 'x'] * (seed % 4),
    'numbers': lambda seed: (seed, 2**100, 1.5, 1j, fractions.Fraction(1, 3)),
    'nested': lambda seed: {'a': [1, (2, {3})], seed: {'b': [None, b'bytes', range(3)]}},
    'function': lambda seed: np.add,
    'about as many bytes as are gathered at once': lambda seed: bytes(8160 + 16 * seed),
    'long text': lambda seed: 'ä' * 10000 * seed,
    'bytes': lambda seed: bytes([seed]) * 300000,
    'array': lambda seed: np.arange(seed, dtype='f'),
    'arrays': lambda seed: [np.arange(6.).reshape(2, 3).T, np.float16(seed), np.empty((0, 2))],
    'large arrays': lambda seed: [np.full((3, 20000), seed), 'text', np.full(40000, seed, 'c8')],
    'unpicklable': lambda seed: [Unpicklable()],
    'local function': lambda seed: lambda: seed,
}
UNPICKLABLE = ('unpicklable', 'local function')


class Object(NamedTuple):
    """Any object."""

    kind: str = 'text'
    seed: int = 0

    @property
    def is_bad(self) -> bool:
        return self.kind in UNPICKLABLE

    def make(self, xp: Any = np) -> Any:
        return OBJECTS[self.kind](self.seed)


class Parameter(NamedTuple):
    """A parameter of a model."""

    dtype: str = 'float32'
    shape: tuple[int, ...] = (3,)
    state: str = 'grad'  # or 'no grad', 'read-only grad', 'uninitialized'
    layout: str = 'plain'
    seed: int = 0

    @property
    def is_initialized(self) -> bool:
        return self.state != 'uninitialized'

    @property
    def has_grad(self) -> bool:
        return self.state in ('grad', 'read-only grad')

    def array(self) -> Array:
        return Array(self.layout, self.dtype, self.shape, self.seed + 1)

    def grad(self) -> Array:
        return self.array()._replace(seed=self.seed + 2)


class Model(NamedTuple):
    """A model, or an invalid value in its place."""

    parameters: tuple[Parameter, ...] | None = (Parameter(shape=(2,)), Parameter())
    names: str = 'abcdefgh'

    def make(self, xp: Any = np) -> Any:
        if self.parameters is None:
            return 'no model'
        link = chainer.Link()
        with link.init_scope():
            for name, one in zip(self.names, self.parameters, strict=False):
                parameter = chainer.Parameter(
                    one.array().make(xp) if one.is_initialized else None)
                if one.has_grad:
                    parameter.grad = one.grad().make(xp)
                    if one.state == 'read-only grad':
                        parameter.grad.flags.writeable = False
                setattr(link, name, parameter)
        return link

    def with_values(self) -> dict[str, Parameter]:
        """The initialized parameters by path."""
        return {f'/{name}': one for name, one in zip(self.names, self.parameters or (),
                                                     strict=False) if one.is_initialized}


def for_rank(value: Any, rank: int) -> Any:
    """Return the same kind of value with different elements for each rank."""
    if isinstance(value, (Array, Object, Parameter)):
        return value._replace(seed=value.seed + rank)
    if isinstance(value, (Arrays, Model)):
        return type(value)(*(for_rank(field, rank) for field in value))
    return tuple(for_rank(item, rank) for item in value) if isinstance(value, tuple) else value


# --- arguments ------------------------------------------------------------------------------------

Errors = set[type[BaseException]]


class Kind(NamedTuple):
    """A kind of argument.

    Attributes:
        usual: Returns valid, different values for a number of ranks; the first is the example.
        wrong: Returns invalid values for a number of ranks.
        errors: Returns the possible errors for a value.
    """

    usual: Callable[[int], list[Any]]
    wrong: Callable[[int], list[Any]]
    errors: Callable[[Any, int], Errors]


def root_errors(root: Any, size: int) -> Errors:
    if isinstance(root, bool) or not hasattr(root, '__index__'):
        return {TypeError}
    return set() if 0 <= root < size else {ValueError}


def _errors_of_items(xs: Arrays, size: int = 0) -> Errors:
    return {TypeError} if xs.kind == 'number' or any(x.is_bad for x in xs.items) else {
        TypeError, ValueError} if xs.kind == 'None' else set()


def _errors_of_sequence(xs: Arrays, size: int) -> Errors:
    """Return the errors of a value that must contain one array per rank, all of one dtype."""
    errors = _errors_of_items(xs)
    if errors and xs.kind not in ('tuple', 'list'):
        return errors
    if xs.kind == 'rows':
        shape = xs.items[0].shape
        return {TypeError} if not shape else {ValueError} if shape[0] != size else set()
    if len({x.dtype for x in xs.items if not x.is_bad}) > 1:
        errors = errors | {TypeError}
    return errors | ({ValueError} if len(xs.items) != size else set())


def _errors_of_objects(objs: Arrays, size: int) -> Errors:
    return _errors_of_items(objs) | ({ValueError} if len(objs.items) != size else set())


def _errors_of_integer(x: Any, least: int, most: int) -> Errors:
    if isinstance(x, (str, float, type(None))):
        return {TypeError}
    return set() if least <= x <= most else {ValueError}


def _errors_of_ranks(ranks: Any, size: int) -> Errors:
    if isinstance(ranks, (int, str)) or ranks is None or any(
            isinstance(rank, (bool, str, float)) for rank in ranks):
        return {TypeError}
    is_set = len(ranks) and len(set(ranks)) == len(ranks)
    return set() if is_set and all(0 <= rank < size for rank in ranks) else {ValueError}


X = Array()
_BAD = [Array(name) for name in NO_ARRAYS]


def _with_last(size: int, last: Array) -> Arrays:
    return Arrays('tuple', (X,) * (size - 1) + (last,))


KINDS: dict[str, Kind] = {
    'root': Kind(lambda size: [*range(size)],
                 lambda size: [-1, size, None, True, '0', 0., 2**70], root_errors),
    'op': Kind(lambda size: [*OPS],
               lambda size: ['mean', None, 3, ['sum']],
               lambda op, size: set() if op in OPS else {ValueError}),
    'array': Kind(lambda size: [X, Array(dtype='float16'), Array(shape=(3, 2)), Array('fortran')],
                  lambda size: _BAD, lambda x, size: {TypeError} if x.is_bad else set()),
    'floats': Kind(lambda size: [X, Array(dtype='float64'), Array(shape=(3, 2))],
                   lambda size: [*_BAD, Array(dtype='int32'), Array(dtype='complex64')],
                   lambda x, size: {TypeError} if x.is_bad or x.dtype[0] != 'f' else set()),
    'arrays': Kind(
        lambda size: [Arrays(kind, tuple(x._replace(seed=n) for n in range(size))) for kind, x in (
            ('tuple', X), ('list', Array(dtype='int64')), ('tuple', Array(shape=(3, 2))))]
        + [Arrays('rows', (Array(shape=(size, 2, 3)),))],
        lambda size: [_with_last(size, bad) for bad in _BAD if bad.layout != 'pair' or size > 1]
        + [Arrays('tuple', (X,) * (size - 1)), Arrays('list', (X,) * (size + 1)),
           Arrays('rows', (Array(shape=(size + 1, 3)),)), Arrays('rows', (Array(shape=()),)),
           Arrays('number'), Arrays('None')]
        + [_with_last(size, Array(dtype='int64'))] * (size > 1), _errors_of_sequence),
    'many': Kind(
        lambda size: [Arrays('tuple', (X, X)), Arrays('list', (X,)), Arrays('tuple'),
                      Arrays('tuple', (Array(dtype='int64'), X)),
                      Arrays('tuple', (X, Array(shape=(3, 2))))],
        lambda size: [_with_last(2, bad) for bad in _BAD] + [Arrays('rows', (X,))],
        lambda xs, size: {TypeError} if xs.kind == 'rows' else _errors_of_items(xs)),
    'out': Kind(lambda size: [None, 'new', 'fortran', 'strided', 'self', 'overlap'],
                lambda size: ['no array', 'other shape', 'other dtype', 'read-only', 'masked'],
                lambda out, size: {TypeError} if out in ('no array', 'masked') else set()),
    'object': Kind(lambda size: [Object(kind) for kind in OBJECTS if kind not in UNPICKLABLE],
                   lambda size: [Object(kind) for kind in UNPICKLABLE],
                   lambda obj, size: {TypeError} if obj.is_bad else set()),
    'objects': Kind(
        lambda size: [Arrays('list', tuple(Object(kind, n) for n in range(size)))
                      for kind in ('int', 'nested', 'arrays', 'large arrays')],
        lambda size: [Arrays('None'), *(Arrays('list', items) for items in (
            (), (Object(),) * (size + 1), (Object(),) * (size - 1) + (Object('unpicklable'),)))],
        _errors_of_objects),
    'model': Kind(
        lambda size: [Model(), Model((Parameter(shape=(2,)), Parameter(shape=(1, 3)))),
                      Model((Parameter(shape=(2,)), Parameter('float16'))), Model(names='az'),
                      Model((Parameter(shape=(2,)), Parameter(state='no grad'))), Model(())],
        lambda size: [Model(None)],
        lambda model, size: {TypeError} if model.parameters is None else set()),
    'flag': Kind(lambda size: [False, True], lambda size: [], lambda flag, size: set()),
    'compression': Kind(
        lambda size: [None, 'fp16', 'bf16'], lambda size: ['none', 3],
        lambda value, size: set() if value in (None, 'fp16', 'bf16') else {TypeError, ValueError}),
    'color': Kind(lambda size: [0, 1, 2, 2**31 - 1], lambda size: [-1, 2**31, None, 'a', 1.],
                  lambda color, size: _errors_of_integer(color, 0, 2**31 - 1)),
    'key': Kind(lambda size: [0, -2, 2, -1], lambda size: [2**31, -2**31 - 1, 'a'],
                lambda key, size: _errors_of_integer(key, -2**31, 2**31 - 1)),
    'ranks': Kind(lambda size: [(0,), tuple(range(size)), tuple(range(size))[::-1], (size - 1,)],
                  lambda size: [(), (0, 0), (size,), (-1,), (True,), ('0',), 1, None, (.5,), '0'],
                  _errors_of_ranks),
}


class Call(NamedTuple):
    """The call of one rank: an operation of the communicator, with arguments by name."""

    operation: str
    arguments: dict[str, Any]

    def __getitem__(self, name: Any) -> Any:
        return self.arguments[name]


# --- results of each rank -------------------------------------------------------------------------

def combine(xs: Sequence[np.ndarray], op: str) -> np.ndarray:
    """Combine arrays of one dtype element by element; float16 in float32, rounded once."""
    dtype = xs[0].dtype
    if dtype == np.float16:
        return np.asarray(combine([x.astype('f') for x in xs], op)).astype(dtype)
    ufunc = {'sum': np.add, 'prod': np.multiply, 'max': np.maximum, 'min': np.minimum}[op]
    return np.asarray(functools.reduce(ufunc, xs), dtype)


def _mean(xs: Sequence[np.ndarray]) -> np.ndarray:
    wide = np.promote_types(xs[0].dtype, np.float32)
    return np.asarray(combine([x.astype(wide) for x in xs], 'sum') / len(xs), xs[0].dtype)


def _reduced(objs: list[Any], op: str) -> Any:
    def of(function: Any, ufunc: Any) -> Any:
        return lambda x, y: (
            ufunc(x, y) if isinstance(x, np.ndarray)
            else float(ufunc(x, y)) if type(x) is type(y) is float  # NaN stays
            else function(x, y))

    return functools.reduce({'sum': operator.add, 'prod': operator.mul, 'max': of(max, np.maximum),
                             'min': of(min, np.minimum)}[op], objs)


def _xs(calls: Sequence[Call]) -> list[np.ndarray]:
    return [call['x'].value() for call in calls]


def _objs(calls: Sequence[Call]) -> list[Any]:
    return [call['obj'].make() for call in calls]


def _columns(calls: Sequence[Call]) -> list[tuple[np.ndarray, ...]]:
    return list(zip(*(call['xs'].values() for call in calls), strict=True))


def _every(calls: Sequence[Call], value: Any) -> list[Any]:
    return [value] * len(calls)


def _at_root(calls: Sequence[Call], value: Any) -> list[Any]:
    return [value if rank == calls[0]['root'] else None for rank in range(len(calls))]


def _of_root(calls: Sequence[Call], name: str) -> Any:
    return calls[calls[0]['root']][name]


def _group(calls: Sequence[Call], rank: int) -> list[int]:
    """Return the ranks in the group of a rank, in the order of the group."""
    mine = [one for one in range(len(calls)) if calls[one]['color'] == calls[rank]['color']]
    return sorted(mine, key=lambda one: (calls[one]['key'], one))


def _with_gradients(call: Call) -> dict[str, Parameter]:
    return {path: one for path, one in call['model'].with_values().items()
            if one.has_grad or call['zero_fill']}


def _means(calls: Sequence[Call]) -> dict[str, np.ndarray]:
    models = [call['model'].with_values() for call in calls]
    return {path: _mean([each[path].grad().value() if each[path].has_grad
                         else np.zeros(one.shape, one.dtype) for each in models])
            for path, one in _with_gradients(calls[0]).items()}


# --- values that must be the same on all ranks, as shown in errors --------------------------------

def _root(c: Call) -> tuple[str, ...]:
    return (f'root={int(c["root"])}',)


def _op(c: Call) -> tuple[str, ...]:
    return (f"op='{c['op']}'",)


def _described(x: Any) -> str:
    return f'{x.dtype} {x.shape}'


def _list(c: Call) -> tuple[str, ...]:
    return tuple(f'xs[{n}]: {_described(x)}' for n, x in enumerate(c['xs'].values()))


class Case(NamedTuple):
    """The contract of a collective.

    Attributes:
        name: Name of the operation.
        arguments: The kind of each argument.
        gives: Returns the result of each rank, from the calls of all ranks: a value; for models,
            arrays by path; for communicators, their ranks.
        equal: Returns the values that must be the same on all ranks.
        only_of_root: Arguments that are ignored on other ranks than the root.
        errors: Returns the errors for arguments that are invalid in combination.
        is_same: Whether the results of all ranks are bitwise identical.
        close: Relative tolerance, by compression; otherwise, results are exact.
    """

    name: str
    arguments: dict[str, str]
    gives: Callable[[Sequence[Call]], list[Any]]
    equal: Callable[[Call], tuple[str, ...]] = lambda c: ()
    only_of_root: tuple[str, ...] = ()
    errors: Callable[[Call], Errors] = lambda c: set()
    is_same: bool = False
    close: Mapping[str | None, float] = MappingProxyType({})


def _order_of_complex(op: str, *xs: Array) -> Errors:
    has_complex = any(x.dtype.startswith('complex') for x in xs)
    return {TypeError} if has_complex and op in ('max', 'min') else set()


def _errors_of_out(c: Call) -> Errors:
    out, x = c['out'], c['x']
    bad = out in ('other shape', 'other dtype', 'read-only') or (
        out == 'self' and x.layout in ('read-only', 'broadcast') and bool(x.shape))
    return ({ValueError} if bad else set()) | _order_of_complex(c['op'], x)


CASES: dict[str, Case] = {case.name: case for case in [
    Case('bcast', {'x': 'array', 'root': 'root'},
         lambda cs: _every(cs, _of_root(cs, 'x').value()), _root, ('x',), is_same=True),
    Case('gather', {'x': 'array', 'root': 'root'}, lambda cs: _at_root(cs, tuple(_xs(cs))),
         lambda c: (c['x'].dtype, *_root(c))),
    Case('allgather', {'x': 'array'}, lambda cs: _every(cs, tuple(_xs(cs))),
         lambda c: (c['x'].dtype,), is_same=True),
    Case('alltoall', {'xs': 'arrays'}, _columns, lambda c: (c['xs'].items[0].dtype,)),
    Case('scatter', {'xs': 'arrays', 'root': 'root'},
         lambda cs: _of_root(cs, 'xs').values(), _root, ('xs',)),
    Case('allreduce', {'x': 'array', 'op': 'op', 'out': 'out'},
         lambda cs: _every(cs, combine(_xs(cs), cs[0]['op'])),
         lambda c: (_described(c['x']), *_op(c)), errors=_errors_of_out, is_same=True),
    Case('reduce', {'x': 'array', 'op': 'op', 'root': 'root'},
         lambda cs: _at_root(cs, combine(_xs(cs), cs[0]['op'])),
         lambda c: (_described(c['x']), *_op(c), *_root(c)),
         errors=lambda c: _order_of_complex(c['op'], c['x'])),
    Case('allreduce_many', {'xs': 'many', 'op': 'op'},
         lambda cs: _every(cs, tuple(combine(xs, cs[0]['op']) for xs in _columns(cs))),
         lambda c: (*_list(c), *_op(c)), is_same=True,
         errors=lambda c: _order_of_complex(c['op'], *c['xs'].items)),
    Case('reduce_scatter', {'xs': 'arrays', 'op': 'op'},
         lambda cs: [combine(xs, cs[0]['op']) for xs in _columns(cs)],
         lambda c: (*_list(c), *_op(c)),
         errors=lambda c: _order_of_complex(c['op'], *c['xs'].items)),
    Case('multi_node_mean', {'x': 'floats'}, lambda cs: _every(cs, _mean(_xs(cs))),
         lambda c: (_described(c['x']),), is_same=True, close={None: 1e-15}),
    Case('bcast_obj', {'obj': 'object', 'root': 'root'},
         lambda cs: _every(cs, _of_root(cs, 'obj').make()), _root, ('obj',)),
    Case('gather_obj', {'obj': 'object', 'root': 'root'}, lambda cs: _at_root(cs, _objs(cs)),
         _root),
    Case('allgather_obj', {'obj': 'object'}, lambda cs: _every(cs, _objs(cs))),
    Case('allreduce_obj', {'obj': 'object', 'op': 'op'},
         lambda cs: _every(cs, _reduced(_objs(cs), cs[0]['op'])), _op),
    Case('scatter_obj', {'objs': 'objects', 'root': 'root'},
         lambda cs: _of_root(cs, 'objs').make(), _root, ('objs',)),
    Case('bcast_data', {'model': 'model'}, lambda cs: _every(cs, {
        path: one.array().value() for path, one in cs[0]['model'].with_values().items()}),
        lambda c: tuple(f'{path}: {_described(one)}'
                        for path, one in c['model'].with_values().items()), is_same=True),
    Case('multi_node_mean_grad',
         {'model': 'model', 'zero_fill': 'flag', 'compression': 'compression'},
         lambda cs: _every(cs, _means(cs)),
         lambda c: (*(f'{path}: {_described(one)}'
                      for path, one in _with_gradients(c).items()),
                    f'{c["compression"] or ""}'),
         errors=lambda c: {TypeError} if any(
             one.dtype[0] != 'f' for one in _with_gradients(c).values()) else set(),
         is_same=True, close={None: 1e-15, 'fp16': 4e-3, 'bf16': 3e-2}),
    Case('barrier', {}, lambda cs: _every(cs, None)),
    Case('split', {'color': 'color', 'key': 'key'},
         lambda cs: [_group(cs, rank) for rank in range(len(cs))]),
    Case('new_group', {'ranks': 'ranks'}, lambda cs: [
        [*cs[0]['ranks']] if rank in cs[0]['ranks'] else None for rank in range(len(cs))],
        lambda c: (f'{[*c["ranks"]]}',)),
]}
#: The collectives with arrays as arguments.
OF_ARRAYS = [name for name, case in CASES.items()
             if {'array', 'arrays', 'many', 'floats'} & {*case.arguments.values()}]
NAMES = [*CASES, 'finalize']


class Expected(NamedTuple):
    """The expected outcome of a step: a result for each rank, or an error on all ranks.

    Attributes:
        values: The results by rank.
        types: The possible types of the error.
        failed: The ranks whose own call is invalid. If there is an error without such ranks, calls
            differ or cannot be combined.
        is_mismatch: Whether the calls differ.
    """

    values: Sequence[Any] = ()
    types: tuple[type[BaseException], ...] = ()
    failed: tuple[int, ...] = ()
    is_mismatch: bool = False


def errors_of(call: Call, rank: int, size: int) -> Errors:
    """Return the errors that a rank may raise for its own call."""
    if call.operation == 'refuse':
        return {next(kind for kind in call['error'].__mro__ if kind.__module__ == 'builtins')}
    case = CASES[call.operation]
    errors = root_errors(call['root'], size) if 'root' in case.arguments else set()
    for name, kind in case.arguments.items():
        if name not in case.only_of_root or (not errors and rank == call['root']):
            errors = errors | KINDS[kind].errors(call[name], size)
    return errors or case.errors(call)


def expected(calls: Sequence[Call]) -> Expected:
    """Return the expected outcome of one call on each rank."""
    size = len(calls)
    errors = [errors_of(call, rank, size) for rank, call in enumerate(calls)]
    failed = tuple(rank for rank in range(size) if errors[rank])
    if failed:  # the lowest failed rank determines the type
        return Expected((), tuple(errors[failed[0]]), failed)
    if len({(call.operation, CASES[call.operation].equal(call)) for call in calls}) > 1:
        return Expected((), (ValueError,), is_mismatch=True)
    try:
        with np.errstate(all='ignore'):
            return Expected(CASES[calls[0].operation].gives(calls))
    except Exception as error:  # such as 1 + 'text' in allreduce_obj
        return Expected((), (next(kind for kind in type(error).__mro__
                                  if kind.__module__ == 'builtins'),))


# --- steps ----------------------------------------------------------------------------------------

def step(name: str, size: int, **changed: Any) -> tuple[Call, ...]:
    """Return example calls with some arguments changed; each rank has its own elements."""
    arguments = {arg: KINDS[kind].usual(size)[0] for arg, kind in CASES[name].arguments.items()}
    return tuple(Call(name, {arg: for_rank(value, rank) for arg, value in
                             (arguments | changed).items()}) for rank in range(size))


def steps_of(name: str, size: int, x: Array, ops: Sequence[str] = OPS
             ) -> Iterator[tuple[Call, ...]]:
    """Yield steps of an operation with arrays like ``x``, of different shapes where allowed."""
    case = CASES[name]
    if x.dtype[0] != 'f' and 'floats' in case.arguments.values():
        return
    ops = [op for op in ops if op in ('sum', 'prod') or not x.dtype.startswith('complex')]
    for n, op in enumerate(ops if 'op' in case.arguments else ['']):
        calls = []
        for rank in range(size):
            mine = x._replace(seed=x.seed + 3 * rank)
            may_differ = name in ('gather', 'allgather', 'bcast')
            of_kind = {
                'root': (size - 1 + n) % size, 'op': op,
                'out': KINDS['out'].usual(size)[(n + x.seed) % 4],
                'array': mine.grown(rank if may_differ else 0), 'floats': mine,
                'arrays': Arrays('tuple', tuple(
                    mine.grown(dest)._replace(seed=x.seed + 3 * rank + dest)
                    for dest in range(size))),
                'many': Arrays('list', (mine, *(Array('plain', dtype, (3,), rank) for dtype in (
                    'float32', 'float16', 'int64', 'bool')), mine.grown(2)))}
            calls.append(Call(name, {arg: of_kind[kind] for arg, kind in case.arguments.items()}))
        yield tuple(calls)
    if 'arrays' in case.arguments.values() and x.layout in ON_GPU:
        rows = Arrays('rows', (x._replace(shape=(size, *x.shape)),))
        yield step(name, size, xs=rows)


def call(comm: Any, name: str, root: int = 0) -> Any:
    """Make a valid call, the same on all ranks. Collective: every rank calls it."""
    if name == 'finalize':
        return comm.finalize()
    own = {'root': root} if 'root' in CASES[name].arguments else {}
    return getattr(comm, name)(**made(step(name, comm.size, **own)[0]))


def call_with(comm: Any, x: Any, name: str) -> Any:
    """Call an operation with ``x`` for every array, and the last rank as the root."""
    given = {'array': x, 'floats': x, 'arrays': [x] * comm.size, 'many': [x, x[:1]],
             'root': comm.size - 1}
    return getattr(comm, name)(**{argument: given[kind] for argument, kind in
                                  CASES[name].arguments.items() if kind in given})


def model() -> Any:
    """Return a model with gradients, the same on all ranks."""
    return Model().make()


def made(call: Call, xp: Any = np) -> dict[str, Any]:
    """Create the arguments of a call."""
    arguments = {name: value.make(xp) if hasattr(value, 'make') else value
                 for name, value in call.arguments.items()}
    if call.operation == 'allreduce':
        arguments['x'], arguments['out'] = _with_out(call['x'], arguments['x'], call['out'], xp)
        if arguments['out'] is None:  # communicators of version 7 do not have this argument
            del arguments['out']
    return arguments


def _with_out(spec: Array, x: Any, out: str | None, xp: Any) -> tuple[Any, Any]:
    if out is None or out == 'no array' or spec.is_bad:
        return x, out
    if out == 'masked':
        return x, NO_ARRAYS['masked']()
    if out == 'self' and spec.layout not in ('scalar', 'foreign'):
        return x, x
    dtype = np.dtype(spec.dtype)
    if out == 'overlap' and spec.layout == 'plain':
        both = xp.zeros(x.size + 1, dtype)
        first = both[:-1].reshape(spec.shape)
        first[...] = x
        return first, both[1:].reshape(spec.shape)
    result = xp.empty((*spec.shape, 2) if out in ('other shape', 'strided') else spec.shape,
                      ('int32' if dtype == 'int16' else 'int16') if out == 'other dtype' else dtype,
                      order='F' if out == 'fortran' else 'C')
    if out == 'read-only':
        result.flags.writeable = False
    return x, result[..., 0] if out == 'strided' else result


# --- playing a step -------------------------------------------------------------------------------

class Outcome(NamedTuple):
    """The outcome of a step on one rank.

    Attributes:
        fault: A text about how it differs from the contract, or ''.
        shared: A value that must be the same on the other ranks.
        group: The ranks with the same ``shared``; ``None`` for all ranks of the job.
        result: The result, or the error that all ranks have raised.
    """

    fault: str
    shared: Any
    group: Any
    result: Any


@functools.cache
def _own_comm() -> MPI.Intracomm:
    return MPI.COMM_WORLD.Dup()  # separates our messages from those of the tests


def agree(outcomes: Sequence[Outcome]) -> None:
    """Raise on all ranks if an outcome is wrong on any rank. Collective: every rank calls it."""
    texts = []
    for found in zip(*_own_comm().allgather([(each.fault, repr(each.group), repr(each.shared))
                                           for each in outcomes]), strict=True):
        texts += [f'rank {rank} of {len(found)}: {fault}'
                  for rank, (fault, *_) in enumerate(found) if fault]
        for one in {group for _, group, _ in found}:
            values = [value for _, group, value in found if group == one]
            if len({*values}) > 1:
                texts.append(f'differs between ranks: {values}')
    assert not texts, '\n'.join(texts)


def check(comm: Any, calls: Sequence[Call], group: Any = None) -> Any:
    """Play a step; return the result or error. Collective: every rank calls it."""
    played = play(comm, calls, group=group)
    agree([played])
    return played.result


def play(comm: Any, calls: Sequence[Call], xp: Any = np, group: Any = None) -> Outcome:
    """Play a step, and compare the outcome. Collective: every rank of the communicator calls it.

    Args:
        comm: The communicator.
        calls: One call per rank of the communicator.
        xp: NumPy or CuPy.
        group: The ranks of the job in the communicator; by default, all.
    """
    mine, outcome = calls[comm.rank], expected(calls)
    arguments: dict[str, Any] = {}
    result = error = None
    fault, shared = '', None
    copies: list[Any] = []
    try:
        arguments = made(mine, xp) if mine.operation != 'refuse' else {}
        inputs = arrays_in(arguments)
        if mine.operation == 'allreduce' and mine['out'] is not None:
            inputs = arrays_in([] if mine['out'] in ('self', 'overlap') else [arguments['x']])
        copies = [(x, np.array(_on_host(x))) for x in inputs]
        try:
            if mine.operation == 'refuse':
                comm.refuse('refuse', mine['error']('an error'))
            result = getattr(comm, mine.operation)(**arguments)
        except Exception as caught:
            error = caught
        for x, copy in copies:
            np.testing.assert_array_equal(_on_host(x), copy, 'an argument has changed')
        if outcome.types:
            assert error is not None, f'returned {short(result)} instead of an error'
            if not isinstance(error, outcome.types):
                raise error
            shared = type(error).__name__, str(error)
            _check_text(str(error), calls, outcome)
        elif error is not None:
            raise error
        else:
            shared = _check_value(comm, result, arguments, mine, outcome.values[comm.rank], xp)
    except Exception:
        fault = f'{mine} in {calls}:\n{traceback.format_exc()}'
    return Outcome(fault, shared, group, error if error is not None else result)


def _check_text(text: str, calls: Sequence[Call], outcome: Expected) -> None:
    """Check that the error describes the problem, and has a line for each rank."""
    size, (first, *_) = len(calls), calls
    if size == 1:
        return
    if outcome.is_mismatch:
        names = {call.operation for call in calls}
        assert text.startswith(f'Collective mismatch in {first.operation}: ' if len(names) == 1
                               else 'Collective mismatch'), text
    elif len(outcome.failed) == 1:
        rank, = outcome.failed
        operation = calls[rank].operation
        assert text.startswith(f'{operation} failed on rank {rank} (no data was sent)'), text
    if outcome.is_mismatch or 0 < len(outcome.failed) < size:
        from shared_fixtures import named_ranks

        assert '(no data was sent)' in text
        assert named_ranks(text) == [*range(size)], text


def _check_value(comm: Any, result: Any, arguments: dict[str, Any], call: Call, value: Any,
                 xp: Any) -> Any:
    """Compare a result with the expected value; return a value that all ranks must share."""
    case = CASES[call.operation]
    inputs = arrays_in(arguments)
    if call.operation in ('split', 'new_group'):
        got = None if result is None else (result.rank, result.size)
        assert got == (None if value is None else (value.index(comm.rank), len(value)))
        return None
    if 'model' in case.arguments:
        attribute = 'array' if call.operation == 'bcast_data' else 'grad'
        params = dict(arguments['model'].namedparams(False))
        got = {path: getattr(param, attribute) for path, param in params.items()
               if getattr(param, attribute) is not None}
        inputs = []
    elif call.operation in ('bcast', 'bcast_obj') and call['root'] == comm.rank:
        given = arguments[case.only_of_root[0]]
        if not isinstance(given, np.ndarray) or type(given) is np.ndarray:
            assert result is given
            return _digest(value) if case.is_same else None
        got, inputs = result, []
    elif call.operation == 'allreduce' and arguments.get('out') is not None:
        assert result is arguments['out']
        got, inputs = np.asarray(result) if xp is np else result, []
    else:
        got = result
    close = case.close.get(call.arguments.get('compression'), 0)
    compare(got, value, close, xp)
    arrays = arrays_in([got])
    for n, x in enumerate(arrays if xp is np and isinstance(got, (np.ndarray, tuple)) else []):
        assert x.flags.writeable
        assert not any(np.may_share_memory(x, y) for y in [*inputs, *arrays[:n]])
    return _digest(got) if case.is_same else None


def compare(got: Any, value: Any, close: float = 0, xp: Any = np) -> None:
    """Compare types, dtypes, shapes and elements."""
    if isinstance(value, (tuple, list)):
        assert type(got) is type(value) and len(got) == len(value), short(got)
        for x, y in zip(got, value, strict=True):
            compare(x, y, close, xp)
    elif isinstance(value, dict):
        assert type(got) is dict and got.keys() == value.keys(), short(got)
        for key in value:
            compare(got[key], value[key], close, xp)
    elif not isinstance(value, np.ndarray):
        is_equal = got == value or (got != got and value != value)  # NaN
        assert type(got) is type(value) and is_equal, short(got)
    else:
        assert type(got) is xp.ndarray, type(got)
        assert (got.dtype, got.shape) == (value.dtype, value.shape) and got.dtype.isnative
        tolerance = max(close, 4 * float(np.finfo(value.dtype).eps)) if close else 0
        np.testing.assert_allclose(_on_host(got), value, tolerance, tolerance)


def _on_host(x: Any) -> Any:
    return x.get() if hasattr(x, 'get') else np.asarray(x)


def arrays_in(x: Any) -> list[Any]:
    if isinstance(x, (tuple, list, dict)):
        return [array for item in (x.values() if isinstance(x, dict) else x)
                for array in arrays_in(item)]
    if isinstance(x, np.ndarray):
        return [np.asarray(x)] if x.dtype.kind != 'O' else []
    return [x] if isinstance(x, chainer.get_array_types()) else []


def _digest(got: Any) -> str:
    """Return a digest of all bits, with all NaNs treated as equal."""
    arrays = [_on_host(x) for x in arrays_in([got])]
    return hashlib.sha256(b''.join(
        np.where(x != x, np.array(np.nan, x.dtype), x).tobytes()
        if x.dtype.kind in 'fc' else x.tobytes() for x in arrays)).hexdigest()


def short(x: Any) -> str:
    """Return a value as one line of limited length."""
    text = ' '.join(repr(x).split())
    return text if len(text) < 400 else f'{text[:400]}...'
