"""Object operations: combined objects, sources and tags, order, and objects that fail."""

import math

import numpy as np
import pytest
from contract import OBJECTS, UNPICKLABLE, compare
from each_case import each_case
from mpi4py import MPI

pytestmark = pytest.mark.every_size


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


@each_case('kind', [kind for kind in OBJECTS if kind not in UNPICKLABLE])
def test_status_says_source_and_tag(comm, kind):
    """Objects of each source arrive in the order of the sends."""
    if comm.rank > 0:
        for n in range(2):
            comm.send_obj((n, OBJECTS[kind](comm.rank)), 0, 10 * comm.rank + n)
        return
    seen = {}
    for _ in range(2 * (comm.size - 1)):
        status = MPI.Status()
        n, obj = comm.recv_obj(MPI.ANY_SOURCE, status)
        source = status.Get_source()
        assert n == seen.get(source, 0)
        seen[source] = n + 1
        assert status.Get_tag() == 10 * source + n
        compare(obj, OBJECTS[kind](source))
    assert seen == dict.fromkeys(range(1, comm.size), 2)


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


def send_to_first(comm, obj, rank):
    """Sends an object from a rank to rank 0, which may be the same one."""
    if comm.rank == rank:
        comm.send_obj(obj, 0)
    return comm.recv_obj(rank) if comm.rank == 0 else None


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
    'send_obj': (send_to_first, lambda size, rank: {0}),
}


@pytest.mark.sample(6)
@pytest.mark.parametrize('length', [1, 5000, 3_000_000])
@pytest.mark.parametrize('operation', RECEIVE)
def test_unpicklable_on_receiver(comms, operation, length, check_usable):
    """The error of the receivers gives the sender; other ranks continue."""
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

