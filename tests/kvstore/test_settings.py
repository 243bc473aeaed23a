"""Optimizer settings that differ between ranks raise an error within one update."""

import warnings

import chainer
import numpy as np
import pytest
from chainer import links as L
from chainer import optimizer_hooks, optimizers
from each_case import each_case

import chainermn
from chainermn.kvstore import create_kvstore_optimizer

MODES = [('dist_sync', False), ('dist_sync', True)]


def prepared(create, type, update_on_kvstore, actual=None, bound=1, **options):
    actual = actual or optimizers.MomentumSGD(0.1)
    model = chainer.Sequential(L.Linear(2, 2), L.Linear(2, 2))
    return create_kvstore_optimizer(
        actual.setup(model), create(type, bigarray_bound=bound), update_on_kvstore, **options)


def update(optimizer, times=1):
    for _ in range(times):
        optimizer.update(lambda: chainer.functions.sum(optimizer.target(np.ones((1, 2), 'f'))))


def hook(rule, param):
    pass


hook.call_for_each_param = True

#: A change on rank 0 only, and what the error says of it.
CHANGES = [
    (lambda o: setattr(o, 'lr', 0.05), 'lr: 0.05 on rank 0; 0.1 on rank'),
    (lambda o: setattr(o.hyperparam, 'momentum', np.float32(0)), 'momentum: 0.0 on rank 0; 0.9 on'),
    (lambda o: setattr(o, 't', o.t + 3), 't: 4 on rank 0; 1 on rank'),
    (lambda o: o.add_hook(optimizer_hooks.WeightDecay(0.1)),
     'hooks: WeightDecay(rate=0.1) on rank 0; none on rank'),
    (lambda o: o.target[1].disable_update(), 'update of /1/W: disabled on rank 0; enabled on rank'),
    (lambda o: o.set_loss_scale(2.), 'loss scale: 2.0 on rank 0; None on rank'),
]


@pytest.mark.mpi(min_size=2)
@pytest.mark.compares_calls
@each_case('mode, change, text', [
    (MODES[n % 2], *change) for n, change in enumerate(CHANGES)])
def test_a_change_on_one_rank(create, comm, same_error, mode, change, text):
    optimizer = prepared(create, *mode)
    update(optimizer, 2)
    before = [param.array.copy() for param in optimizer.target.params()]
    if comm.rank == 0:
        change(optimizer)
    error = same_error(update, optimizer)
    assert type(error) is chainermn.CollectiveMismatchError
    assert 'options of the KVStore optimizer differ between ranks (no data' in str(error)
    assert f'\n  {text}' in str(error)
    assert 'pass compare_settings=False to create_kvstore_optimizer.' in str(error)
    for old, param in zip(before, optimizer.target.params(), strict=True):
        np.testing.assert_array_equal(param.array, old)
    if comm.rank != 0:  # training continues after the same change on all ranks
        change(optimizer)
    update(optimizer, 2)
    comm.check_replicas(optimizer.target)


@pytest.mark.mpi(min_size=2)
@pytest.mark.compares_calls
@pytest.mark.parametrize('update_on_kvstore', [False, True])
def test_a_hook_of_the_program_on_one_rank(create, comm, update_on_kvstore):
    """The hook may only read values, so rank 0 warns once instead of raising an error."""
    optimizer = prepared(create, 'dist_sync', update_on_kvstore, bound=100)
    update(optimizer, 2)
    if comm.rank == 0:
        optimizer.add_hook(hook)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        update(optimizer, 3)
    texts = [str(each.message) for each in caught]
    assert len(texts) == (comm.rank == 0)
    if texts:
        assert texts[0].startswith('hooks of the KVStore optimizer differ between ranks\n')
        assert '\n  hooks: hook on rank 0; none on rank' in texts[0]
    comm.check_replicas(optimizer.target)


@pytest.mark.mpi(min_size=2)
@pytest.mark.compares_calls
def test_an_optimizer_of_the_store(create, comm, same_error):
    """Each server steps with the settings of its rank."""
    for model in None, L.Linear(1, 1):
        store = create('dist_sync')
        sgd = optimizers.SGD(1.)
        if model is not None:
            sgd.setup(model)
        store.set_optimizer(sgd)
        store.init('w', np.zeros(2, 'f'))
        store.push('w', np.ones(2, 'f'))
        if comm.rank == 0:
            sgd.lr = 0.5
        error = str(same_error(store.push, 'w', np.ones(2, 'f')))
        assert 'options of the optimizer of the KVStore differ' in error
        assert '\n  lr: 0.5 on rank 0; 1.0 on rank' in error
        assert 'compare_settings=False to set_optimizer' in error
        sgd.lr = 0.5
        store.push('w', np.ones(2, 'f'))
        np.testing.assert_array_equal(store.pull('w'), [-1.5 * comm.size] * 2)


def test_differences_on_purpose(create, comm):
    optimizer = prepared(create, 'dist_sync', False, optimizers.SGD(1. + comm.rank),
                         compare_settings=False)
    update(optimizer)
    before = optimizer.target[0].W.array.copy()
    optimizer.target.cleargrads()
    optimizer.target[0].W.grad = np.ones((2, 2), 'f')
    optimizer.update()
    np.testing.assert_array_equal(optimizer.target[0].W.array, before - (1 + comm.rank))
    store = create('dist_sync', bigarray_bound=1)
    store.set_optimizer(optimizers.SGD(1. + comm.rank), compare_settings=False)
    store.init('w', np.zeros(comm.size, 'f'))  # a shard on each server
    store.push('w', np.ones(comm.size, 'f'))
    np.testing.assert_array_equal(
        store.pull('w'), [-comm.size * (1 + rank) for rank in range(comm.size)])


def test_noise_of_an_optimizer_of_the_store(create, comm):
    """Each key has one server, which draws it."""
    store, sgd = create('dist_sync'), optimizers.SGD(1.).setup(L.Linear(1, 1))
    sgd.add_hook(optimizer_hooks.GradientNoise(0.01))
    store.set_optimizer(sgd)
    store.init('w', np.zeros(2, 'f'))
    np.random.seed(comm.rank)
    for _ in range(2):
        store.push('w', np.ones(2, 'f'))
    assert len({x.tobytes() for x in comm.allgather(store.pull('w'))}) == 1
