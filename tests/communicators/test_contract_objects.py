"""Object operations: picklable objects arrive unchanged, from every rank, in order."""

import fractions
import math

import numpy as np
import pytest
from each_case import each_case
from mpi4py import MPI

pytestmark = pytest.mark.every_size

#: Objects by rank.  mpi4py sends the buffers of arrays beyond 256 KiB beside the pickle.
OBJECTS = {
    'None': lambda rank: None,
    'numbers': lambda rank: (rank, 2**100, 1.5, 1j, fractions.Fraction(1, 3)),
    'text': lambda rank: 'ä' * 10000 * rank,
    'other lengths': lambda rank: 'a' * (1 + 100 * rank),
    'about as many bytes as are gathered at once': lambda rank: bytes(8160 + 16 * rank),
    'nested': lambda rank: {'a': [1, (2, {3})], rank: {'b': [None, b'bytes', range(3)]}},
    'function': lambda rank: np.add,
    'arrays': lambda rank: [np.arange(6.).reshape(2, 3).T, np.float16(rank), np.empty((0, 2))],
    'large arrays': lambda rank: [np.full((3, 20000), rank), 'text', np.full(40000, rank, 'c8')],
    'large bytes': lambda rank: bytes([rank]) * 300000,
}


each_object = each_case('make_obj', OBJECTS.values())


def arrays_in(obj):
    if isinstance(obj, dict):
        obj = list(obj.values())
    if isinstance(obj, list):
        return [x for part in obj for x in arrays_in(part)]
    return [obj] if isinstance(obj, np.ndarray) else []


def check_obj(result, expected):
    np.testing.assert_equal(result, expected)
    assert type(result) is type(expected)
    for x, y in zip(arrays_in(result), arrays_in(expected), strict=True):
        assert x.dtype == y.dtype
        x[...] = 0  # can be written, and is not the sender's


@each_object
def test_bcast_obj(comm, make_obj):
    root = comm.size - 1
    obj = make_obj(comm.rank)
    result = comm.bcast_obj(obj, root=root)
    if comm.rank == root:
        assert result is obj
    else:
        check_obj(result, make_obj(root))
        check_obj(obj, make_obj(comm.rank))


@each_object
def test_gather_obj(comm, make_obj):
    root = comm.size - 1
    results = comm.gather_obj(make_obj(comm.rank), root)
    if comm.rank == root:
        check_obj(results, [make_obj(rank) for rank in range(comm.size)])
    else:
        assert results is None


@each_object
def test_allgather_obj(comm, make_obj):
    obj = make_obj(comm.rank)
    check_obj(comm.allgather_obj(obj), [make_obj(rank) for rank in range(comm.size)])
    check_obj(obj, make_obj(comm.rank))


@each_object
def test_scatter_obj(comm, make_obj):
    root = comm.size - 1
    objs = [make_obj(rank) for rank in range(comm.size)]
    result = comm.scatter_obj(objs if comm.rank == root else None, root)
    check_obj(result, make_obj(comm.rank))


@each_object
def test_send_recv_obj(comm, make_obj):
    if comm.rank == 0:
        comm.send_obj(make_obj(1), comm.size - 1)
        comm.send_obj(make_obj(2), comm.size - 1, 7)
    if comm.rank == comm.size - 1:
        check_obj(comm.recv_obj(0), make_obj(1))
        check_obj(comm.recv_obj(0, tag=7), make_obj(2))


@pytest.mark.parametrize('op', ['sum', 'prod', 'max', 'min'])
def test_allreduce_obj_operations(comm, op, same_error):
    letter = 'abcd'[comm.rank]
    if op == 'prod':
        assert comm.allreduce_obj(comm.rank + 2, op) == math.factorial(comm.size + 1)
        if comm.size > 1:
            assert isinstance(same_error(comm.allreduce_obj, letter, op, table=False), TypeError)
    else:
        assert comm.allreduce_obj(letter, op) == {
            'sum': 'abcd'[:comm.size], 'max': 'abcd'[comm.size - 1], 'min': 'a'}[op]


@each_case('op, dtype', [
    (op, dtype) for op in ('max', 'min') for dtype in (float, np.float32, np.float64)])
def test_nan_of_any_rank_is_the_maximum_and_minimum(comm, op, dtype):
    for rank in range(comm.size):
        result = comm.allreduce_obj(dtype('nan' if comm.rank == rank else comm.rank), op)
        assert type(result) is dtype
        assert np.isnan(result)


@pytest.mark.parametrize('op', ['max', 'min'])
def test_elements_of_arrays_are_compared(comm, op):
    x = np.array([comm.rank, -comm.rank, 1.])
    if comm.rank == comm.size - 1:
        x[2] = np.nan
    last = comm.size - 1
    np.testing.assert_array_equal(comm.allreduce_obj(x, op), {
        'max': [last, 0, np.nan], 'min': [0, -last, np.nan]}[op])


@each_object
def test_status_says_source_and_tag(comm, make_obj):
    """Objects of each source arrive in the order of the sends."""
    if comm.rank > 0:
        for n in range(2):
            comm.send_obj((n, make_obj(comm.rank)), 0, 10 * comm.rank + n)
        return
    seen = {}
    for _ in range(2 * (comm.size - 1)):
        status = MPI.Status()
        n, obj = comm.recv_obj(MPI.ANY_SOURCE, status)
        source = status.Get_source()
        assert n == seen.get(source, 0)
        seen[source] = n + 1
        assert status.Get_tag() == 10 * source + n
        check_obj(obj, make_obj(source))
    assert seen == dict.fromkeys(range(1, comm.size), 2)


def test_tags_are_distinguished(comm):
    if comm.rank == 0 and comm.size > 1:
        comm.send_obj('first', 1, tag=1)
        comm.send_obj('second', 1, tag=2)
    elif comm.rank == 1:
        assert comm.recv_obj(0, tag=2) == 'second'
        assert comm.recv_obj(0, tag=1) == 'first'


@each_object
def test_objects_to_own_rank(comm, make_obj):
    for _ in range(2):
        comm.send_obj(make_obj(1), comm.rank, 1)
        comm.send_obj(make_obj(2), comm.rank, 1)
        check_obj(comm.recv_obj(comm.rank, tag=1), make_obj(1))
        check_obj(comm.recv_obj(MPI.ANY_SOURCE), make_obj(2))


def test_arrays_and_objects_keep_their_order(comm):
    x = np.arange(5000.)
    if comm.rank == 0 and comm.size > 1:
        comm.send_obj('before', 1, 4)
        comm.send(x, 1, 4)
        comm.send_obj({'x': np.append(x, x).repeat(10)}, 1, 4)
        comm.send((x, x[:2]), 1, 4)
        comm.send_obj('after', 1, 4)
    elif comm.rank == 1:
        assert comm.recv_obj(0, tag=4) == 'before'
        np.testing.assert_array_equal(comm.recv(0, 4), x)
        assert comm.recv_obj(0, tag=4)['x'].shape == (100000,)
        np.testing.assert_equal(comm.recv(0, 4), (x, x[:2]))
        assert comm.recv_obj(0, tag=4) == 'after'


class Broken:
    """Can be pickled but not unpickled; contains an array of some length."""

    def __init__(self, length):
        self.length = length

    def __reduce__(self):
        return eval, ('1 / 0', {'x': np.zeros(self.length)})


#: Operations to which one rank gives an object; which rank that is, and which ones receive it.
RECEIVE = {
    'bcast_obj': (lambda comm, obj, rank: comm.bcast_obj(obj, root=rank),
                  lambda size, rank: {*range(size)} - {rank}),
    'gather_obj': (lambda comm, obj, rank: comm.gather_obj(obj), lambda size, rank: {0}),
    'allgather_obj': (lambda comm, obj, rank: comm.allgather_obj(obj),
                      lambda size, rank: {*range(size)}),
    'allreduce_obj': (lambda comm, obj, rank: comm.allreduce_obj([obj]),
                      lambda size, rank: {*range(size)}),
    'scatter_obj': (lambda comm, obj, rank: comm.scatter_obj([obj] * comm.size, root=rank),
                    lambda size, rank: {*range(size)}),
    'send_obj': (lambda comm, obj, rank: comm.send_obj(obj, 0) if comm.rank == rank else
                 comm.recv_obj(rank) if comm.rank == 0 else None, lambda size, rank: {0} - {rank}),
}


@pytest.mark.sample(6)
@pytest.mark.parametrize('length', [1, 5000, 3_000_000])
@pytest.mark.parametrize('operation', RECEIVE)
def test_unpicklable_on_receiver(comms, operation, length, check_usable):
    """Receivers raise and name the sender; other ranks continue."""
    call, receivers_of = RECEIVE[operation]
    for comm in comms[:1]:
        for rank in {1 % comm.size, comm.size - 1}:
            if comm.rank in receivers_of(comm.size, rank):
                with pytest.raises(ZeroDivisionError, match=f'rank {comm.rank} cannot unpickle the '
                                   f'object of rank {rank}: ZeroDivisionError: division by zero'):
                    call(comm, Broken(length) if comm.rank == rank else 1, rank)
            else:
                call(comm, Broken(length) if comm.rank == rank else 1, rank)
            check_usable(comm)
