"""Requests: completion, errors, and order of messages."""

import gc
import time

import numpy as np
import pytest
from mpi4py import MPI

from chainermn._collectives import point_to_point

pytestmark = pytest.mark.every_size

LARGE = point_to_point.INLINE  # float64: eight times the inline limit


@pytest.fixture
def left(comm):
    return (comm.rank - 1) % comm.size


@pytest.fixture
def right(comm):
    return (comm.rank + 1) % comm.size


def complete(request):
    """Test a request until it is complete, as a loop that also computes would."""
    while not request.test():  # until the time limit of a test
        time.sleep(0)
    return request


def test_test_says_whether_wait_would_block(comm, left, right):
    request = comm.irecv(left, 5)
    comm.barrier()
    assert not request.test()
    assert 'pending' in repr(request)
    comm.barrier()
    sent = comm.isend(np.full(LARGE, comm.rank), right, 5)
    assert complete(request).test()
    assert 'complete' in repr(request)
    assert request.wait()[-1] == left
    assert 'done' in repr(request)
    complete(sent).wait()


def test_wait_makes_progress_with_other_requests(comm):
    """Rank 0 waits for rank 2, which waits for rank 1, which waits for rank 0 to receive."""
    if comm.size < 3:
        return
    x = np.full(LARGE, comm.rank)
    if comm.rank == 0:
        first, second = comm.irecv(1), comm.irecv(2)
        assert second.wait()[0] == 2
        assert first.wait()[0] == 1
    elif comm.rank == 1:
        comm.send(x, 0, 0)
        comm.send(x, 2, 0)
    elif comm.rank == 2:
        assert comm.recv(1, 0)[0] == 1
        comm.send(x, 0, 0)


def test_blocking_calls_make_progress_with_requests(comm, left, right):
    """Each rank sends while a message to it is in flight, and receives later messages."""
    if comm.size == 1:
        return
    x = np.full(LARGE, comm.rank)
    request = comm.irecv(left, 1)
    comm.send((x, x), right, 1)
    assert request.wait()[1][0] == left
    if comm.rank % 2:
        comm.send(x, comm.rank - 1, 1)
        comm.send(x[:1], comm.rank - 1, 2)
        comm.send(x, comm.rank - 1, 1)
        comm.send_obj('last', comm.rank - 1, 2)
    elif comm.rank + 1 < comm.size:
        requests = [comm.irecv(comm.rank + 1, 1) for _ in range(2)]
        assert comm.recv(comm.rank + 1, 2).size == 1
        assert comm.recv_obj(comm.rank + 1, tag=2) == 'last'
        assert [y.size for y in comm.waitall(requests)] == [LARGE, LARGE]


def test_from_any_rank_with_any_tag(comm):
    sent = []
    if comm.rank == 0:
        requests = [comm.irecv(MPI.ANY_SOURCE, MPI.ANY_TAG) for _ in range(comm.size)]
    sent = comm.isend(np.full(LARGE, comm.rank), 0, 10 + comm.rank)
    if comm.rank == 0:
        assert sorted(x[0] for x in comm.waitall(requests)) == list(range(comm.size))
    sent.wait()


def test_waiting_twice_raises(comm, left, right):
    requests = [comm.isend(np.zeros(3), right), comm.irecv(left)]
    comm.waitall(requests)
    for request, name in zip(requests, (f'isend to rank {right}', f'irecv from rank {left}'),
                             strict=True):
        with pytest.raises(RuntimeError, match=f'already called on the request of {name} '):
            request.wait()
        with pytest.raises(RuntimeError, match='already called on the request'):
            comm.waitall([request])


def test_waitall_takes_requests(comm):
    assert comm.waitall([]) == []
    for wrong in ([None], [comm.mpi_comm], ['request']):
        with pytest.raises(TypeError, match='requests from isend and irecv'):
            comm.waitall(wrong)


def test_waitall_waits_for_all_before_it_raises(comm, left, right):
    comm.send_obj('an object', right, 1)
    sent = comm.isend(np.ones(LARGE), right, 2)
    wrong, good = comm.irecv(left, 1), comm.irecv(left, 2)
    with pytest.raises(TypeError, match=r'using send_obj\(\); receive it with recv_obj\(\)'):
        comm.waitall([wrong, good, sent])
    with pytest.raises(RuntimeError, match='already called on the request'):
        good.wait()


def test_request_keeps_its_buffer_alive(comm, left, right):
    """MPI can read the buffer even after the request is dropped."""
    comm.isend(np.arange(300000.) + comm.rank, right, 3)
    gc.collect()
    np.full(300000, -1.)  # likely to be where the array was
    comm.irecv(left, 4)  # forgotten, and completed below
    comm.barrier()
    np.testing.assert_array_equal(comm.irecv(left, 3).wait(), np.arange(300000.) + left)
    comm.isend(np.zeros(3), right, 4).wait()
    comm.barrier()
    assert comm._context.messages.receiving() == []


def test_finalize_with_incomplete_request(comm, same_error):
    own = comm.split(0, comm.rank)
    last = own.size - 1
    request = own.irecv(0, 9) if own.rank == last else None
    error = same_error(own.finalize, failed=last)
    assert isinstance(error, RuntimeError)
    assert 'irecv from rank 0 with tag 9' in str(error)
    if own.rank == 0:
        own.isend(np.ones(2), last, 9).wait()
    if own.rank == last:
        request.wait()
    own.finalize()

