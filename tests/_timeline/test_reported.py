"""The newest entries of LogReports, which metrics show."""

import chainer
import pytest
from chainer.training import extensions
from small_trainer import make_trainer

from chainermn._process import runtime
from chainermn._timeline import reported
from chainermn.extensions import create_multi_node_report

pytestmark = pytest.mark.every_size


@pytest.fixture
def trainer(naive, tmp_path):
    with runtime.replaced():
        yield make_trainer(naive, str(tmp_path), (3, 'iteration'))


def test_without_a_trainer():
    with runtime.replaced():
        assert reported.newest() == {}


def test_the_newest_entry(trainer, naive):
    log = create_multi_node_report(extensions.LogReport(trigger=(2, 'iteration')), naive)
    trainer.extend(log)
    seen = []

    @chainer.training.make_extension(trigger=(1, 'iteration'), priority=-10)
    def note(trainer):
        seen.append(reported.newest())

    trainer.extend(note)
    trainer.run()
    assert seen[0] == {} and seen[1] == seen[2] == log.log[0]
    assert {'main/loss', 'main/accuracy', 'iteration'} <= {*seen[1]}


def test_only_numbers_of_one_entry(trainer):
    """Other values come from the program's postprocess; several LogReports are merged."""
    def change(entry):
        entry.update(name='text', none=None, ok=True, **{'x' * 200: 1.})

    trainer.extend(extensions.LogReport(trigger=(1, 'iteration'), postprocess=change))
    trainer.extend(extensions.LogReport(['main/loss'], (1, 'iteration'), filename='b',
                                        postprocess=lambda entry: entry.update(more=5)), 'other')
    trainer.run()
    found = reported.newest()
    assert {*found} == {'main/loss', 'main/accuracy', 'epoch', 'iteration', 'elapsed_time', 'ok',
                        'more'}
    assert all(type(value) is float for value in found.values())


def test_a_trainer_that_is_deleted(trainer):
    reported.follow(trainer)
    trainer.extend(extensions.LogReport())
    assert reported.newest() == {}  # before the first entry
    reported.follow(chainer.training.Trainer(trainer.updater))
    assert reported.newest() == {}
