"""Edge cases of arithmetic: rounding, overflow, long integers, NaN, bitwise equality."""

import functools

import chainer.links as L
import numpy as np
import pytest
from mpi4py import MPI

pytestmark = pytest.mark.every_size


def test_float16_is_rounded_once(comm, check):
    # In float16, 2048 + 1 is 2048, and so is 2048 + 1 + 1.
    x = np.array([2048 if comm.rank == 0 else 1], np.float16)
    check(comm.allreduce(x), np.array([2048 + comm.size - 1], np.float32).astype(np.float16))
    if comm.size >= 3:
        assert comm.allreduce(x)[0] > 2048


def test_float16_overflows_only_where_the_result_does(comm, check):
    """An intermediate sum exceeds float16, but the result does not."""
    last = comm.rank == comm.size - 1
    x = np.array([65504, 65504, 1], np.float16) * np.array([1, -1 if last else 1, 1], np.float16)
    wide = np.array([65504. * comm.size, 65504. * (comm.size - 2), comm.size])
    wide[:2][np.abs(wide[:2]) > 65504] = np.inf
    check(comm.allreduce(x), wide.astype(np.float16))
    # The mean is never beyond.
    check(comm.multi_node_mean(np.array([65504, -65504], np.float16)),
          np.array([65504, -65504], np.float16))


@pytest.mark.parametrize('dtype', ['float16', 'float32', 'float64'])
@pytest.mark.parametrize('op', ['max', 'min'])
def test_extremes_keep_nan_and_signs(comm, dtype, op):
    """Like numpy.maximum and numpy.minimum, on any rank; -0.0 is below 0.0."""
    combine = {'max': np.maximum, 'min': np.minimum}[op]
    for odd in range(comm.size):
        values = [np.nan, -np.nan, np.inf, -np.inf, 0., -0., -5, 5, np.finfo(dtype).tiny]
        xs = np.ones((comm.size, len(values)), dtype)
        xs[odd] = values
        result = comm.allreduce(xs[comm.rank], op)
        np.testing.assert_array_equal(result, functools.reduce(combine, xs))
        assert len(set(comm.allgather_obj(result.tobytes()))) == 1
    if comm.size > 1:
        for odd in range(comm.size):
            zero = np.array([-0. if comm.rank == odd else 0.], dtype)
            assert np.signbit(comm.allreduce(zero, op)) == (op == 'min')


@pytest.mark.sample(4)
@pytest.mark.parametrize('dtype', ['float16', 'float32', 'float64'])
def test_bits_of_means_are_equal_on_all_ranks_and_from_run_to_run(comm, name, dtype):
    random = np.random.RandomState(comm.rank)
    for size in (3, 40000):
        x = random.uniform(-1, 1, size).astype(dtype)
        results = {comm.multi_node_mean(x).tobytes() for _ in range(20)}
        assert len(set().union(*comm.allgather_obj(results))) == 1

        model = L.Linear(size, 1)
        results = set()
        for _ in range(20):
            model.W.grad = x.reshape(1, -1).astype(np.float32)
            model.b.grad = x[:1].astype(np.float32)
            comm.multi_node_mean_grad(model)
            results.add((model.W.grad.tobytes(), model.b.grad.tobytes()))
        if name == 'dummy':
            assert len(results) == 1  # each rank keeps its own
        else:
            assert len(set().union(*comm.allgather_obj(results))) == 1


def test_messages_of_the_user_do_not_interfere(comm, check, check_usable):
    """A wildcard receive on the user's communicator gets none of our messages."""
    inbox = np.zeros(100000, np.uint8)
    request = comm.mpi_comm.Irecv(inbox, MPI.ANY_SOURCE, MPI.ANY_TAG)
    check_usable(comm)
    x = np.arange(3000.)
    comm.bcast(x)
    check(comm.allgather(x)[-1], x)
    if comm.size > 1:
        if comm.rank == 0:
            comm.send(x, 1, 0)
            comm.send_obj({'x': x}, 1)
        elif comm.rank == 1:
            check(comm.recv(0, 0), x)
            check(comm.recv_obj(0)['x'], x)
    came_early = request.Test()
    comm.mpi_comm.Barrier()
    if comm.size == 1:
        request.Cancel()
    else:
        comm.mpi_comm.Send(np.full(5, comm.rank, np.uint8), (comm.rank + 1) % comm.size)
    request.Wait()
    assert not came_early
    assert not inbox[5:].any()
    if comm.size > 1:
        assert (inbox[:5] == (comm.rank - 1) % comm.size).all()


def test_small_sums_are_in_the_order_of_the_ranks(comm):
    values = [np.float32(10) ** (7 * (-1) ** rank) + rank for rank in range(comm.size)]
    total = values[0]
    for value in values[1:]:
        total = np.float32(total + value)
    x = np.full(5, values[comm.rank], 'f')
    np.testing.assert_array_equal(comm.allreduce(x), np.full(5, total))
    assert len(set(comm.allgather_obj(comm.allreduce(x).tobytes()))) == 1


def test_the_mean_of_version_7(comms):
    """Copies of its batch normalization call a private method."""
    for comm in comms:
        own = np.array([comm.rank, 2 * comm.rank], np.float32)
        mean, received = [(comm.size - 1) / 2, comm.size - 1], np.zeros(2, np.float32)
        comm._multi_node_mean(own, received)
        np.testing.assert_array_equal(own, [comm.rank, 2 * comm.rank])
        comm._multi_node_mean(None, own)
        for x in (received, own):
            np.testing.assert_allclose(x, mean, rtol=1e-6)

