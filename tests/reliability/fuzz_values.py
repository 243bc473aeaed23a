"""Arguments of fuzzed calls, as plain values that can be printed and sent.

``make()`` creates the array, object or model; attributes describe whether it is invalid.
"""
from __future__ import annotations

import pathlib
import sys
from typing import Any, NamedTuple

import chainer
import numpy as np

sys.path.append(str(pathlib.Path(__file__).parents[1]))

from shared_fixtures import numbers, strided

LAYOUTS = ('plain', 'fortran', 'strided', 'read-only', 'foreign', 'scalar')

#: Values that are not supported arrays.
NO_ARRAYS = {
    'None': lambda: None,
    'number': lambda: 1.5,
    'text': lambda: 'text',
    'dict': dict,
    'masked': lambda: np.ma.masked_array([1., 2.], [True, False]),
    'objects': lambda: np.array([None, 1]),
    'dates': lambda: np.zeros(3, 'datetime64[s]'),
    'longdouble': lambda: np.zeros(3, np.longdouble),
    'Variable': lambda: chainer.Variable(np.zeros(3, 'f')),
}

#: From this seed on, values are large or not finite.
WIDE = 100


class Array(NamedTuple):
    """An array, or an invalid value in its place."""

    kind: str
    dtype: str = 'float32'
    shape: tuple[int, ...] = ()
    seed: int = 0

    @property
    def is_bad(self) -> bool:
        return self.kind in NO_ARRAYS

    def value(self) -> np.ndarray:
        """The elements, in C order and native byte order."""
        n = int(np.prod(self.shape, dtype=int))
        dtype = np.dtype(self.dtype)
        x = numbers(self.shape, self.dtype, self.seed)
        if self.seed >= WIDE and n:
            if dtype.kind in 'iu':
                info = np.iinfo(dtype)
                rng = np.random.default_rng(self.seed)
                x = rng.integers(info.min, info.max, self.shape, dtype, endpoint=True)
                x = np.asarray(x, dtype)
            elif dtype.kind == 'f':
                x.reshape(-1)[0] = (np.nan, np.inf, -np.inf)[self.seed % 3]
        return x

    def make(self) -> Any:
        if self.is_bad:
            return NO_ARRAYS[self.kind]()
        x = self.value()
        if self.kind == 'fortran' and self.shape:
            x = np.asfortranarray(x)
        elif self.kind == 'strided' and self.shape:
            x = strided(x)
        elif self.kind == 'read-only':
            x.flags.writeable = False
        elif self.kind == 'foreign':
            x = x.astype(x.dtype.newbyteorder('S'))
        elif self.kind == 'scalar' and not self.shape:
            x = x[()]
        return x


class Arrays(NamedTuple):
    """A tuple or list of arrays, the rows of one array, or an invalid value."""

    kind: str  # 'tuple', 'list' or 'rows'
    items: tuple[Array, ...] = ()

    def make(self) -> Any:
        if self.kind == 'rows':
            return self.items[0].make()
        items = [item.make() for item in self.items]
        return tuple(items) if self.kind == 'tuple' else items

    def values(self) -> list[np.ndarray]:
        if self.kind == 'rows':
            return [np.asarray(row) for row in self.items[0].value()]
        return [item.value() for item in self.items]


class Unpicklable:
    def __reduce__(self) -> Any:
        raise OSError('this object stays here')


#: Objects by name; each rank adds its seed.
OBJECTS = {
    'int': lambda seed: seed,
    'text': lambda seed: f'text {seed}',
    'None': lambda seed: None,
    'list': lambda seed: [seed, 'x'] * (seed % 4),
    'dict': lambda seed: {'a': seed, 'b': (None, 1.5)},
    'array': lambda seed: np.arange(seed, dtype='f'),
    'long text': lambda seed: 'x' * (20000 + seed),
    'long array': lambda seed: np.arange(30000 + seed),
    'unpicklable': lambda seed: Unpicklable(),
}


class Object(NamedTuple):
    """Any object."""

    kind: str
    seed: int = 0

    @property
    def is_bad(self) -> bool:
        return self.kind == 'unpicklable'

    def make(self) -> Any:
        return OBJECTS[self.kind](self.seed)


class Parameter(NamedTuple):
    """A parameter of a model."""

    dtype: str
    shape: tuple[int, ...]
    state: str  # 'grad', 'no grad', 'read-only grad' or 'uninitialized'
    seed: int = 0

    @property
    def is_initialized(self) -> bool:
        return self.state != 'uninitialized'

    @property
    def has_grad(self) -> bool:
        return self.state.endswith('grad') and self.state != 'no grad'

    def value(self) -> np.ndarray:
        return Array('plain', self.dtype, self.shape, self.seed + 1).value()

    def grad(self) -> np.ndarray:
        return Array('plain', self.dtype, self.shape, self.seed + 2).value()


class Model(NamedTuple):
    """A model, or an invalid value in its place."""

    parameters: tuple[Parameter, ...] | None

    def make(self) -> Any:
        if self.parameters is None:
            return 'no model'
        link = chainer.Link()
        with link.init_scope():
            for i, one in enumerate(self.parameters):
                parameter = chainer.Parameter(one.value() if one.is_initialized else None)
                if one.has_grad:
                    grad = one.grad()
                    grad.flags.writeable = one.state == 'grad'
                    parameter.grad = grad
                setattr(link, f'p{i}', parameter)
        return link


def for_rank(value: Any, rank: int) -> Any:
    """The same value with a rank's own elements."""
    if isinstance(value, (Array, Object, Parameter)):
        return value._replace(seed=value.seed + rank)
    if isinstance(value, (Arrays, Model)):
        return type(value)(*(for_rank(field, rank) for field in value))
    if isinstance(value, tuple):
        return tuple(for_rank(item, rank) for item in value)
    return value
