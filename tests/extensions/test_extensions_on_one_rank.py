"""An extension on rank 0 only: all ranks raise an error that shows both callers."""

import chainer
import chainer.links as L
import numpy as np
import pytest
from chainer import training
from chainer.training import extensions
from shared_fixtures import communicators

import chainermn
from chainermn.extensions import (
    AllreducePersistent,
    GenericMultiNodeEvaluator,
    LinearScaling,
    MultiNodeEarlyStoppingTrigger,
    ObservationAggregator,
    TensorBoardWriter,
    create_multi_node_checkpointer,
    create_multi_node_report,
    multi_node_snapshot,
)

DATA = [(np.full(2, i, np.float32), np.int32(i % 2)) for i in range(4)]
EACH = 1, 'iteration'

comm = communicators('flat')


class Model(L.Classifier):
    def __init__(self):
        super().__init__(L.Linear(2, 2))
        self.add_persistent('mean', np.zeros(2, np.float32))


def iterator(repeat=False):
    return chainer.iterators.SerialIterator(DATA, 2, repeat=repeat, shuffle=False)


def make_trainer(comm, out, stop=(4, 'iteration')):
    optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.SGD(.1), comm).setup(
        Model())
    updater = training.StandardUpdater(iterator(repeat=True), optimizer)
    return training.Trainer(updater, stop, out=str(out))


def evaluator(comm, model, kind=extensions.Evaluator):
    return chainermn.create_multi_node_evaluator(kind(iterator(), model), comm)


class Log(extensions.LogReport):
    """A user-defined subclass."""


class Generic(GenericMultiNodeEvaluator):
    """A user-defined subclass."""

    def calc_local(self, x, t):
        return len(x)


class Evaluator(extensions.Evaluator):
    """A user-defined subclass."""


#: By the name in the error, a function that makes the extension.
EXTENSIONS = {
    'create_multi_node_evaluator': evaluator,
    'GenericMultiNodeEvaluator': lambda comm, model: Generic(comm, iterator(), model),
    'AllreducePersistent': lambda comm, model: AllreducePersistent(model, comm),
    'ObservationAggregator': lambda comm, model: ObservationAggregator(comm, 'main/loss'),
    'LinearScaling': lambda comm, model: LinearScaling(comm),
    'create_multi_node_checkpointer':
        lambda comm, model: create_multi_node_checkpointer('one', comm),
    'multi_node_snapshot': lambda comm, model: multi_node_snapshot(
        comm, extensions.snapshot(), [[rank] for rank in range(comm.size)]),
    'LogReport': lambda comm, model: create_multi_node_report(Log(trigger=EACH), comm),
    'PlotReport': lambda comm, model: create_multi_node_report(
        extensions.PlotReport(['main/loss'], trigger=EACH), comm),
    'ProgressBar': lambda comm, model: create_multi_node_report(
        extensions.ProgressBar(), comm),
    'TensorBoardWriter': lambda comm, model: TensorBoardWriter(comm, trigger=EACH),
}


@pytest.mark.sample(4)
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize('name', [*EXTENSIONS, 'MultiNodeEarlyStoppingTrigger'])
def test_both_callers_are_named(comm, same_error, folder, name):
    if name == 'TensorBoardWriter':
        pytest.importorskip('tensorboardX')
    stop = (4, 'iteration')
    if comm.rank == 0 and name == 'MultiNodeEarlyStoppingTrigger':
        stop = MultiNodeEarlyStoppingTrigger(comm, check_trigger=EACH, max_trigger=stop)
    trainer = make_trainer(comm, folder, stop)
    model = trainer.updater.get_optimizer('main').target
    if comm.rank == 0 and name in EXTENSIONS:
        trainer.extend(EXTENSIONS[name](comm, model), trigger=EACH, priority=1000)
    other = 'create_multi_node_evaluator' if name == 'LogReport' else 'LogReport'
    trainer.extend(EXTENSIONS[other](comm, model), trigger=EACH, name='other')
    error = same_error(trainer.run)
    assert type(error) is chainermn.CollectiveMismatchError
    mine, *theirs = error.calls
    assert mine.startswith(f'{name} (')
    for call in theirs:
        assert call.startswith((f'{other} (', 'the multi-node optimizer ('))
    for call in error.calls:
        assert call in str(error)


def test_no_alarm_for_correct_programs(comm, folder):
    """With subclasses, local extensions, other names and other keys on some ranks, and lambdas."""
    trainer = make_trainer(comm, folder)
    model = trainer.updater.get_optimizer('main').target
    is_odd = comm.rank == comm.size - 1
    if is_odd:
        trainer.extend(extensions.Evaluator(iterator(), model), trigger=EACH)
        trainer.extend(extensions.LogReport(trigger=EACH, filename='local'), trigger=EACH)
        trainer.extend(create_multi_node_report(extensions.PrintReport(['epoch']), comm))
    trainer.extend(evaluator(comm, model, Evaluator if is_odd else extensions.Evaluator),
                   trigger=EACH, name=f'evaluator{comm.rank}')
    trainer.extend((Generic if is_odd else GenericMultiNodeEvaluator)(
        comm, iterator(), lambda x, t: len(x)), trigger=EACH)
    for number in range(2):
        kind = Log if is_odd else extensions.LogReport
        trainer.extend(create_multi_node_report(
            kind(trigger=EACH, filename=f'log{number}'), comm), name=f'log{number}')
    trainer.extend(ObservationAggregator(comm, f'validation_{comm.rank}/main/loss', 'loss'))
    trainer.extend(lambda trainer: comm.allreduce_obj(1), trigger=EACH)
    trainer.extend(lambda trainer: comm.allreduce_obj(1), trigger=EACH, name=f'f{comm.rank}')
    trainer.extend(create_multi_node_checkpointer('run', comm), trigger=(2, 'iteration'))
    trainer.extend(multi_node_snapshot(comm, extensions.snapshot()), trigger=(2, 'iteration'))
    trainer.run()
    assert trainer.updater.iteration == 4
    comm.barrier()
