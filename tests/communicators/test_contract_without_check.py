"""CHAINERMN_AGREE=0: valid calls give the same results; must be set on all ranks."""

import chainer.links as L
import numpy as np
import pytest
from mpi4py import MPI

from chainermn.communicators import create_communicator

WORLD = MPI.COMM_WORLD


@pytest.fixture
def comm(name, monkeypatch):
    monkeypatch.setenv('CHAINERMN_AGREE', '0')
    comm = create_communicator(name)
    yield comm
    comm.finalize()


def test_arrays(comm, check):
    last = comm.size - 1
    x = np.arange(3.) + comm.rank
    xs = [np.arange(3.) + rank for rank in range(comm.size)]
    shapes = [np.full((rank, 2), rank, np.float16) for rank in range(comm.size)]
    check(comm.bcast(x, last).copy(), xs[last])
    for result, expected in zip(comm.allgather(shapes[comm.rank]), shapes, strict=True):
        check(result, expected)
    gathered = comm.gather(shapes[comm.rank], last)
    assert (gathered is None) == (comm.rank != last)
    for result, expected in zip(gathered or (), shapes, strict=gathered is not None):
        check(result, expected)
    for result in comm.alltoall(shapes):
        check(result, shapes[comm.rank])
    check(comm.scatter(shapes if comm.rank == last else None, last), shapes[comm.rank])
    check(comm.allreduce(x), sum(xs))
    check(comm.allreduce(x, 'max'), xs[last])
    np.testing.assert_allclose(comm.multi_node_mean(x), sum(xs) / comm.size)
    if comm.size > 1 and comm.rank == 0:
        comm.send((x, x), 1, 0)
    elif comm.rank == 1:
        assert len(comm.recv(0, 0)) == 2


def test_objects(comm):
    last = comm.size - 1
    ranks = list(range(comm.size))
    assert comm.bcast_obj(comm.rank, root=last) == last
    assert comm.bcast_obj(None) is None
    assert comm.gather_obj(comm.rank, last) == (ranks if comm.rank == last else None)
    assert comm.allgather_obj(comm.rank) == ranks
    assert comm.allreduce_obj([comm.rank]) == ranks
    assert comm.scatter_obj(ranks if comm.rank == last else None, last) == comm.rank
    comm.send_obj('x', comm.rank)
    assert comm.recv_obj(comm.rank) == 'x'


def test_models(comm, name):
    if name in ('pure_nccl', 'non_cuda_aware'):
        pytest.skip('takes models on a GPU only')
    model = L.Linear(3, 2)
    model.W.array[...] = comm.rank
    comm.bcast_data(model)
    assert (model.W.array == 0).all()
    model.cleargrads()
    model.W.grad = np.full((2, 3), 2 * comm.rank - comm.size + 1, np.float32)
    if name != 'dummy':
        comm.multi_node_mean_grad(model, zero_fill=True)
        assert (model.W.grad == 0).all()
        assert (model.b.grad == 0).all()


def test_groups(comm, check_usable):
    comm.barrier()
    part = comm.split(comm.rank % 2, 0)
    check_usable(part)
    check_usable(comm)


@pytest.mark.parametrize('call, kind', [
    (lambda comm: comm.allreduce(None), TypeError),
    (lambda comm: comm.allgather(1.5), TypeError),
    (lambda comm: comm.bcast_obj(0, root=-1), ValueError),
    (lambda comm: comm.refuse('operation', LookupError('why')), LookupError),
])
def test_an_error_stays_on_its_rank(comm, check_usable, call, kind):
    with pytest.raises(kind) as caught:
        call(comm)
    assert 'rank' not in str(caught.value).replace('a rank from', '')
    check_usable(comm)


def test_setting_must_be_equal_on_all_ranks(monkeypatch, same_error):
    for odd in range(WORLD.size if WORLD.size > 1 else 0):
        monkeypatch.setenv('CHAINERMN_AGREE', '0' if WORLD.rank == odd else '1')
        error = same_error(create_communicator, 'naive', table=False)
        assert isinstance(error, ValueError)
        assert str(error) == \
            f'CHAINERMN_AGREE is 0 only on rank {odd}; set it to the same value on all ranks'


@pytest.mark.parametrize('value', [None, '1', ''])
def test_enabled_by_other_values(monkeypatch, same_error, value):
    if value is None:
        monkeypatch.delenv('CHAINERMN_AGREE', raising=False)
    else:
        monkeypatch.setenv('CHAINERMN_AGREE', value)
    comm = create_communicator('naive')
    if comm.size > 1:
        error = same_error(lambda: comm.gather(None) if comm.rank == 0 else comm.barrier())
        assert type(error) is TypeError
    comm.finalize()
