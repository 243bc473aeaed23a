"""The call site of an operation: the line of the script, and the caller inside ChainerMN."""

import os

import chainer
import numpy as np
import pytest
from chainer.training import extensions
from shared_fixtures import raises_on_all

import chainermn

FILE = os.path.basename(__file__)


def line_of(text):
    with open(__file__, encoding='utf-8') as file:
        return next(number for number, line in enumerate(file, 1) if line.endswith(f'# {text}\n'))


def message(comm):
    with raises_on_all(ValueError, match='ranks called different operations') as caught:
        if comm.rank == 0:
            comm.barrier()  # first
        elif comm.rank == 1:
            chainermn.scatter_dataset([1, 2], comm)  # second
        else:
            evaluate(comm)
    return str(caught.value)


def evaluate(comm):
    evaluator = extensions.Evaluator({}, chainer.Link())
    evaluator.evaluate = dict
    chainermn.create_multi_node_evaluator(evaluator, comm)(None)  # through Chainer


@pytest.mark.mpi(min_size=2)
def test_the_rank_of_an_error_reports_the_same_call_site_as_the_others(comm):
    with pytest.raises(TypeError, match='failed on rank 0') as caught:
        chainermn.scatter_dataset(None, comm)
    # Equal call sites are not printed.
    assert str(caught.value).splitlines()[2:] in (
        [f'  {ranks}: scatter_dataset']
        for ranks in ('rank 1', f'ranks 1-{comm.size - 1}'))


@pytest.mark.mpi(min_size=2)
def test_each_rank_says_where_it_called(comm):
    text = message(comm)
    assert f'rank 0: barrier, called at {FILE}:{line_of("first")}' in text
    assert ('rank 1: scatter_dataset (gather_obj root=0), '
            f'called at {FILE}:{line_of("second")}') in text
    if comm.size > 2:
        assert ('create_multi_node_evaluator (allgather_obj), '
                f'called at {FILE}:{line_of("through Chainer")}') in text


@pytest.mark.mpi(min_size=2)
@pytest.mark.compares_calls
def test_each_rank_names_the_differentiable_function(comm):
    functions = chainermn.functions
    y = functions.allgather(comm, chainer.Variable(np.ones(2, 'f')))[0]
    y.grad = np.ones_like(y.array)
    with raises_on_all(ValueError, match='ranks called different operations') as caught:
        if comm.rank == 0:
            y.backward()  # not on the others
        else:
            functions.bcast(comm, np.ones(2, 'f'))  # other
    text = str(caught.value)
    assert (', in backward of chainermn.functions.allgather, called at '
            f'{FILE}:{line_of("not on the others")}') in text
    assert f', in chainermn.functions.bcast, called at {FILE}:{line_of("other")}' in text


def trained(comm, extend, communicate=None):
    """Train for three iterations."""
    model = chainer.links.Linear(2, 1)
    optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.SGD(), comm).setup(model)
    iterator = chainer.iterators.SerialIterator([np.ones(2, 'f')], 1)

    def loss(x):
        if communicate is not None:
            communicate(trainer)
        return chainer.functions.sum(model(x))

    updater = chainer.training.StandardUpdater(iterator, optimizer, loss_func=loss)
    trainer = chainer.training.Trainer(updater, (3, 'iteration'))
    trainer.extend(extend, name='own')
    trainer.run()


@pytest.mark.mpi(min_size=2)
@pytest.mark.compares_calls
def test_the_iteration_is_that_of_the_trainer(comm, capsys):
    """In an update, the number that LogReport will write after it."""
    def in_iteration_2(trainer):
        if comm.rank == 1 and trainer.updater.iteration == 2:
            comm.barrier()  # in an extension

    with raises_on_all(ValueError, match='ranks called different operations') as caught:
        trained(comm, in_iteration_2)
    assert ': the multi-node optimizer (multi_node_mean_grad), iteration 3,' in str(caught.value)
    assert f'rank 1: barrier, iteration 2, called at {FILE}:{line_of("in an extension")}' in str(
        caught.value)

    def in_iteration_3(trainer):
        if comm.rank == 1 and trainer.updater.iteration == 2:
            comm.barrier()  # in a loss

    with raises_on_all(ValueError, match='ranks called different operations') as caught:
        trained(comm, lambda trainer: None, in_iteration_3)
    assert f'rank 1: barrier, iteration 3, called at {FILE}:{line_of("in a loss")}' in str(
        caught.value)


@pytest.mark.mpi(min_size=2)
@pytest.mark.compares_calls
def test_an_extension_is_shown_with_the_line_that_added_it(comm, capsys):
    def report(kind, trigger):
        """Train with an extension on rank 0, or with its trigger on the others."""
        trainer = small_trainer(comm)
        if comm.rank == 0:
            trainer.extend(kind(), trigger=(2, 'iteration'))  # added
        elif trigger is not None:
            trainer.extend(kind(), trigger=trigger)  # with another trigger
        with raises_on_all(ValueError, match='ranks called different operations') as caught:
            trainer.run()
        return str(caught.value)

    def aggregator():
        return chainermn.extensions.ObservationAggregator(comm, 'main/loss')

    def barrier():
        return chainer.training.make_extension()(lambda trainer: comm.barrier())  # its call

    for trigger in (None, chainer.training.triggers.TimeTrigger(1e9)):
        text = report(aggregator, trigger)
        assert ('rank 0: ObservationAggregator (allgather_obj), iteration 2, in the extension '
                f"'ObservationAggregator' added at {FILE}:{line_of('added')} with "
                "trigger=(2, 'iteration')") in text
        assert 'All ranks must add the same extensions, with the same triggers' in text
    text = report(barrier, None)
    assert (f'rank 0: barrier, iteration 2, called at {FILE}:{line_of("its call")}, in the '
            f"extension '<lambda>' added at {FILE}:{line_of('added')} with trigger=") in text
    text = report(aggregator, (1, 'iteration'))
    assert (f": ObservationAggregator (allgather_obj), iteration 1, in the extension "
            f"'ObservationAggregator' added at {FILE}:{line_of('with another trigger')} with "
            "trigger=(1, 'iteration')") in text


def small_trainer(comm):
    model = chainer.links.Linear(2, 1)
    optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.SGD(), comm).setup(model)
    iterator = chainer.iterators.SerialIterator([np.ones(2, 'f')], 1)

    def loss(x):
        y = chainer.functions.sum(model(x))
        chainer.report({'loss': y}, model)
        return y

    return chainer.training.Trainer(
        chainer.training.StandardUpdater(iterator, optimizer, loss_func=loss), (3, 'iteration'))


@pytest.mark.mpi(min_size=2)
@pytest.mark.compares_calls
def test_an_extension_is_not_blamed_for_updates_and_stop_triggers(comm, capsys):
    def message(stop):
        trainer = small_trainer(comm)
        trainer.stop_trigger = stop
        trainer.extend(lambda trainer: None, name='innocent')
        with raises_on_all(ValueError, match='ranks called different operations') as caught:
            trainer.run()
        return str(caught.value)

    assert 'innocent' not in message(
        lambda trainer: trainer.updater.iteration == 1 and comm.rank == 0 and comm.barrier())
