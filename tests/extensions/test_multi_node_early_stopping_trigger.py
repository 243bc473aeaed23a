"""All ranks stop at the same time, by the mean of what they observe."""
import types
import warnings

import pytest
from chainer.training import triggers
from shared_fixtures import communicators

from chainermn.extensions import MultiNodeEarlyStoppingTrigger

comm = communicators('naive', 'version7')


class Trainer:
    """As much of a trainer as a trigger looks at."""

    def __init__(self):
        self.observation = {}
        self.updater = types.SimpleNamespace(
            iteration=0, epoch=0, epoch_detail=0.0, previous_epoch_detail=0.0, is_new_epoch=False,
            get_iterator=lambda name: None)


def stops_after(trigger, values, key='main/loss'):
    """The number of iterations until the trigger fires."""
    trainer = Trainer()
    for trainer.updater.iteration, value in enumerate(values, 1):
        trainer.observation = {key: value}
        if trigger(trainer):
            return trainer.updater.iteration
    return None


@pytest.mark.parametrize('check', [
    lambda: (1, 'iteration'), lambda: triggers.IntervalTrigger(1, 'iteration')])
def test_it_stops_by_the_mean(comm, check):
    """On rank 0 alone the value improves forever, on the others never."""
    up_and_down = [100 - i if comm.rank == 0 else 100 + (2 if comm.size == 2 else 1) * i
                   for i in range(20)]
    trigger = MultiNodeEarlyStoppingTrigger(
        comm, check_trigger=check(), patience=4, max_trigger=(20, 'iteration'))
    expected = 20 if comm.size == 1 else {2: 5, 3: 5, 4: 5}[comm.size]
    assert stops_after(trigger, up_and_down) == expected


@pytest.mark.parametrize('key, sign', [('main/loss', 1), ('main/accuracy', -1)])
def test_auto_mode_goes_by_the_name(comm, key, sign):
    trigger = MultiNodeEarlyStoppingTrigger(
        comm, monitor=key, check_trigger=(1, 'iteration'), patients=2,
        max_trigger=(20, 'iteration'))
    getting_worse = [sign * i for i in range(20)]
    assert stops_after(trigger, getting_worse, key) == 3


def test_the_mean_is_reported(comm):
    trigger = MultiNodeEarlyStoppingTrigger(comm, check_trigger=(1, 'iteration'), suffix='_all')
    trainer = Trainer()
    trainer.updater.iteration = 1
    trainer.observation = {'main/loss': float(comm.rank)}
    trigger(trainer)
    assert trainer.observation['main/loss_all'] == (comm.size - 1) / 2


def test_a_misspelled_monitor_is_warned_about_once_on_rank_0(comm):
    trigger = MultiNodeEarlyStoppingTrigger(
        comm, monitor='main/lss', check_trigger=(1, 'iteration'), max_trigger=(3, 'iteration'))
    trainer = Trainer()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        for iteration in range(1, 4):
            trainer.updater.iteration = iteration
            trainer.observation = {'main/loss': 1., 'main/accuracy': 0.}
            assert trigger(trainer) == (iteration == 3)
    assert {each.filename for each in caught} <= {__file__}
    assert [str(each.message) for each in caught] == [
        "MultiNodeEarlyStoppingTrigger: no rank reported 'main/lss'; rank 0 reported "
        "'main/accuracy', 'main/loss'. Correct monitor, or pass a check_trigger that fires when "
        'the value is reported.'] * (comm.rank == 0)


def test_both_names_of_patience_are_refused(comm):
    with pytest.raises(TypeError, match='patience'):
        MultiNodeEarlyStoppingTrigger(comm, patience=1, patients=1)


def test_training_length(comm):
    assert MultiNodeEarlyStoppingTrigger(comm).get_training_length() == (100, 'epoch')
