"""Values of all ranks and iterations become one."""
import types

import chainer
import numpy as np
import pytest
from each_case import each_case
from shared_fixtures import communicators

from chainermn.extensions import ObservationAggregator

comm = communicators('naive', 'version7')


def run(extension, observations):
    """Run the extension over iterations, and return the observations afterwards."""
    updater = types.SimpleNamespace(iteration=0, epoch=0, epoch_detail=0.0, is_new_epoch=False)
    trainer = types.SimpleNamespace(updater=updater)
    for updater.iteration, observation in enumerate(observations, 1):
        trainer.observation = observation
        extension(trainer)
    return observations


@each_case('value, dtype, shape', [
    (10000., 'e', ()), (2.35, 'f', (2,)), (200, 'B', (2,)), (1 << 30, 'i', ()), (1, '?', ())])
def test_means_of_many_numbers(comm, value, dtype, shape):
    """In float64; in float16 the sum would overflow."""
    array = np.full(shape, value, dtype)
    extension = ObservationAggregator(comm, 'x', comm_trigger=(10, 'iteration'))
    for seen in run(extension, [{'x': array[()]} for _ in range(10)])[-1:]:
        np.testing.assert_allclose(seen['x'], array.astype('d'), rtol=1e-12)


def test_an_array_that_the_program_reuses(comm):
    array = np.zeros(2)

    def observations():
        for array[...] in 1, 2, 6:
            yield {'x': array}

    extension = ObservationAggregator(comm, 'x', 'mean', comm_trigger=(3, 'iteration'))
    updater = types.SimpleNamespace(iteration=0, epoch=0, epoch_detail=0.0, is_new_epoch=False)
    for updater.iteration, seen in enumerate(observations(), 1):
        extension(types.SimpleNamespace(updater=updater, observation=seen))
    assert seen['mean'].tolist() == [3, 3]


def test_the_history_holds_values_since_the_last_time(comm):
    extension = ObservationAggregator(comm, 'loss', comm_trigger=(3, 'iteration'))
    run(extension, [{'loss': 1.0}, {'loss': 2.0}])
    assert extension.observation_history == [1.0, 2.0]
    assert extension.compute_summary() == 1.5
    assert extension.observation_history == []


@pytest.mark.parametrize('wrap', [np.float32, np.asarray,
                                  lambda x: chainer.Variable(np.array(x, np.float32))])
def test_arrays_and_variables(comm, wrap):
    seen, = run(ObservationAggregator(comm, 'loss'), [{'loss': wrap(2.0 * comm.rank)}])
    assert seen['loss'] == comm.size - 1
    assert not isinstance(seen['loss'], chainer.Variable)


def test_own_aggregator_runs_on_rank_0(comm):
    calls = []

    def spread(gathered):
        calls.append(gathered)
        return max(max(gathered)) - min(min(gathered))

    observations = [{'loss': 10 * comm.rank + i} for i in range(2)]
    run(ObservationAggregator(comm, 'loss', comm_trigger=(2, 'iteration'), aggregator=spread),
        observations)
    assert observations[-1]['loss'] == 10 * (comm.size - 1) + 1
    everything = [[10 * rank, 10 * rank + 1] for rank in range(comm.size)]
    assert calls == ([everything] if comm.rank == 0 else [])


def test_an_error_of_the_aggregator_is_raised_everywhere(comm):
    with pytest.raises(ZeroDivisionError):
        run(ObservationAggregator(comm, 'loss', aggregator=lambda _: 1 / 0), [{'loss': 1}])
