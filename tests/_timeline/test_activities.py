"""Activities: nothing without a viewer; nested ones, threads and signals count once."""

import threading
import time

import chainer
import numpy as np
import pytest

import chainermn
from chainermn._process import runtime
from chainermn._timeline import activities, recorder


@pytest.fixture
def watched():
    with runtime.replaced():
        yield activities.start()
        activities.stop()


@pytest.fixture
def clock(monkeypatch):
    """A clock that only the test advances."""
    at = [0]
    monkeypatch.setattr(activities, 'now', lambda: at[0] * 10**9)
    return at


def test_nothing_without_a_viewer():
    with runtime.replaced():
        assert activities.span('forward') is recorder.span('data') is activities.NO_SPAN


def test_nested_activities_count_once(clock, watched):
    for name, category, inside in [('forward', '', 2), ('custom', '', 1), ('recv', 'operation', 3),
                                   ('broadcast', '', 1), ('wait', 'wait', 0)]:
        with recorder.span(name, category):
            clock[0] += 4
            with activities.span('wait', 'wait'):
                clock[0] += inside
    assert watched.totals() == {'data': 0, 'forward': 4, 'backward': 0, 'communication': 8,
                                'waiting': 7 + 4, 'update': 0, 'other': 4}


def test_the_current_activity_and_errors(clock, watched):
    with pytest.raises(ZeroDivisionError), recorder.span('update'):
        clock[0] += 2
        assert watched.totals()['update'] == 2
        raise ZeroDivisionError
    clock[0] += 5
    assert watched.totals()['other'] == 5 and watched._newest == 'other'


def test_other_threads_do_not_count(clock, watched):
    def run():
        with recorder.span('forward'):
            clock[0] += 1

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert watched.totals() == dict.fromkeys(activities.NAMES, 0)


def test_time_before_the_first_activity_is_unknown(clock, watched):
    """The thread may be in a span that began before."""
    clock[0] += 5
    assert watched.totals() == dict.fromkeys(activities.NAMES, 0)
    with recorder.span('data'):
        clock[0] += 1
    clock[0] += 2
    assert watched.totals() == {**dict.fromkeys(activities.NAMES, 0), 'data': 1, 'other': 2}


def test_an_update_of_all_ranks(comm):
    """The parts of real updates; the last rank is slow."""
    model = chainer.links.Linear(3, 2)
    optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.SGD(), comm).setup(model)

    def loss(x):
        time.sleep(.05 if comm.rank == comm.size - 1 else 0)
        return chainer.functions.sum(model(x))

    data = np.ones((20, 3), 'f')
    iterator = chainer.iterators.SerialIterator(data, 2)
    updater = chainer.training.StandardUpdater(iterator, optimizer, loss_func=loss)
    updater.update()
    watched = activities.start()
    try:
        updater.update()  # it is known what the thread does
        start, before, begun = time.perf_counter(), watched.totals(), time.perf_counter()
        for _ in range(4):
            updater.update()
        ended, after, end = time.perf_counter(), watched.totals(), time.perf_counter()
    finally:
        activities.stop()
    spent = {name: after[name] - before[name] for name in activities.NAMES}
    assert ended - begun < sum(spent.values()) < end - start
    assert activities.updates() >= optimizer.t == 5
    for name in ('data', 'forward', 'backward', 'communication', 'update'):
        assert spent[name] > 0, spent
    if comm.rank == comm.size - 1:
        assert spent['forward'] > .2
    else:
        assert spent['waiting'] > .05, spent  # less than .2 if this rank was also late


def test_optimizers_without_a_count():
    with runtime.replaced():
        assert activities.updates() is None

        class Optimizer:
            t = 3

        one, other = Optimizer(), Optimizer()
        activities.follow(one)
        activities.follow(other)
        other.t = None
        assert activities.updates() == 3
        one.t = 'unknown'
        assert activities.updates() is None
