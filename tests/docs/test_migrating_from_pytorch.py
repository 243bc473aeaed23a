"""Remarks of docs/migrating_pytorch.md, compared with DistributedDataParallel on the same ranks.

They need PyTorch: ``tox -e torch`` runs them.
"""

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest

import chainermn

torch = pytest.importorskip('torch')
dist = pytest.importorskip('torch.distributed')
pytestmark = pytest.mark.mpi(min_size=2)

W = np.random.RandomState(1).randn(2, 3)
STEPS = range(1, 5)


@pytest.fixture(scope='module')
def comm(tmp_path_factory):
    comm = chainermn.create_communicator('naive')
    store = comm.bcast_obj(str(tmp_path_factory.mktemp('gloo') / 'store'))
    dist.init_process_group(
        'gloo', init_method=f'file://{store}', rank=comm.rank, world_size=comm.size)
    yield comm
    dist.destroy_process_group()
    comm.finalize()


def batch(comm, step):
    """The batch of this rank."""
    random = np.random.RandomState(100 * step + comm.rank)
    return random.randn(4, 3), random.randn(4, 2)


class Torch:
    """A model, its replicas, and an optimizer."""

    def __init__(self, comm, **options):
        self.comm = comm
        linear = torch.nn.Linear(3, 2, bias=False, dtype=torch.float64)
        with torch.no_grad():
            linear.weight.copy_(torch.tensor(W))
        self.model = torch.nn.parallel.DistributedDataParallel(linear)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=.1, **options)

    def backward(self, step):
        x, y = map(torch.tensor, batch(self.comm, step))
        torch.nn.functional.mse_loss(self.model(x), y).backward()

    def weight(self):
        return self.model.module.weight.detach().numpy()


class Chainer:
    """The same, after the first update, which does not change the parameters."""

    def __init__(self, comm, rule=chainer.optimizers.SGD, **options):
        self.comm = comm
        self.model = L.Linear(None, 2, nobias=True)
        self.model.W.array = W + comm.rank  # the first update copies that of rank 0
        self.optimizer = chainermn.create_multi_node_optimizer(rule(.1), comm, **options)
        self.optimizer.setup(self.model)
        self.update(0)

    def update(self, step):
        x, y = batch(self.comm, step)
        self.optimizer.update(lambda: F.mean_squared_error(self.model(x), y))

    def weight(self):
        return self.model.W.array


def test_no_sync_adds_what_n_accumulations_averages(comm):
    theirs, ours = Torch(comm), Chainer(comm, n_accumulations=4)
    with theirs.model.no_sync():
        for step in STEPS[:-1]:
            theirs.backward(step)
    theirs.backward(STEPS[-1])
    for step in STEPS:
        ours.update(step)
    for param in theirs.model.parameters():
        param.grad /= len(STEPS)
    theirs.optimizer.step()
    np.testing.assert_allclose(ours.weight(), theirs.weight(), rtol=1e-6)


def test_clipping_acts_on_averaged_gradients(comm):
    theirs, ours = Torch(comm), Chainer(comm)
    ours.optimizer.add_hook(chainer.optimizer_hooks.GradientClipping(.1))
    theirs.backward(1)
    assert torch.nn.utils.clip_grad_norm_(theirs.model.parameters(), .1) > .2
    theirs.optimizer.step()
    ours.update(1)
    np.testing.assert_allclose(ours.weight(), theirs.weight(), rtol=1e-5)


def test_momentum_with_a_schedule(comm):
    theirs = Torch(comm, momentum=.9, weight_decay=.01)
    schedule = torch.optim.lr_scheduler.ExponentialLR(theirs.optimizer, .5)
    ours = Chainer(comm, chainer.optimizers.CorrectedMomentumSGD)
    other = Chainer(comm, chainer.optimizers.MomentumSGD)
    for each in ours, other:
        each.optimizer.add_hook(chainer.optimizer_hooks.WeightDecay(.01))
    for step in STEPS:
        theirs.optimizer.zero_grad()
        theirs.backward(step)
        theirs.optimizer.step()
        schedule.step()
        for each in ours, other:
            each.update(step)
            each.optimizer.lr *= .5
    np.testing.assert_allclose(ours.weight(), theirs.weight(), rtol=1e-6)
    assert not np.allclose(other.weight(), theirs.weight(), rtol=1e-3)


def test_join(comm):
    theirs, ours = Torch(comm), Chainer(comm)
    with theirs.model.join():
        for step in range(1, 3 + comm.rank):
            theirs.optimizer.zero_grad()
            theirs.backward(step)
            theirs.optimizer.step()
    with chainermn.join(ours.optimizer):
        for step in range(1, 3 + comm.rank):
            ours.update(step)
    np.testing.assert_allclose(ours.weight(), theirs.weight(), rtol=1e-6)


@pytest.mark.filterwarnings('ignore:torch.distributed.nn.functional:FutureWarning')
def test_the_gradient_of_allreduce(comm):
    from torch.distributed.nn import functional

    theirs = torch.full((3,), 1. + comm.rank, requires_grad=True)
    functional.all_reduce(theirs).sum().backward()
    ours = chainer.Variable(np.full(3, 1 + comm.rank, 'f'))
    F.sum(chainermn.functions.allreduce(comm, ours)).backward()
    np.testing.assert_array_equal(ours.grad, theirs.grad.numpy())


def test_shards_are_as_long_as_those_of_a_sampler(comm):
    theirs = torch.utils.data.DistributedSampler(range(7), comm.size, comm.rank, shuffle=False)
    data = list(range(7)) if comm.rank == 0 else None
    assert len(chainermn.scatter_dataset(data, comm)) == len(theirs)


def test_the_first_update_copies_neither_buffers_nor_states(comm):
    """Unlike DistributedDataParallel, and Horovod's broadcast_optimizer_state."""
    theirs = torch.nn.BatchNorm1d(3)
    theirs.running_mean += comm.rank
    torch.nn.parallel.DistributedDataParallel(theirs)
    assert (theirs.running_mean == 0).all()

    ours = L.BatchNormalization(3)
    optimizer = chainer.optimizers.Adam().setup(ours)
    x = np.ones((2, 3), 'f')
    for _ in range(comm.rank):
        optimizer.update(lambda: F.sum(ours(x)))
    ours.avg_mean[...] = comm.rank
    # Otherwise it is an error that t differs.
    optimizer = chainermn.create_multi_node_optimizer(optimizer, comm, compare_settings=False)
    with chainer.using_config('train', False):
        optimizer.update(lambda: F.sum(ours(x)))
    assert (ours.avg_mean == comm.rank).all() and optimizer.t == comm.rank
    chainermn.extensions.AllreducePersistent(ours, comm)(None)
    np.testing.assert_allclose(ours.avg_mean, (comm.size - 1) / 2)
