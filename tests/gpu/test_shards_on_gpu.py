"""Sharded optimizer states: NCCL's reduce-scatter of gradients and all-gather of parameters."""

import itertools

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from each_case import each_case
from mpi4py import MPI

import chainermn
from chainermn._transport.nccl.connection import NcclGroup
from chainermn.communicators.transport import ArrayList

pytestmark = pytest.mark.gpu

SIZE = MPI.COMM_WORLD.size
RANK = MPI.COMM_WORLD.rank
SHAPES = [(3,), (), (100, 7), (0, 2), (1,), (64, 3), (5000,), (2, 2, 2)]
OWNERS = {
    'nearly equal': [n * SIZE // len(SHAPES) for n in range(len(SHAPES))],
    'one rank has all': [SIZE - 1] * len(SHAPES),
    'the first has none': sorted(max(n % SIZE, min(1, SIZE - 1)) for n in range(len(SHAPES))),
}


@pytest.fixture
def calls(monkeypatch):
    """The collectives of NCCL that were called."""
    found = []

    def note(name):
        original = getattr(NcclGroup, name)

        def method(self, *args, **kwargs):
            found.append(name)
            return original(self, *args, **kwargs)
        monkeypatch.setattr(NcclGroup, name, method)

    for name in 'all_reduce', 'reduce_scatter', 'all_gather', 'bcast':
        note(name)
    return found


def arrays_of(rank, dtypes):
    import cupy

    return [cupy.asarray((np.arange(np.prod(shape, dtype=int)) % 11 + rank + n)
                         .reshape(shape).astype(dtype))
            for n, (shape, dtype) in enumerate(zip(SHAPES, itertools.cycle(dtypes)))]


@each_case('owners, dtypes, grad_dtype, batched', itertools.product(
    OWNERS, [['f4'], ['f2'], ['f2', 'f4', 'f8']], [None, 'float16', 'float64'], [True, False]))
def test_mean_for_owners_and_copies(owners, dtypes, grad_dtype, batched):
    comm = chainermn.create_communicator(
        'pure_nccl', allreduce_grad_dtype=grad_dtype, batched_copy=batched)
    transport, owners = comm._context.transport, OWNERS[owners]
    arrays = arrays_of(RANK, dtypes)
    expected = [np.mean([x.get().astype('d') for x in each], 0)
                for each in zip(*(arrays_of(rank, dtypes) for rank in range(SIZE)), strict=True)]
    transport.mean_for_owners(ArrayList.of(arrays), tuple(owners))
    for x, mean, owner in zip(arrays, expected, owners, strict=True):
        if owner == RANK:
            np.testing.assert_allclose(x.get(), mean, 2e-3)
        else:
            x[...] = -1
    transport.copy_arrays(ArrayList.of(arrays), tuple(owners))
    for x, mean in zip(arrays, expected, strict=True):
        np.testing.assert_allclose(x.get(), mean, 2e-3)
    for x in arrays:
        assert len({*comm.allgather_obj(x.get().tobytes())}) == 1
    comm.finalize()


def test_copies_of_integers_and_of_views():
    import cupy

    comm = chainermn.create_communicator('pure_nccl')
    whole = cupy.full((2, SIZE * 4), RANK, 'i8')
    arrays = [whole[:, 4 * rank:4 * rank + 4] for rank in range(SIZE)]
    arrays += [cupy.full(3, RANK, 'i1') for _ in range(SIZE)]
    comm._context.transport.copy_arrays(ArrayList.of(arrays), (*range(SIZE),) * 2)
    for owner, x in zip([*range(SIZE)] * 2, arrays, strict=True):
        assert (x == owner).all()
    comm.finalize()


class Network(chainer.Chain):
    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.l1 = L.Linear(6, 40, nobias=True)
            self.bn = L.BatchNormalization(40)
            self.l2 = L.Linear(40, 3)

    def forward(self, x, t):
        return F.softmax_cross_entropy(self.l2(F.relu(self.bn(self.l1(x)))), t)


def trained(comm, device, shard_states, name, hooks):
    np.random.seed(0)
    model = Network()
    model.to_device(device)
    optimizer = chainermn.create_multi_node_optimizer(
        getattr(chainer.optimizers, name)(), comm, shard_states=shard_states).setup(model)
    for hook in hooks:
        optimizer.add_hook(hook())
    random = np.random.RandomState(RANK)
    for _ in range(4):
        x, t = (chainer.get_device(device).send(a) for a in (
            random.rand(8, 6).astype('f'), random.randint(0, 3, 8).astype('i')))
        optimizer.update(model, x, t)
    return {path: chainer.get_device('@numpy').send(param.array)
            for path, param in sorted(model.namedparams())}


HOOKS = {'none': [], 'clipping and decay': [
    lambda: chainer.optimizer_hooks.GradientClipping(.1),
    lambda: chainer.optimizer_hooks.WeightDecay(.01)]}


@pytest.mark.parametrize('hooks', HOOKS)
@pytest.mark.parametrize('name', ['MomentumSGD', 'AdaGrad'])
def test_training_equals_that_with_complete_states_on_the_host(device_id, calls, name, hooks):
    comm = chainermn.create_communicator('pure_nccl')
    other = chainermn.create_communicator('flat')
    params = trained(comm, f'@cupy:{device_id}', True, name, HOOKS[hooks])
    if SIZE > 1:
        assert 'reduce_scatter' in calls and 'all_gather' in calls
        assert calls.count('bcast') == 1  # of the model, at first
    expected = trained(other, '@numpy', False, name, HOOKS[hooks])
    for path, value in expected.items():
        np.testing.assert_allclose(params[path], value, 2e-4, 2e-5, err_msg=path)
    for value in params.values():
        assert len({*comm.allgather_obj(value.tobytes())}) == 1
    comm.finalize()
    other.finalize()
