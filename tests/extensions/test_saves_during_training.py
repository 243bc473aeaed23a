"""A save has the state of its iteration, though states are copied while the training continues."""
import threading

import chainer
import numpy as np
import pytest
from each_case import each_case
from killed_jobs import new_folder
from shared_fixtures import communicators

import chainermn
from chainer_compat import updates
from chainermn.extensions._checkpointing.late_copies import LateCopies

comm = communicators('overlapping')


@pytest.fixture
def slow_thread(monkeypatch):
    """The thread copies nothing before the event is set; return it and how many copies it saw."""
    may_copy, counts = threading.Event(), []
    finish = LateCopies.finish

    def wait(late):
        if threading.current_thread() is threading.main_thread():
            counts.append(len(late._parts))
        else:
            may_copy.wait()
        finish(late)

    monkeypatch.setattr(LateCopies, 'finish', wait)
    yield may_copy, counts
    may_copy.set()


def state_of(target):
    serializer = chainer.serializers.DictionarySerializer()
    for name, part in target.items():
        part.serialize(serializer[name])
    return {name: np.array(value) for name, value in serializer.target.items()}


def check_equal(a, b):
    assert a.keys() == b.keys()
    for name, value in a.items():
        np.testing.assert_array_equal(value, b[name], name)


@each_case('name, use_torch', [('Adam', 'auto'), ('Adam', 'never'), ('RMSprop', 'auto')])
def test_an_update_by_a_plan_waits_for_large_states(comm, folder, slow_thread, name, use_torch,
                                                    monkeypatch):
    """A plan finds states without the attribute of the rule, and changes them in place."""
    may_copy, counts = slow_thread
    may_copy.clear()
    counts.clear()
    path = new_folder(comm, folder)
    saver = chainermn.create_multi_node_checkpointer('run', comm, path=path)
    optimizer = getattr(chainer.optimizers, name)().setup(chainer.links.Linear(300, 200))
    planned = []
    original = updates.update_as_before

    def update(step):
        for param in optimizer.target.params():
            param.grad = np.random.RandomState(step).normal(0, 1, param.shape).astype('f')
        optimizer.update()

    def spy(*args):
        found = original(*args)
        if found:
            planned.append(found)
        return found

    with monkeypatch.context() as patch, chainer.using_config('use_torch', use_torch):
        patch.setattr(updates, 'update_as_before', spy)
        for step in range(3):
            update(step)
        target = {'model': optimizer.target, 'optimizer': optimizer}
        expected = state_of(target)
        saver.save(target, 3, wait=False)
        update(3)
    assert len(planned) == 3  # all but the first update
    assert counts[0] > 0  # the update made the copies itself
    may_copy.set()
    other = getattr(chainer.optimizers, name)().setup(chainer.links.Linear(300, 200))
    target = {'model': other.target, 'optimizer': other}
    assert saver.maybe_load(target) == 3
    check_equal(state_of(target), expected)
    saver.finalize()
