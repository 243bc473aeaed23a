"""Bytes that an update with sharded states sends, in units of ``(n - 1) / n`` of the parameters.

Each rank is a node. Averaging gradients for all ranks takes two units, for their owners one, and
copying the updated parameters one.
"""

import chainer
import chainer.links as L
import numpy as np
import pytest
from chainer import optimizer_hooks, optimizers
from mpi4py import MPI

import chainermn
from chainermn._transport import topology

pytestmark = [pytest.mark.every_size, pytest.mark.mpi(min_size=2)]

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size


class Counting:
    """Counts the bytes that a rank sends; of collectives of MPI, the least possible."""

    def __init__(self, mpi_comm):
        self.mpi_comm = mpi_comm
        self.sent = 0

    def __getattr__(self, name):
        return getattr(self.mpi_comm, name)

    def Isend(self, data, *args):  # noqa: N802
        self.sent += data.nbytes
        return self.mpi_comm.Isend(data, *args)

    def Allreduce(self, sent, received, *args):  # noqa: N802
        self.sent += 2 * received.nbytes * (SIZE - 1) / SIZE
        self.mpi_comm.Allreduce(sent, received, *args)

    def Reduce_scatter(self, sent, received, *args):  # noqa: N802
        self.sent += sent.nbytes - received.nbytes
        self.mpi_comm.Reduce_scatter(sent, received, *args)


@pytest.fixture(params=['naive', 'flat'])
def counted(request, monkeypatch):
    """A communicator, and its counters."""
    monkeypatch.setattr(topology, 'here', lambda: topology.Place(f'node {RANK}', 1 << RANK))
    comm = chainermn.create_communicator(request.param)
    transport = comm._context.transport
    transport.connect()
    counters = [Counting(transport.mpi_comm), Counting(transport.group.tagged_comm)]
    transport.mpi_comm, transport.group.tagged_comm = counters
    if request.param == 'flat':
        counters.append(Counting(transport._shared._planner._inter))
        transport._shared._planner._inter = counters[-1]
    yield comm, counters
    comm.finalize()


def own(optimizer):
    """A hook of the program."""


class OwnClipping(optimizer_hooks.GradientClipping):
    def __call__(self, optimizer):
        super().__call__(optimizer)


@pytest.mark.parametrize('units, hooks', [
    (2, []),
    (2, [optimizer_hooks.GradientClipping(.1), optimizer_hooks.WeightDecay(.1)]),
    (2, [optimizer_hooks.GradientLARS()]),
    (3, [optimizer_hooks.GradientClipping(.1), own]),
    (3, [OwnClipping(.1)]),
    (3, [optimizer_hooks.GradientNoise(.1)]),
], ids=['none', 'clipping and decay', 'LARS', 'own', 'subclass', 'noise'])
@pytest.mark.sample(6)
@pytest.mark.parametrize('is_scaled', [False, True], ids=['plain', 'loss scale'])
def test_units_of_an_update(counted, units, hooks, is_scaled):
    comm, counters = counted
    model = chainer.Sequential(L.Linear(10, 400), L.Linear(400, 600), L.Linear(600, 7))
    optimizer = chainermn.create_multi_node_optimizer(
        optimizers.Adam(), comm, shard_states=True).setup(model)
    if is_scaled:
        optimizer.loss_scaling()
    for n, hook in enumerate(hooks):
        optimizer.add_hook(hook, f'hook {n}')
    np.random.seed(0)  # the noise is equal on all ranks
    for step in range(2):  # the first one broadcasts
        for counter in counters:
            counter.sent = 0
        for param in model.params():
            param.grad = np.full_like(param.array, RANK + step)
        optimizer.update()
    sent = comm.allreduce_obj(sum(counter.sent for counter in counters)) / SIZE
    unit = (SIZE - 1) / SIZE * sum(param.array.nbytes for param in model.params())
    assert sent / unit == pytest.approx(units, abs=.01)
