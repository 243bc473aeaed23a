"""A batch that was packed and unpacked is identical to the original."""
import pickle

import numpy as np
import pytest
from equal_values import assert_same

from chainermn.iterators import _columns


class Named(np.ndarray):
    """An array with an attribute in addition to its elements."""


def named(x):
    array = np.asarray(x).view(Named)
    array.name = 'a name'
    return array


class Pair(tuple):
    __slots__ = ()


def arrays(dtype, shape=(2, 3), n=4):
    return [np.full(shape, i, dtype) for i in range(n)]


NUMBERS = ['?', 'i1', 'u8', '>i4', 'e', 'f', 'd', 'F', 'D']

#: Batches whose arrays are joined.
JOINED = {
    'digits': [(np.arange(64, dtype='f') + i, np.int32(i)) for i in range(32)],
    'one': [(np.ones(2), np.int64(3))],
    'triples': [(np.ones((2, i // 9 + 1)), np.float16(i), np.bool_(i % 2)) for i in range(8)],
    'scalars': [np.float32(i) for i in range(3)],
    'arrays and objects': [(np.full(3, i), {'name': str(i)}, None) for i in range(3)],
} | {f'arrays of {dtype}': arrays(dtype) for dtype in NUMBERS}
#: Batches that are not packed.
LEFT = {
    'nothing': [],
    'not a list': (np.ones(2), np.ones(2)),
    'one array': np.ones((4, 2)),
    'empty tuples': [(), ()],
    'tuples of other lengths': [(1,), (1, 2)],
    'dicts': [{'x': np.ones(2), 't': 1}] * 2,
    'Python numbers': [(1, 2.5), (3, 4.5)],
    'shapes': [np.ones(2), np.ones(3)],
    'dtypes': [np.ones(2), np.ones(2, 'f')],
    'scalar types': [np.float32(1), np.float64(2)],
    'arrays and scalars': [np.ones(()), np.float64(2)],
    'arrays without elements': [(np.ones((2, 0)), np.ones(0))] * 2,
    'arrays without dimensions': [np.ones(()), np.zeros(())],
    'objects': [np.array([None, 'a']), np.array([1, 2], object)],
    'strings': [np.str_('a'), np.str_('b')],
    'dates': [np.datetime64('2020-01-01'), np.datetime64('2021-01-01')],
    'arrays of strings': [np.array(['ab']), np.array(['cd'])],
    'records': [np.zeros(2, [('a', 'i4')])] * 2,
    'other order': [np.ones((4, 6))[:, ::2]] * 2,
    'subclass of arrays': [named([1, 2]), named([3, 4])],
    'masked': [np.ma.array([1, 2], mask=[0, 1])] * 2,
    'subclass of tuples': [Pair((1, 2)), Pair((3, 4))],
    'large': arrays('d', (100, 100)),
}


def there_and_back(batch):
    return _columns.unpack(pickle.loads(pickle.dumps(_columns.pack(batch))))


@pytest.mark.parametrize('batch', (JOINED | LEFT).values(), ids=(JOINED | LEFT).keys())
def test_unpacked_batches_are_identical(batch):
    assert_same(there_and_back(batch), batch)


@pytest.mark.parametrize('batch', JOINED.values(), ids=JOINED.keys())
def test_no_array_is_pickled(batch):
    assert b'numpy' not in pickle.dumps(_columns.pack(batch))


@pytest.mark.parametrize('name', ['subclass of arrays', 'objects', 'large', 'other order'])
def test_some_arrays_are_not_joined(name):
    form, (dtype, _, column) = _columns.pack(LEFT[name])
    assert (form, dtype) == ('column', None)
    assert all(packed is x for packed, x in zip(column, LEFT[name], strict=True))


def test_arrays_can_be_written_to_and_share_nothing():
    first, second = there_and_back([np.zeros(3), np.zeros(3)])
    first += 1
    assert first.tolist() == [1, 1, 1] and second.tolist() == [0, 0, 0]
    assert first.flags.aligned
