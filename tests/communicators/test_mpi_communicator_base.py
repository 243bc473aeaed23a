"""User-defined communicators: with their own mean, or with a transport class."""

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from mpi4py import MPI

import chainermn
from chainermn.communicators.mpi_communicator_base import MpiCommunicatorBase
from chainermn.communicators.transport import MpiTransport


def average(comm, model):
    for _, param in sorted(model.namedparams()):
        if param.grad is not None:
            comm.mpi_comm.Allreduce(MPI.IN_PLACE, param.grad)
            param.grad /= comm.size


class Own(MpiCommunicatorBase):
    def multi_node_mean_grad(self, model, zero_fill=False):
        if zero_fill:
            for param in model.params(include_uninit=False):
                if param.grad is None:
                    param.grad = np.zeros_like(param.array)
        average(self, model)


class WithoutZeroFill(MpiCommunicatorBase):
    def multi_node_mean_grad(self, model):
        average(self, model)


class WithState(Own):
    def __init__(self, mpi_comm):
        self.before = mpi_comm.rank
        super().__init__(mpi_comm)
        self.count = 0

    def multi_node_mean_grad(self, model, zero_fill=False):
        self.count += 1
        super().multi_node_mean_grad(model, zero_fill)


class RootTransport(MpiTransport):
    """Averages on rank 0, which broadcasts the means."""

    def mean(self, arrays, results=None):
        for x, y in zip(arrays, arrays if results is None else results, strict=True):
            total = self.mpi_comm.reduce(x, root=0)
            y[...] = self.mpi_comm.bcast(total / self.size if self.rank == 0 else None)


class WithTransport(MpiCommunicatorBase):
    transport_class = RootTransport


@pytest.fixture(params=[Own, WithoutZeroFill, WithState, WithTransport])
def own(request):
    comm = request.param(MPI.COMM_WORLD)
    yield comm
    comm.finalize()


def test_trains(own):
    """Where a rank does not use a parameter, its gradient counts as zero."""
    model = chainer.Link()
    with model.init_scope():
        model.a, model.b, model.unused = (chainer.Parameter(np.zeros(2, 'f')) for _ in range(3))
    optimizer = chainermn.create_multi_node_optimizer(
        chainer.optimizers.SGD(1.), own).setup(model)

    def loss():
        y = F.sum(model.a * (own.rank + 1))
        return y + F.sum(model.b * own.size) if own.rank == 0 else y

    for _ in range(3):  # the first one broadcasts
        optimizer.update(loss)
    np.testing.assert_allclose(model.a.array, -(own.size + 1))
    np.testing.assert_allclose(model.b.array, -2)
    np.testing.assert_array_equal(model.unused.array, 0)
    if isinstance(own, WithState):
        assert (own.before, own.count) == (own.rank, 2)


def test_groups_have_the_same_class(own, check_usable):
    own.set_config('batched_copy', True)
    group = own.new_group([own.size - 1])
    assert (group is not None) == (own.rank == own.size - 1)
    part = own.split(own.rank % 2, own.rank)
    assert type(part) is type(own) and part.get_config('batched_copy') is True
    check_usable(part)
    model = L.Linear(2, 2)
    part.bcast_data(model)
    for param in model.params():
        param.grad = np.full_like(param.array, own.rank)
    part.multi_node_mean_grad(model)
    mean = np.mean([r for r in range(own.size) if r % 2 == own.rank % 2])
    np.testing.assert_allclose(model.W.grad, mean)
    part.finalize()
    if group is not None:
        group.finalize()


@pytest.mark.parametrize('option', [
    {'n_accumulations': 2}, {'overlap': 'always', 'compression': '2bit', 'bucket_mb': 1e-5}],
    ids=repr)
def test_custom_transport_has_all_features(option):
    """Trains the same model as naive; also in a group."""
    comm, naive = WithTransport(MPI.COMM_WORLD), chainermn.create_communicator('naive')
    parts = comm.split(comm.rank % 2, 0), naive.split(naive.rank % 2, 0)
    for own, usual in ((comm, naive), parts):
        models = []
        for each in (own, usual):
            model = L.Linear(3, 2, initialW=np.ones((2, 3), 'f'))
            optimizer = chainermn.create_multi_node_optimizer(
                chainer.optimizers.SGD(.5), each, **option).setup(model)
            for n in range(5):
                x = np.random.RandomState(10 * each.rank + n).rand(2, 3).astype('f')
                optimizer.update(lambda x, model=model: F.sum(model(x) ** 2), x)
            models.append(model)
        for array, expected in zip(*[[p.array for p in m.params()] for m in models], strict=True):
            np.testing.assert_allclose(array, expected, 1e-5)
        own.finalize()


def test_failing_transport_raises_locally():
    class Fails(MpiTransport):
        def mean(self, arrays, results=None):
            raise LookupError('no route')

    class Communicator(MpiCommunicatorBase):
        transport_class = Fails

    comm = Communicator(MPI.COMM_WORLD)
    model = L.Linear(1, 1)
    model.cleargrads()
    model.W.grad = np.ones((1, 1), 'f')
    with pytest.raises(LookupError, match='no route'):
        comm.multi_node_mean_grad(model)
    comm.finalize()


# --- as subclasses for ChainerMN 7 do ---------------------------------------------------------

class WithMpiComm(MpiCommunicatorBase):
    """Assigns what was a plain attribute in ChainerMN 7."""

    def __init__(self, mpi_comm):
        super().__init__(mpi_comm)
        self.mpi_comm = mpi_comm


def test_assigning_mpi_comm():
    comm = WithMpiComm(MPI.COMM_WORLD)
    assert comm.mpi_comm == MPI.COMM_WORLD and comm.allreduce_obj(1) == comm.size
    with pytest.raises(AttributeError, match=r'cannot be replaced. Call split\(\)'):
        comm.mpi_comm = MPI.COMM_SELF.Dup()
