"""Ranks whose optimizers have different options, or change differently."""

import chainer
import chainer.links as L
import numpy as np
import pytest
from shared_fixtures import communicators

import chainermn

pytestmark = pytest.mark.mpi(min_size=2)

comm = communicators('flat')


def prepared(comm, **options):
    """An optimizer of a model with two parameters of 6 elements in all."""
    return chainermn.create_multi_node_optimizer(
        chainer.optimizers.Adam(), comm, **options).setup(L.Linear(2, 2))


def update(optimizer):
    optimizer.update(lambda x: chainer.functions.sum(optimizer.target(x)), np.ones((1, 2), 'f'))


@pytest.mark.parametrize('name, value, other', [
    ('n_accumulations', 2, 1), ('n_accumulations', 2, 3), ('overlap', True, False),
    ('overlap', 'always', True), ('shard_states', True, False)])
@pytest.mark.parametrize('resumed', [False, True], ids=['at the start', 'resumed'])
def test_options(comm, same_error, name, value, other, resumed):
    """Even if the options are those by default on some ranks. After resuming, none broadcasts."""
    optimizer = prepared(comm, **{name: value if comm.rank == 0 else other})

    def updates():
        for _ in range(3):  # until all ranks exchange gradients
            update(optimizer)

    if resumed:
        optimizer.is_changed(optimizer.target)
    error = same_error(updates)
    assert type(error) is chainermn.CollectiveMismatchError
    assert 'options of the multi-node optimizer differ between ranks' in str(error)
    assert f'\n  {name}: {value!r} on rank 0; {other!r} on rank' in str(error)


def test_bucket_mb(comm, same_error):
    optimizer = prepared(comm, overlap=True, bucket_mb=min(2, comm.rank + 1))
    assert '\n  bucket_mb: 1 on rank 0; 2 on rank' in str(same_error(lambda: update(optimizer)))


def test_update_rules_that_change_on_one_rank(comm, same_error):
    for change, before, after in [
            (lambda rule: setattr(rule, 'enabled', False), 'enabled', 'disabled'),
            (lambda rule: rule.add_hook(lambda rule, param: None, 'hook'),
             'can be split', 'cannot be split (not elementwise, or with hooks)')]:
        optimizer = prepared(comm, shard_states=True)
        for _ in range(3):
            update(optimizer)
        if comm.rank == 1:
            change(optimizer.target.W.update_rule)
        text = str(same_error(lambda: update(optimizer)))  # noqa: B023
        assert '\n  update rule of /W: ' in text and '/b' not in text
        assert before in text and after in text
        assert 'W: enabled, can be split, 4 elements on' in text
        if comm.rank != 1:  # as the other one: training continues
            change(optimizer.target.W.update_rule)
        update(optimizer)


def test_correct_programs(comm):
    """No alarm if options agree, if only some ranks use an optimizer, or zero_fill differs."""
    for options in ({'n_accumulations': 2}, {'overlap': 'always'}, {'shard_states': True},
                    {'zero_fill': comm.rank == 0}):
        optimizer = prepared(comm, **options)
        for _ in range(5):
            update(optimizer)
    actual = chainer.optimizers.Adam().setup(L.Linear(2, 2))
    optimizer = chainermn.create_multi_node_optimizer(actual, comm) if comm.rank else None
    for number in range(3):
        if optimizer is not None:
            update(optimizer)
        elif number == 0:
            comm.bcast_data(actual.target)
        else:
            actual.target.cleargrads()
            comm.multi_node_mean_grad(actual.target, zero_fill=True)
            actual.update()
    comm.check_replicas(actual.target)


@pytest.mark.mpi(min_size=2)
def test_overlap_on_some_ranks_and_a_call_on_another(comm, same_error):
    """Both average gradients, but not in the same way."""
    optimizer = prepared(comm, overlap='always')
    update(optimizer)  # which broadcasts the parameters

    def step():
        if comm.rank:
            update(optimizer)
        else:
            comm.multi_node_mean_grad(optimizer.target, zero_fill=True)

    text = str(same_error(step))
    assert 'multi_node_mean_grad' in text and 'the multi-node optimizer (queue_gradients)' in text
