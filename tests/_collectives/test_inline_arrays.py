"""Small arrays and objects give the same results as large ones, which are sent separately."""

import itertools

import numpy as np
import pytest
from each_case import each_case

import chainermn
from chainermn._operations.call_signature import DTYPES

pytestmark = pytest.mark.every_size

#: Characters of all dtypes, also of those that are equal to another one, such as int64.
CODES = [code for code in '?bhilqBHILQefdFD' if np.dtype(code) in DTYPES]


@pytest.fixture(scope='module')
def inline():
    comm = chainermn.create_communicator('naive')
    yield comm
    comm.finalize()


@pytest.fixture(scope='module')
def separate():
    comm = chainermn.create_communicator('naive')
    comm._context.check.capacity = 0
    yield comm
    comm.finalize()


def same(a, b):
    """Compare results of operations: arrays, sequences of them, or objects."""
    assert type(a) is type(b)
    if isinstance(a, tuple):
        for x, y in zip(a, b, strict=True):
            same(x, y)
    elif isinstance(a, np.ndarray):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        np.testing.assert_array_equal(a, b)
        assert a.flags.writeable and a.flags.c_contiguous
    else:
        assert a == b


@each_case('code, shape', itertools.product(
    CODES, [(), (1,), (3,), (2, 3), (0,), (300,), (3000,), (1,) * 9]))
def test_arrays(inline, separate, code, shape):
    size, rank = inline.size, inline.rank
    x = np.asarray(np.random.RandomState(rank).randint(0, 3, shape)).astype(code)
    xs = tuple(x + np.array(n, code) for n in range(size))
    ops = ('sum', 'prod', 'max', 'min') if code not in 'FD' else ('sum', 'prod')
    for op in ops:
        same(inline.allreduce(x, op), separate.allreduce(x, op))
    same(inline.allgather(x), separate.allgather(x))
    same(inline.alltoall(xs), separate.alltoall(xs))
    for root in range(size):
        same(inline.gather(x, root), separate.gather(x, root))
        sent, parts = (x, xs) if rank == root else (None, None)
        same(inline.bcast(sent, root), separate.bcast(sent, root))
        same(inline.scatter(parts, root), separate.scatter(parts, root))


def test_the_results_are_independent_of_the_arguments(inline):
    x, xs = np.ones(3), np.ones((inline.size, 3))
    results = [inline.allreduce(x), *inline.allgather(x), *inline.alltoall(tuple(xs)),
               inline.scatter(xs if inline.rank == 0 else None)]
    results += inline.gather(x) or ()
    for result in results:
        result[...] = 7
    np.testing.assert_array_equal(x, 1)
    np.testing.assert_array_equal(xs, 1)


def test_shapes_that_differ(inline, separate):
    """Small on some ranks, large on others."""
    for sizes in ([1, 2, 3, 4], [3, 5000, 0, 1], [0, 0, 0, 0]):
        x = np.full(sizes[inline.rank % 4], inline.rank, 'f')
        same(inline.allgather(x), separate.allgather(x))
        same(inline.gather(x, 0), separate.gather(x, 0))
        xs = tuple(np.full(sizes[n % 4], n, 'f') for n in range(inline.size))
        same(inline.alltoall(xs), separate.alltoall(xs))
        xs = xs if inline.rank == 0 else None
        same(inline.scatter(xs), separate.scatter(xs))


@pytest.mark.parametrize('length', [0, 1, 100, 4000, 10_000, 100_000])
def test_objects(inline, separate, length):
    size, rank = inline.size, inline.rank
    text = chr(65 + rank) * length
    uneven = 'x' * (length if rank == size - 1 else 1)
    for obj in (text, uneven, [np.ones(length)]):
        same([str(each) for each in inline.allgather_obj(obj)],
             [str(each) for each in separate.allgather_obj(obj)])
        for root in range(size):
            here = rank == root
            same(str(inline.gather_obj(obj, root)), str(separate.gather_obj(obj, root)))
            same(str(inline.bcast_obj(obj if here else None, root=root)),
                 str(separate.bcast_obj(obj if here else None, root=root)))
            objs = [(n, obj) for n in range(size)] if here else None
            same(str(inline.scatter_obj(objs, root)), str(separate.scatter_obj(objs, root)))
    assert inline.allreduce_obj(rank + .5) == separate.allreduce_obj(rank + .5)


def test_sums_are_in_the_order_of_the_ranks(inline):
    values = [np.float32(10) ** (7 * (-1) ** rank) + rank for rank in range(inline.size)]
    total = values[0]
    for value in values[1:]:
        total = np.float32(total + value)
    x = np.full(5, values[inline.rank], 'f')
    np.testing.assert_array_equal(inline.allreduce(x), np.full(5, total))
    assert len(set(inline.allgather_obj(inline.allreduce(x).tobytes()))) == 1
