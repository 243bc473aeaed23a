"""Optimizers that are not Chainer's: with setup, update and target only, and wrappers."""

import warnings

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from each_case import each_case
from mpi4py import MPI
from shared_fixtures import communicators, raises_on_all

import chainermn

LR = .125


class Foreign:
    """Wraps another framework's optimizer: version 7 needs no more."""

    def setup(self, link):
        self.target = link
        return self

    def update(self, lossfun=None, *args, **kwds):
        assert lossfun is None
        for param in self.target.params():
            if param.grad is not None:
                param.array -= LR * param.grad


class WithState(Foreign):
    """Has a momentum, and saves it."""

    velocity = None

    def update(self, lossfun=None, *args, **kwds):
        velocity = 0. if self.velocity is None else self.velocity
        self.velocity = .5 * velocity - LR * self.target.W.grad
        self.target.W.array += self.velocity

    def serialize(self, serializer):
        self.velocity = serializer('velocity', self.velocity)


class Wrapper:
    """Forwards to a Chainer optimizer; assignments, as often, stay here."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def __getattr__(self, name):
        if name == 'optimizer':
            raise AttributeError(name)
        return getattr(self.optimizer, name)


comm = communicators('flat')


def make(comm, actual, dtype='f', **options):
    model = L.Linear(2, 1, nobias=True, initialW=np.full((1, 2), 1 + comm.rank, dtype))
    optimizer = chainermn.create_multi_node_optimizer(actual, comm, **options)
    return optimizer.setup(model), model


def loss(model, x):
    return F.sum(model(np.asarray(x, model.W.dtype)[None]))


def batch(rank, update):
    return [rank + 1, update]


def weights(size, updates):
    """W of SGD with the mean of the gradients, which are the batches."""
    return np.ones(2) - LR * sum(
        np.mean([batch(rank, update) for rank in range(size)], 0) for update in updates)


@each_case('options, dtype', [
    ({}, 'f'), ({'zero_fill': False}, 'f'), ({}, 'e'), ({'compression': 'fp16'}, 'f'),
    ({'n_accumulations': 2}, 'f'), ({'n_accumulations': 2}, 'e')])
def test_updates(comm, options, dtype):
    optimizer, model = make(comm, Foreign(), dtype, **options)
    for update in range(7):
        optimizer.update(loss, model, batch(comm.rank, update))
    n = options.get('n_accumulations', 1)
    expected = np.ones(2) + (weights(comm.size, range(1, 7)) - 1) / n
    np.testing.assert_allclose(model.W.array[0], expected, 1e-2 if dtype == 'e' else 1e-6)
    assert len(set(MPI.COMM_WORLD.allgather(model.W.array.tobytes()))) == 1


def test_without_a_loss_function(comm):
    """As PFN's chainer-pytorch-migration uses it; and a parameter without a gradient."""
    optimizer, model = make(comm, Foreign())
    for update in range(3):
        model.W.grad = np.array([batch(comm.rank, update)], 'f')
        optimizer.update()
    np.testing.assert_allclose(model.W.array[0], weights(comm.size, (1, 2)))
    model.cleargrads()
    optimizer.update()
    np.testing.assert_allclose(model.W.array[0], weights(comm.size, (1, 2)))


@pytest.mark.parametrize('create', [lambda: Wrapper(chainer.optimizers.Adam(.1)), WithState])
def test_a_checkpoint(comm, tmp_path, create):
    folder = MPI.COMM_WORLD.bcast(str(tmp_path))
    optimizer, model = make(comm, create())
    for update in range(3):
        optimizer.update(loss, model, batch(comm.rank, update))
    save = chainermn.create_multi_node_checkpointer('run', comm, path=folder)
    save.save({'model': model, 'optimizer': optimizer}, 3)
    other, copied = make(comm, create())
    load = chainermn.create_multi_node_checkpointer('run', comm, path=folder)
    assert load.maybe_load({'model': copied, 'optimizer': other}) == 3
    for each, link in ((optimizer, model), (other, copied)):
        each.update(loss, link, batch(comm.rank, 3))
    np.testing.assert_array_equal(model.W.array, copied.W.array)
    third, _ = make(comm, Wrapper(chainer.optimizers.MomentumSGD(.1)))
    with pytest.raises(ValueError, match='was saved with different classes'):
        load.maybe_load({'model': copied, 'optimizer': third})
    load.finalize()
    save.finalize()


def test_a_state_that_cannot_be_saved_is_a_warning_on_rank_0(comm):
    optimizer, _ = make(comm, Foreign())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        serializer = chainer.serializers.DictionarySerializer()
        optimizer.serialize(serializer)
    assert [str(each.message)[:36] for each in caught] == [
        'Foreign has no method serialize, so '] * (comm.rank == 0)
    saved, _ = make(comm, WithState())
    saved.serialize(chainer.serializers.DictionarySerializer())  # silent


class WithoutTarget(Foreign):
    """Its setup keeps the model elsewhere."""

    def setup(self, link):
        self.model = link
        return self


def test_setup_without_a_target(comm, same_error):
    optimizer = chainermn.create_multi_node_optimizer(WithoutTarget(), comm).setup(L.Linear(1, 1))
    error = same_error(optimizer.update)
    assert type(error) is RuntimeError
    assert 'WithoutTarget.setup must set the attribute target' in str(error)


def test_before_setup(comm):
    optimizer = chainermn.create_multi_node_optimizer(Foreign(), comm)
    with pytest.raises(RuntimeError, match=r'no model. Call optimizer.setup\(model\)'):
        optimizer.update()


@each_case('options, name', [
    ({'overlap': True}, 'overlap requires'),
    ({'shard_states': True}, 'shard_states requires'),
    ({'double_buffering': True}, 'double_buffering requires'),
    ({'shard_states': True, 'overlap': True}, 'overlap and shard_states require')])
def test_options_that_need_chainers_optimizer(comm, options, name):
    with pytest.raises(TypeError, match=f'{name} a chainer.Optimizer; Foreign does not have t, '
                                        '_loss_scale and call_hooks. Omit ') as info:
        chainermn.create_multi_node_optimizer(Foreign(), comm, **options)
    assert len(set(MPI.COMM_WORLD.allgather(str(info.value)))) == 1


class Incomplete:
    def setup(self, link):
        return self


@each_case('wrong, text', [
    (None, 'NoneType has no setup or update method'), ({}, 'has no setup method'),
    (Incomplete(), 'Incomplete has no update method'), (object(), 'object has no setup or update'),
    (Foreign, r'not the class Foreign. Create an instance'), (L.Linear(1, 1), 'has no setup')])
def test_objects_that_are_no_optimizers(comm, wrong, text):
    with raises_on_all(TypeError, match=text):
        chainermn.create_multi_node_optimizer(wrong, comm)


@each_case('options', [
    {}, {'shard_states': True, 'n_accumulations': 2}, {'overlap': 'always'},
    {'compression': 'fp16'}])
def test_a_wrapper_trains_like_what_it_wraps(comm, options):
    """The reference is Chainer's optimizer in one process, with the mean gradients."""
    optimizer, model = make(comm, Wrapper(chainer.optimizers.Adam(.1)), **options)
    reference = L.Linear(2, 1, nobias=True, initialW=1)
    plain = chainer.optimizers.Adam(.1).setup(reference)
    for each in (optimizer, plain):
        each.add_hook(chainer.optimizer_hooks.WeightDecay(.25))
    n = options.get('n_accumulations', 1)
    total = np.zeros(2)
    for update in range(7):
        optimizer.update(loss, model, batch(comm.rank, update))
        if not update:
            continue
        total += np.mean([batch(rank, update) for rank in range(comm.size)], 0) / n
        if update % n == 0:
            reference.W.grad = total[None].astype('f')
            plain.update()
            total[:] = 0
    np.testing.assert_allclose(model.W.array, reference.W.array, 1e-3 if 'compression' in options
                               else 1e-5)
    assert optimizer.t == plain.t


def test_a_wrapper_with_its_own_update_has_no_shards(comm):
    class Own(Wrapper):
        def update(self, *args, **kwds):
            self.optimizer.update(*args, **kwds)

    make(comm, Own(chainer.optimizers.SGD()))
    with pytest.raises(TypeError, match='that does not override the method update'):
        make(comm, Own(chainer.optimizers.SGD()), shard_states=True)
