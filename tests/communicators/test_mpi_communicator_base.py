"""Communicators that users define: with their own mean, or by naming a transport."""

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from chainer.training import extensions
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


class Model(chainer.Chain):
    """A model with one layer used on rank 0 only, and one unused layer."""

    def __init__(self, rank):
        super().__init__()
        self.rank = rank
        with self.init_scope():
            self.first = L.Linear(None, 4)
            self.sometimes = L.Linear(4, 4)
            self.never = L.Linear(4, 4)
            self.last = L.Linear(4, 2)

    def forward(self, x):
        h = F.tanh(self.first(x))
        return self.last(self.sometimes(h) if self.rank == 0 else h)


def shard(rank, n=8):
    rng = np.random.RandomState(rank)
    return chainer.datasets.TupleDataset(
        rng.normal(0, 1, (n, 3)).astype(np.float32), rng.randint(0, 2, n).astype(np.int32))


def train(comm, folder, stop=6, load=False):
    """Return the trainer, after a run with the usual extensions."""
    np.random.seed(comm.rank)
    model = L.Classifier(Model(comm.rank))
    optimizer = chainermn.create_multi_node_optimizer(
        chainer.optimizers.MomentumSGD(0.1), comm).setup(model)
    iterator = chainer.iterators.SerialIterator(shard(comm.rank), 2, shuffle=False)
    trainer = chainer.training.Trainer(
        chainer.training.StandardUpdater(iterator, optimizer), (stop, 'iteration'), out=folder)
    test = chainer.iterators.SerialIterator(shard(comm.rank + 9), 2, repeat=False, shuffle=False)
    trainer.extend(chainermn.create_multi_node_evaluator(
        extensions.Evaluator(test, model), comm), trigger=(2, 'iteration'))
    trainer.extend(chainermn.extensions.multi_node_snapshot(
        comm, extensions.snapshot(filename='snapshot_{.updater.iteration}'), []),
        trigger=(3, 'iteration'))
    checkpointer = chainermn.create_multi_node_checkpointer('run', comm, path=folder)
    checkpointer.finalize = lambda: None  # the files stay
    if load:
        checkpointer.maybe_load(trainer, optimizer)
    trainer.extend(checkpointer, trigger=(2, 'iteration'))
    trainer.run()
    return trainer


def weights(trainer):
    model = trainer.updater.get_optimizer('main').target
    return {path: param.array for path, param in sorted(model.namedparams())}


def shared_folder(comm, tmp_path):
    return comm.bcast_obj(str(tmp_path))


def test_trains_like_naive(own, tmp_path):
    naive = chainermn.create_communicator('naive')
    trained, expected = (train(comm, shared_folder(comm, tmp_path / name))
                         for comm, name in [(own, 'own'), (naive, 'naive')])
    for path, array in weights(expected).items():
        np.testing.assert_allclose(weights(trained)[path], array, rtol=1e-5, err_msg=path)
    assert trained.updater.get_optimizer('main').t == 5
    assert trained.observation.keys() == expected.observation.keys()
    for key in ('validation/main/loss', 'validation/main/accuracy'):
        assert trained.observation[key] == pytest.approx(expected.observation[key], rel=1e-5)
    own.barrier()
    resumed = train(own, shared_folder(own, tmp_path / 'own'), load=True)  # and does nothing
    for path, array in weights(trained).items():
        np.testing.assert_array_equal(weights(resumed)[path], array)
    if isinstance(own, WithState):
        assert (own.before, own.count) == (own.rank, 5)
    naive.finalize()


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


def test_overlap_does_not_bypass_custom_mean(own):
    model = L.Linear(2, 2)
    optimizer = chainermn.create_multi_node_optimizer(
        chainer.optimizers.SGD(), own, overlap=True).setup(model)
    if own.size == 1 or isinstance(own, WithTransport):  # nothing to exchange, or by the transport
        return
    with pytest.raises(ValueError, match='averages gradients in its own multi_node_mean_grad') as e:
        optimizer.update(lambda x: F.sum(model(x)), np.ones((1, 2), np.float32))
    assert own.allgather_obj(str(e.value)) == [str(e.value)] * own.size


@pytest.mark.parametrize('option', [
    {}, {'overlap': 'always'}, {'compression': 'fp16'}, {'n_accumulations': 2},
    {'overlap': 'always', 'compression': '2bit', 'bucket_mb': 1e-5}], ids=repr)
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


class InHalfPrecision(MpiCommunicatorBase):
    """Sends arrays in float16."""

    def send(self, data, dest, tag=0):
        super().send(data.astype(np.float16), dest, tag)

    def recv(self, source, tag=0):
        return super().recv(source, tag).astype(np.float32)


@pytest.mark.mpi(min_size=2)
def test_functions_send_as_the_subclass_does():
    comm = InHalfPrecision(MPI.COMM_WORLD)
    x = chainer.Variable(np.array([1.0001], 'f'))
    if comm.rank == 0:
        chainermn.functions.send(x, comm, 1).backward()
        np.testing.assert_array_equal(x.grad, [2])
    elif comm.rank == 1:
        y = chainermn.functions.recv(comm, 0)
        np.testing.assert_array_equal(y.array, [1])  # 1.0001 in float16
        F.sum(2 * y).backward()
