"""Extensions that are added after the trainer was loaded load their states when they are added."""
import contextlib
import warnings

import chainer
import numpy as np
import pytest
from chainer.training import extensions
from shared_fixtures import raises_on_all

import chainermn
from chainermn.extensions import multi_node_snapshot


def make_trainer(comm, folder, stop):
    np.random.seed(comm.rank)
    model = chainer.links.Classifier(chainer.links.Linear(3, 2))
    optimizer = chainermn.create_multi_node_optimizer(
        chainer.optimizers.MomentumSGD(.1), comm).setup(model)
    x = np.random.RandomState(0).normal(0, 1, (24, 3)).astype('f')
    data = chainermn.scatter_dataset(
        chainer.datasets.TupleDataset(x, (x.sum(axis=1) > 0).astype('i')), comm)
    iterator = chainer.iterators.SerialIterator(data, 2)
    updater = chainer.training.StandardUpdater(iterator, optimizer)
    return chainer.training.Trainer(updater, (stop, 'iteration'), out=folder), optimizer


def test_another_number_of_ranks(comm, folder):
    """The state is that of rank 0."""
    group = comm.split(int(comm.rank > 0), comm.rank)
    if comm.rank == 0:
        trainer, _ = make_trainer(group, folder, 4)
        trainer.extend(extensions.LogReport(trigger=(2, 'iteration'), log_name=None))
        saver = chainermn.create_multi_node_checkpointer('run', group)
        saver.finalize = lambda: (saver._saver.flush(), saver._saver.lock.release())
        trainer.extend(saver, trigger=(4, 'iteration'))
        trainer.run()
    comm.barrier()
    trainer, optimizer = make_trainer(comm, folder, 4)
    with (pytest.warns(RuntimeWarning, match='was saved by 1 ranks')
          if comm.rank == 0 < comm.size - 1 else contextlib.nullcontext()):
        assert chainermn.create_multi_node_checkpointer(
            'run', comm, path=folder).maybe_load(trainer, optimizer) == 4
    # The file lacks the second one, whose trigger counts from now on.
    for name, interval, saved in ('LogReport', 2, [2, 4]), ('new', 3, []):
        log = extensions.LogReport(trigger=(interval, 'iteration'), log_name=None)
        trainer.extend(log, name=name)
        assert [entry['iteration'] for entry in log.log] == saved
        assert not log._trigger(trainer)


@pytest.mark.parametrize('how, n_saved', [('checkpointer', 1), ('snapshot', 'all')])
def test_an_extension_that_the_checkpoint_lacks(comm, folder, how, n_saved):
    """It starts from scratch, and rank 0 warns; also on another number of ranks."""
    def add_saver(group, trainer):
        if how == 'snapshot':
            saver = multi_node_snapshot(group, extensions.snapshot(autoload=True))
        else:
            saver = chainermn.create_multi_node_checkpointer('run', group)
            saver.finalize = lambda: (saver._saver.flush(), saver._saver.lock.release())
        trainer.extend(saver, trigger=(2, 'iteration'))
        return saver

    is_resized = n_saved == 1 < comm.size
    group = comm.split(int(comm.rank > 0), comm.rank) if n_saved == 1 else comm
    if group is comm or comm.rank == 0:
        trainer, _ = make_trainer(group, folder, 4)
        add_saver(group, trainer)
        trainer.run()
    comm.barrier()
    trainer, optimizer = make_trainer(comm, folder, 8)
    saver, log = add_saver(comm, trainer), extensions.LogReport(
        trigger=(2, 'iteration'), log_name=None)
    trainer.extend(log, name='my log')
    trainer.extend(lambda trainer: None, name='without state',
                   trigger=chainer.training.triggers.TimeTrigger(1000))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always', RuntimeWarning)
        if how == 'checkpointer':
            assert saver.maybe_load(trainer, optimizer) == 4
        trainer.run()
    texts = [str(each.message) for each in caught if each.category is RuntimeWarning]
    new = [text for text in texts if 'start from scratch: my log' in text]
    assert len(new) == (comm.rank == 0) and len(texts) == (comm.rank == 0) * (1 + is_resized)
    assert [entry['iteration'] for entry in log.log] == [6, 8]


def test_an_error_of_one_rank(comm, folder):
    class Odd(chainer.training.Extension):
        def __init__(self, fails=False):
            self.fails = fails

        def __call__(self, trainer):
            pass

        def serialize(self, serializer):
            serializer('x', 1)
            if self.fails:
                raise ZeroDivisionError('on purpose')

    trainer, optimizer = make_trainer(comm, folder, 1)
    trainer.extend(Odd())
    checkpointer = chainermn.create_multi_node_checkpointer('run', comm)
    checkpointer.finalize = checkpointer._saver.flush
    trainer.extend(checkpointer)
    trainer.run()
    trainer, optimizer = make_trainer(comm, folder, 1)
    assert checkpointer.maybe_load(trainer, optimizer) == 1
    with raises_on_all(ZeroDivisionError, match='on purpose'):
        trainer.extend(Odd(fails=comm.rank == comm.size - 1))
        comm.barrier()
