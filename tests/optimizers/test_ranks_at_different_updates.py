"""A rank that continues after a failed update is detected, without false alarms."""

import io

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest

import chainermn


@pytest.fixture(params=['', 'n_accumulations', 'overlap', 'fp16'])
def options(request):
    return {'': {}, 'n_accumulations': {'n_accumulations': 3}, 'fp16': {'compression': 'fp16'},
            'overlap': {'overlap': 'always', 'bucket_mb': 1e-5}}[request.param]


def make(comm, **options):
    model = chainer.Sequential(L.Linear(3, 4), F.tanh, L.Linear(4, 2))
    return chainermn.create_multi_node_optimizer(
        chainer.optimizers.MomentumSGD(.1), comm, **options).setup(model)


def update(optimizer, times=1, fails=False):
    def loss(x):
        y = F.sum(optimizer.target(x))
        if fails:
            raise ZeroDivisionError('a bad batch')
        return y

    for _ in range(times):
        optimizer.update(loss, np.random.rand(5, 3).astype('f'))


def fail(optimizer):
    with pytest.raises(ZeroDivisionError):
        update(optimizer, fails=True)


def saved(target):
    file = io.BytesIO()
    chainer.serializers.save_npz(file, target)
    return file.getvalue()


def load(target, data):
    chainer.serializers.load_npz(io.BytesIO(data), target)


def assert_in_step(comm, *optimizers):
    """All ranks have made the same steps."""
    for optimizer in optimizers:
        comm.check_replicas(optimizer.target)
        assert len(set(comm.allgather_obj(optimizer.t))) == 1


@pytest.mark.sample(5)
@pytest.mark.parametrize('before', [1, 2, 4])
@pytest.mark.parametrize('failing', [0, -1])
@pytest.mark.mpi(min_size=2)
def test_all_ranks_raise(comm, options, before, failing):
    """One rank catches the error of an update and continues with the next batch."""
    optimizer = make(comm, **options)
    update(optimizer, before)
    failing %= comm.size
    if comm.rank == failing:
        fail(optimizer)
    steps = optimizer.t
    with pytest.raises(ValueError, match='updates differ between ranks') as info:
        update(optimizer, 3)
    assert optimizer.t == steps
    text = str(info.value)
    assert comm.allgather_obj(text) == [text] * comm.size
    ahead = next(line for line in text.splitlines() if line.startswith(f'  rank {failing}: '))
    assert 'since gradients were last averaged' in ahead
    assert 'model.cleargrads(); optimizer.update()' in text and 'load a checkpoint' in text


@pytest.mark.mpi(min_size=2)
def test_the_numbers_of_updates(comm):
    optimizer = make(comm)
    update(optimizer, 5)  # the first one broadcasts
    if comm.rank == 1:
        fail(optimizer)
    with pytest.raises(ValueError, match='updates differ') as info:
        update(optimizer)
    text = str(info.value)
    call = 'the multi-node optimizer (multi_node_mean_grad), update'
    assert f'rank 1: {call} 7, 2 updates since gradients were last averaged, called at ' in text
    assert '<- updates differ' in text
    assert f': {call} 6, called at ' in text


@pytest.mark.mpi(min_size=2)
def test_a_step_that_failed_on_one_rank(comm):
    """Its parameters lack a step from then on."""
    optimizer = make(comm)
    update(optimizer, 2)
    optimizer.add_hook(lambda _: 1 // (comm.rank != 1), name='fails')
    if comm.rank == 1:
        with pytest.raises(ZeroDivisionError):
            update(optimizer)
    else:
        update(optimizer)
    optimizer.remove_hook('fails')
    with pytest.raises(ValueError, match='updates differ'):
        update(optimizer)
    with pytest.raises(ValueError, match='updates differ'):
        optimizer.target.cleargrads()
        optimizer.update()


# --- programs that are correct --------------------------------------------------------------------

@pytest.mark.sample(2)
def test_a_rank_that_takes_part_without_its_batch(comm, options):
    optimizer = make(comm, **options)
    for step in range(9):
        try:
            update(optimizer, fails=step % 4 == 1 and comm.rank == comm.size - 1)
        except ZeroDivisionError:
            optimizer.target.cleargrads()
            optimizer.update()
    assert_in_step(comm, optimizer)


@pytest.mark.sample(3)
@pytest.mark.parametrize('new', ['optimizer', 'model'])
def test_a_new_optimizer_or_model(comm, options, new):
    optimizer = make(comm, **options)
    update(optimizer, 3)
    if comm.rank == comm.size - 1:
        fail(optimizer)
    if new == 'optimizer':
        optimizer = make(comm, **options)
    else:
        optimizer.setup(chainer.Sequential(L.Linear(3, 2)))
    update(optimizer, 5)
    assert_in_step(comm, optimizer)


@pytest.mark.sample(2)
def test_loading_after_an_error(comm, options):
    """All ranks load a snapshot to continue."""
    optimizer = make(comm, **options)
    update(optimizer, 4)
    model, state = saved(optimizer.target), saved(optimizer)
    if comm.size > 1:
        if comm.rank == 0:
            fail(optimizer)
        with pytest.raises(ValueError, match='updates differ'):
            update(optimizer, 3)
    load(optimizer.target, model)
    load(optimizer, state)
    optimizer._accumulation.clear()
    update(optimizer, 6)
    if 'compression' not in options:
        assert_in_step(comm, optimizer)


@pytest.mark.sample(2)
def test_loading_on_one_rank(comm, options):
    optimizer = make(comm, **options)
    update(optimizer, 4)
    if comm.rank == 0:
        load(optimizer, saved(optimizer))
    optimizer.actual_optimizer.t += 100
    update(optimizer, 6)
    comm.check_replicas(optimizer.target)


@pytest.mark.sample(2)
def test_join(comm, options):
    optimizer = make(comm, **options)
    for _ in range(3):
        with chainermn.join(optimizer):
            update(optimizer, 2 + comm.rank)
        update(optimizer, 3)
    with chainermn.join(optimizer):
        update(optimizer, 2)
        if comm.rank == 0:
            fail(optimizer)
        update(optimizer, comm.rank)
    update(optimizer, 3)
    assert_in_step(comm, optimizer)


def test_calls_without_an_optimizer(comm):
    """Also on some ranks only, in place of those of the optimizer."""
    optimizer = make(comm)
    update(optimizer, 3)
    for _ in range(3):
        optimizer.target.cleargrads()
        F.sum(optimizer.target(np.ones((2, 3), 'f'))).backward()
        if comm.rank == 0:
            comm.multi_node_mean_grad(optimizer.target, zero_fill=True)
            optimizer.actual_optimizer.update()
        else:
            optimizer.update()
        comm.multi_node_mean_grad(optimizer.target)
        update(optimizer)
    assert_in_step(comm, optimizer)
