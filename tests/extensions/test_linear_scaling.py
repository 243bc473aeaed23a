"""The learning rate of each update is that of Goyal et al. (2017), the same on all ranks."""
import functools

import chainer
import numpy as np
import pytest
from each_case import each_case
from shared_fixtures import communicators
from small_trainer import make_trainer

from chainermn.extensions import LinearScaling
from chainermn.iterators import MultiNodeOrderSampler, create_multi_node_iterator

pytestmark = pytest.mark.usefixtures('own_folder')

comm = communicators('naive')


class Recorder(chainer.optimizers.MomentumSGD):
    """Records the learning rate of each step."""

    def __init__(self, lr):
        super().__init__(lr)
        self.rates = []

    def update(self, *args, **kwargs):
        self.rates.append(self.lr)
        super().update(*args, **kwargs)


def rates(comm, extension, iterations=30, **options):
    """The learning rates after 1, 2, ... iterations, on all ranks the same.

    The first update only broadcasts the parameters.
    """
    optimizer = Recorder(0.1)
    trainer = make_trainer(comm, 'out', (iterations, 'iteration'), optimizer,
                           **{'length': 10, **options})
    trainer.extend(extension)
    trainer.run()
    assert comm.allgather_obj(optimizer.rates) == [optimizer.rates] * comm.size
    return optimizer.rates


@each_case('arguments, n_accumulations, factor, warmup', [
    ((1, 4), 1, 2, 20), ((), 1, 1, 25), ((1, 0), 1, 2, 0), ((1, 1), 3, 6, 5)])
def test_it_grows_linearly_to_k_times_the_rate(comm, arguments, n_accumulations, factor, warmup):
    """By default, the base is one rank, and the warm-up takes five epochs."""
    found = rates(comm, LinearScaling(comm, *arguments), n_accumulations=n_accumulations)
    iterations = n_accumulations * np.arange(1, len(found) + 1)
    done = np.minimum(iterations / warmup, 1) if warmup else 1
    np.testing.assert_allclose(found, np.full(
        len(found), 0.1 * (1 + (factor * comm.size - 1) * done)))
    assert len(found) == 29 // n_accumulations


def test_shards_and_batches_may_differ(comm):
    """A rank with more examples also takes more of them, or fewer."""
    n, size = comm.rank + 1, comm.size
    found = rates(comm, LinearScaling(comm, 1, 2), batch_size=n, length=7 * n)
    k = size * (size + 1) / 2  # sum of the batch sizes
    np.testing.assert_allclose(
        found, [0.1 * (1 + (k - 1) * min(i / 14, 1)) for i in range(1, 30)])
    rates(comm, LinearScaling(comm, 1, 2), length=10 + 3 * comm.rank)  # compares the ranks


def test_decay(comm):
    found = rates(comm, LinearScaling(
        comm, base_batch_size=2, warmup_epochs=1, decay=lambda epoch: 0.1 ** (epoch // 2)))
    full = 0.1 * comm.size
    np.testing.assert_allclose(found[4:9], full)
    np.testing.assert_allclose(found[9:19], full * 0.1)
    np.testing.assert_allclose(found[19:], full * 0.01)


@pytest.mark.filterwarnings('ignore:.* multi-threaded, use of fork:DeprecationWarning')
@pytest.mark.parametrize('kind, options', [
    ('SerialIterator', {}), ('MultithreadIterator', {'n_threads': 1}),
    ('MultiprocessIterator', {'n_processes': 1})])
def test_an_order_sampler_divides_the_dataset(comm, kind, options):
    """The schedule of ``docs/large_batches.md``, with 10 updates per epoch on any number of ranks.

    On 2 ranks: 0.22, 0.34, 0.4, 0.04, 0.04.
    """
    n, found = 20 * comm.size, {}
    trainer = make_trainer(
        comm, 'out', (10, 'epoch'), chainer.optimizers.MomentumSGD(0.1), length=n,
        iterator=functools.partial(getattr(chainer.iterators, kind),
                                   order_sampler=MultiNodeOrderSampler(n, comm), **options))
    trainer.extend(LinearScaling(comm, 1, decay=lambda epoch: 0.1 if epoch >= 8 else 1))

    def read(trainer):
        found[trainer.updater.iteration] = trainer.updater.get_optimizer('main').lr

    trainer.extend(read, trigger=(2, 'epoch'))
    trainer.run()
    k = 2 * comm.size
    assert found == pytest.approx({
        10 * epoch: 0.1 * (1 + (k - 1) * min(epoch / 5, 1)) * (0.1 if epoch >= 8 else 1)
        for epoch in (2, 4, 6, 8, 10)})


@pytest.mark.mpi(min_size=2)
def test_a_multi_node_iterator_uses_the_order_of_one_rank(comm):
    """The length of an epoch is half of the last rank's dataset, on all ranks."""
    def iterator(data, batch_size):
        options = {'order_sampler': lambda order, position: np.arange(10)} if is_root else {}
        return create_multi_node_iterator(
            chainer.iterators.SerialIterator(data if is_root else data[:7], batch_size, **options),
            comm, comm.size - 1)

    is_root = comm.rank == comm.size - 1
    alone = comm.split(comm.rank, 0)
    found = rates(comm, LinearScaling(alone, 1, 2), length=20, iterator=iterator)
    np.testing.assert_allclose(found, [0.1 * (1 + min(i / 10, 1)) for i in range(1, 30)])
    alone.finalize()


def test_another_attribute(comm):
    trainer = make_trainer(comm, 'out', (6, 'iteration'), chainer.optimizers.Adam(alpha=0.01))
    trainer.extend(LinearScaling(comm, 1, 1, attr='alpha'))
    trainer.run()
    assert trainer.updater.get_optimizer('main').alpha == pytest.approx(0.02 * comm.size)


def test_no_such_attribute(comm, same_error):
    trainer = make_trainer(comm, 'out', (6, 'iteration'), chainer.optimizers.Adam())
    trainer.extend(LinearScaling(comm))
    error = same_error(trainer.run, table=False)
    assert type(error) is ValueError
    assert "the optimizer has no hyperparameter 'lr'; set attr to one of 'adabound'" in str(error)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize('odd', ['learning rate 0.2', 'base_batch_size=3', 'warmup_epochs=1'])
def test_different_arguments(comm, same_error, odd):
    is_odd = comm.rank == comm.size - 1
    rate = 0.2 if is_odd and 'rate' in odd else 0.1
    trainer = make_trainer(comm, 'out', (6, 'iteration'), chainer.optimizers.SGD(rate))
    trainer.extend(LinearScaling(comm, 3 if is_odd and 'base' in odd else 2,
                                 1 if is_odd and 'epochs' in odd else 2))
    error = same_error(trainer.run)
    assert type(error) is ValueError and odd in str(error)


def test_rank_0_logs_the_rates(comm, caplog):
    with caplog.at_level('INFO', 'chainermn'):
        rates(comm, LinearScaling(comm, base_batch_size=1, warmup_epochs=2.03),
              iterations=1)
    messages = [each.getMessage() for each in caplog.records if each.name == 'chainermn']
    assert messages == ['LinearScaling: the learning rate grows from 0.1 to '
                        f'{0.2 * comm.size:g} in 10 iterations'] * (comm.rank == 0)
