"""send and recv against the same graph in one process."""
import chainer
import chainer.functions as F
import numpy as np
import pytest

import chainermn.functions as mnf
from chainermn.communicators import create_communicator

pytestmark = pytest.mark.every_size

W = [np.linspace(-1, 1, 4, dtype=np.float32).reshape(2, 2) * (i + 1) for i in range(4)]


@pytest.fixture(scope='module')
def comm():
    comm = create_communicator('naive')
    if comm.size < 2:
        pytest.skip('takes two ranks')
    return comm


@pytest.mark.parametrize('dtype', [np.float16, np.float32, np.float64])
def test_a_chain_of_ranks_is_one_graph(comm, dtype):
    """Input -> rank 0 -> rank 1 -> ... -> last rank, which has the loss."""
    weights = [chainer.Parameter(w.astype(dtype)) for w in W]
    h = x = chainer.Variable(np.ones((1, 2), dtype))
    for weight in weights[:comm.size]:
        h = F.tanh(F.matmul(h, weight))
    F.sum(h).backward()
    wanted, wanted_x = weights[comm.rank].grad, x.grad

    weight = chainer.Parameter(W[comm.rank].astype(dtype))
    x = chainer.Variable(np.ones((1, 2), dtype))
    h = x if comm.rank == 0 else mnf.recv(comm, comm.rank - 1)
    h = F.tanh(F.matmul(h, weight))
    if comm.rank < comm.size - 1:
        delegate = mnf.send(h, comm, comm.rank + 1)
        assert delegate.shape == (0,)
        delegate.backward()
    else:
        assert h.dtype == dtype
        F.sum(h).backward()
    assert weight.grad.dtype == dtype
    tolerance = 1e-2 if dtype == np.float16 else 1e-6
    np.testing.assert_allclose(weight.grad, wanted, rtol=tolerance, atol=tolerance)
    if comm.rank == 0:
        np.testing.assert_allclose(x.grad, wanted_x, rtol=tolerance, atol=tolerance)


def test_there_and_back_through_the_delegate(comm):
    """Rank 0 computes, rank 1 computes, rank 0 computes on: one graph by the delegate variable."""
    if comm.rank == 0:
        weight = chainer.Parameter(W[0].copy())
        delegate = mnf.send(F.matmul(np.ones((1, 2), np.float32), weight), comm, 1, tag=3)
        back = mnf.recv(comm, 1, delegate_variable=delegate, tag=4)
        F.sum(back * back).backward()

        one = chainer.Parameter(W[0].copy())
        y = F.exp(F.matmul(np.ones((1, 2), np.float32), one))
        F.sum(y * y).backward()
        np.testing.assert_allclose(weight.grad, one.grad, rtol=1e-6)
    elif comm.rank == 1:
        mnf.send(F.exp(mnf.recv(comm, 0, tag=3)), comm, 0, tag=4).backward()


def test_tuples(comm):
    if comm.rank == 0:
        a, b = chainer.Variable(np.ones(2, np.float32)), chainer.Variable(np.ones(3, np.float64))
        mnf.send((a, b), comm, 1).backward()
        assert (a.grad == 2).all() and a.grad.dtype == np.float32
        assert (b.grad == 0).all() and b.grad.dtype == np.float64
    elif comm.rank == 1:
        a, b = mnf.recv(comm, 0)
        assert a.shape == (2,) and b.shape == (3,)
        F.sum(2 * a).backward()  # b is not used: its gradient is zero


def test_force_tuple(comm):
    if comm.rank == 0:
        x = chainer.Variable(np.ones(2, np.float32))
        mnf.send(x, comm, 1).backward()
        assert (x.grad == 1).all()
    elif comm.rank == 1:
        y, = mnf.recv(comm, 0, force_tuple=True)
        F.sum(y).backward()


def test_device_of_old_versions_is_ignored(comm):
    if comm.rank == 0:
        mnf.send(np.ones(2, np.float32), comm, 1)
    elif comm.rank == 1:
        with pytest.warns(DeprecationWarning, match='device'):
            y = mnf.recv(comm, 0, device=-1)
        assert (y.array == 1).all()


def test_own_rank_is_refused(comm):
    with pytest.raises(ValueError, match='another rank'):
        mnf.send(np.ones(1, np.float32), comm, comm.rank)
    with pytest.raises(ValueError, match='another rank'):
        mnf.recv(comm, comm.rank)


def test_nothing_to_send_is_refused(comm):
    with pytest.raises(ValueError, match='at least one'):
        mnf.send((), comm, (comm.rank + 1) % comm.size)
