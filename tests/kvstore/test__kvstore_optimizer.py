"""create_kvstore_optimizer: what random models (the law of KVStores) do not show."""

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from chainer import optimizer_hooks as hooks
from chainer import optimizers
from mpi4py import MPI

from chainermn.kvstore import create_kvstore_optimizer


def start(x):
    """Initialize an array with values of this rank."""
    x[...] = np.random.RandomState(MPI.COMM_WORLD.rank).randn(*x.shape)


class Model(chainer.Chain):
    """Lazily initialized, with different values on each rank, and a parameter without gradient."""

    def __init__(self, n=3):
        super().__init__()
        with self.init_scope():
            self.l1 = L.Linear(None, n, initialW=start)
            self.l2 = L.Linear(n, 2, initialW=start)
            self.unused = chainer.Parameter(np.full(2, MPI.COMM_WORLD.rank, np.float32))

    def forward(self, x, t):
        return F.mean_squared_error(self.l2(F.tanh(self.l1(x))), t)


def batch(rank, step):
    random = np.random.RandomState(100 * step + rank)
    return random.randn(4, 5).astype(np.float32), random.randn(4, 2).astype(np.float32)


def values(model):
    return {path: param.array.copy() for path, param in sorted(model.namedparams())}


def check_equal(found, expected, **tolerance):
    assert found.keys() == expected.keys()
    for path in found:
        if tolerance:
            np.testing.assert_allclose(found[path], expected[path], err_msg=path, **tolerance)
        else:
            np.testing.assert_array_equal(found[path], expected[path], err_msg=path)


def test_dist_async(create, comm):
    """Ranks that step one after another give the same as one process."""
    model = Model()
    kv = create('dist_async', bigarray_bound=4)
    optimizer = create_kvstore_optimizer(optimizers.Adam(.01).setup(model), kv)
    optimizer.update(model, *batch(comm.rank, 0))
    start = comm.bcast_obj(values(model))
    check_equal(values(model), start)

    reference = Model()
    plain = optimizers.Adam(.01).setup(reference)
    reference(*batch(0, 0))
    for path, param in reference.namedparams():
        param.array[...] = start[path]
    for step in range(1, 4):
        for rank in range(comm.size):
            if rank == comm.rank:
                kv.pull(list(start), [param.array for _, param in sorted(model.namedparams())])
                optimizer.update(model, *batch(rank, step))
            comm.barrier()
            plain.update(reference, *batch(rank, step))
    assert optimizer.t == 3
    final = {path: x for path, x in zip(start, kv.pull(list(start)), strict=True)}
    check_equal(final, values(reference), rtol=1e-4, atol=1e-5)


def test_priorities(create):
    """-i for the i-th parameter, in one push and one pull, as in Gluon."""
    calls = []
    kv = create('local')

    def record(method, call):
        def recorded(keys, *args, priority=0):
            calls.append((method, keys, priority))
            return call(keys, *args, priority=priority)
        setattr(kv, method, recorded)

    record('push', kv.push)
    record('pull', kv.pull)
    model = Model()
    optimizer = create_kvstore_optimizer(optimizers.SGD().setup(model), kv)
    optimizer.update(model, *batch(0, 0))
    optimizer.update(model, *batch(0, 0))
    paths = ['/l1/W', '/l1/b', '/l2/W', '/l2/b', '/unused']
    priorities = [0, -1, -2, -3, -4]
    assert calls == [('pull', paths, priorities), ('push', paths, priorities),
                     ('pull', paths, priorities)]


def test_errors(create, comm, same_error):
    model = Model()
    kv = create('dist_sync')
    asynchronous = create('dist_async')
    sgd = optimizers.SGD().setup(model)
    error = same_error(create_kvstore_optimizer, sgd, asynchronous, False)
    assert isinstance(error, ValueError) and 'update_on_kvstore=True' in str(error)
    error = same_error(create_kvstore_optimizer, sgd, 'dist_sync')
    assert isinstance(error, TypeError) and 'KVStore' in str(error)
    error = same_error(create_kvstore_optimizer, model, kv)
    assert isinstance(error, TypeError) and 'GradientMethod' in str(error)
    error = same_error(create_kvstore_optimizer, create_kvstore_optimizer(sgd, kv), kv)
    assert isinstance(error, TypeError) and 'GradientMethod' in str(error)
    sgd.add_hook(hooks.GradientClipping(1))
    error = same_error(create_kvstore_optimizer, sgd, kv, True)
    assert isinstance(error, ValueError) and 'update_on_kvstore=False' in str(error)


@pytest.mark.parametrize('prepare, text', [
    (lambda model, optimizer: setattr(model.l2.W.update_rule.hyperparam, 'lr', 1), '/l2/W'),
    (lambda model, optimizer: model.l2.b.update_rule.add_hook(hooks.WeightDecay(1)), '/l2/b'),
    (lambda model, optimizer: optimizer.loss_scaling(), 'dynamic loss scaling'),
])
def test_parameters_that_a_store_cannot_update(create, comm, same_error, prepare, text):
    for type in ('dist_sync', 'dist_async'):
        model = Model()
        actual = optimizers.SGD().setup(model)
        prepare(model, actual)
        optimizer = create_kvstore_optimizer(actual, create(type), True)
        error = same_error(optimizer.update, model, *batch(comm.rank, 0))
        assert isinstance(error, ValueError) and text in str(error)


def test_a_store_serves_one_model(create, comm):
    model = Model()
    optimizer = create_kvstore_optimizer(optimizers.SGD().setup(model), create('dist_sync'))
    optimizer.update(model, *batch(comm.rank, 0))
    with pytest.raises(ValueError, match='create another store'):
        optimizer.setup(Model())
    unprepared = create_kvstore_optimizer(optimizers.SGD(), create('local'))
    with pytest.raises(RuntimeError, match=r'has no model\. Call optimizer\.setup'):
        unprepared.update(model, *batch(0, 0))


# --- the same as Chainer's optimizer in one process ---

BOTH = [False, True]


class One(chainer.Chain):
    """One parameter, whose gradient is ``g``."""

    def __init__(self, dtype=np.float32, start=1.):
        super().__init__()
        with self.init_scope():
            self.w = chainer.Parameter(np.full(3, start, dtype))

    def forward(self, g):
        return F.sum(F.cast(self.w, np.float64) * g)


@pytest.mark.mpi(min_size=2)
def test_different_places_of_the_update(create, comm, same_error):
    error = same_error(create_kvstore_optimizer, chainer.optimizers.SGD(), create('dist_sync'),
                       comm.rank == 0)
    assert 'create_kvstore_optimizer update_on_kvstore=True' in str(error)
    assert 'create_kvstore_optimizer update_on_kvstore=False' in str(error)


@pytest.mark.filterwarnings('ignore:Non finite number:UserWarning')
@pytest.mark.parametrize('update_on_kvstore, is_dynamic', [
    (False, False), (False, True), (True, False)])
def test_all_compressed_gradients_are_sent(create, comm, update_on_kvstore, is_dynamic):
    """Also if the loss scale changes, and steps are skipped: nothing else is left to be sent."""
    def gradient(rank, step):
        return np.random.RandomState([rank, step]).randint(-32, 32, (5, 6)).astype('f') / 32

    model = L.Linear(6, 5, nobias=True, initialW=0)
    sgd = optimizers.SGD(1).setup(model)
    kv = create('dist_sync')
    kv.set_gradient_compression({'type': '2bit', 'threshold': .5})
    optimizer = create_kvstore_optimizer(sgd, kv, update_on_kvstore=update_on_kvstore)
    if is_dynamic:
        sgd.loss_scaling(interval=2)
        sgd._loss_scale = 32.
    expected = 0
    for step in range(8):
        if not is_dynamic:
            sgd.set_loss_scale([8., 2., 64.][step % 3])
        x = gradient(comm.rank, step)
        is_skipped = is_dynamic and step == 4
        if is_skipped and comm.rank == comm.size - 1:
            x[1, 2] = np.inf
        with np.errstate(invalid='ignore'):
            optimizer.update(lambda model, x: F.sum(model.W * x), model, x)
        if step and not is_skipped:
            expected -= sum(gradient(rank, step) for rank in range(comm.size)) / comm.size
    residuals, = kv._backend.server.compressor.residuals.values()
    left = sum(comm.allgather_obj(residuals.reshape(5, 6))) / comm.size
    np.testing.assert_allclose(model.W.array, expected + left, atol=1e-5)


class MyRule(optimizers.sgd.SGDRule):
    pass


@pytest.mark.parametrize('prepare, text', [
    (lambda model, sgd: setattr(model.l1.W, 'array', model.l2.W.array.T), '/l1/W, /l2/W share'),
    (lambda model, sgd: setattr(model.l2.W, 'update_rule', MyRule(sgd.hyperparam)), 'own update'),
    (lambda model, sgd: model.l2.W.update_rule.use_fp32_update(), 'own update rule'),
    (lambda model, sgd: sgd.update(lambda: F.sum(model.l1.W)), 'already has states'),
])
def test_models_that_only_workers_can_update(create, comm, same_error, prepare, text):
    for update_on_kvstore in BOTH:
        model = chainer.Chain()
        with model.init_scope():
            model.l1, model.l2 = L.Linear(3, 3), L.Linear(3, 3)
        momentum = optimizers.MomentumSGD(.1).setup(model)
        prepare(model, momentum)
        optimizer = create_kvstore_optimizer(momentum, create('dist_sync'), update_on_kvstore)

        def loss():
            return F.sum(model.l2(model.l1(np.ones((1, 3), 'f'))))  # noqa: B023

        if update_on_kvstore:
            error = same_error(optimizer.update, loss)
            assert isinstance(error, ValueError) and text in str(error)
            assert 'update_on_kvstore=False' in str(error)
        else:
            optimizer.update(loss)
            optimizer.update(loss)


def test_a_change_that_the_store_does_not_know_is_found_later(create, comm, same_error):
    model = One()
    optimizer = create_kvstore_optimizer(
        optimizers.SGD().setup(model), create('dist_sync', bigarray_bound=1), True)
    optimizer.update(model, np.ones(3))
    optimizer.update(model, np.ones(3))
    if comm.size > 1:
        optimizer.add_hook(hooks.GradientLARS())
        error = same_error(optimizer.update, model, np.ones(3))
        assert isinstance(error, ValueError) and 'cannot update shards' in str(error)
        optimizer.remove_hook('GradientLARS')
    optimizer.update(model, np.ones(3))
    model.w.update_rule.hyperparam.lr = 3
    error = same_error(optimizer.update, model, np.ones(3))
    assert isinstance(error, ValueError) and 'own hyperparameters' in str(error)


@pytest.mark.parametrize('update_on_kvstore', BOTH)
def test_a_store_for_each_optimizer(create, comm, same_error, update_on_kvstore):
    kv = create('dist_sync')
    kv.set_updater(lambda key, pushed, stored: None)
    error = same_error(create_kvstore_optimizer, optimizers.SGD(), kv, update_on_kvstore)
    assert isinstance(error, ValueError) and 'already has an updater' in str(error)
    kv = create('dist_sync')
    kv.init('/w', np.zeros(3, 'f'))
    optimizer = create_kvstore_optimizer(optimizers.SGD().setup(One()), kv, update_on_kvstore)
    error = same_error(optimizer.update, optimizer.target, np.ones(3))
    assert isinstance(error, ValueError) and "already has the key '/w'" in str(error)
