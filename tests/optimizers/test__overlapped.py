"""Overlap gives bitwise identical results for any model, and leaves nothing behind."""

import threading

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from chainer import _backprop_utils

import chainermn
from chainermn.links import create_mnbn_model
from chainermn.optimizers import _overlapped

pytestmark = pytest.mark.mpi(min_size=2)  # one rank exchanges nothing

ALWAYS = 'always'  # also where the ranks need all cores
N_IN, N_OUT, BATCH = 6, 4, 5
BUCKET_MB = 200 / 2**20  # so that small models have several buckets


class Called(chainer.Chain):
    """Calls its links by a function given to it."""

    def __init__(self, call, **links):
        super().__init__()
        with self.init_scope():
            for name, link in links.items():
                setattr(self, name, link)
        self.call = call

    def forward(self, *args):
        return self.call(self, *args)


def mlp():
    return chainer.Sequential(L.Linear(N_IN, 8), F.tanh, L.Linear(8, 7), F.tanh,
                              L.Linear(7, N_OUT))


def lazy():
    return chainer.Sequential(L.Linear(None, 8), L.BatchNormalization(8), F.tanh,
                              L.Linear(None, N_OUT))


def called_three_times():
    def call(m, x):
        h = F.tanh(m.first(x))
        for _ in range(3):
            h = F.tanh(m.again(h))
        return m.last(h)

    return Called(call, first=L.Linear(N_IN, 8), again=L.Linear(8, 8), last=L.Linear(8, N_OUT))


def tied():
    """The second layer uses the parameter of the first outside of the first one's forward."""
    def call(m, x):
        return m.last(F.linear(F.tanh(m.first(x)), m.first.W.T, m.b.b))

    return Called(call, first=L.Linear(N_IN, 8), b=L.Bias(shape=(N_IN,)),
                  last=L.Linear(N_IN, N_OUT))


def by_chainer_grad():
    """A penalty on the gradient of the output by the input, so a second derivative."""
    def call(m, x):
        x = chainer.Variable(x)
        y = m.last(F.sigmoid(m.first(x)))
        gx, = chainer.grad([y], [x], enable_double_backprop=True)
        return y + F.broadcast_to(F.expand_dims(F.sum(gx ** 2, axis=1), 1), y.shape)

    return Called(call, first=L.Linear(N_IN, 8), last=L.Linear(8, N_OUT))


def by_gradients_of_parameters():
    """One step of gradient descent inside the loss."""
    def call(m, x):
        y = m.last(F.tanh(m.first(x)))
        gw, = chainer.grad([F.sum(y ** 2)], [m.last.W], enable_double_backprop=True)
        return F.linear(F.tanh(m.first(x)), m.last.W - 0.1 * gw, m.last.b)

    return Called(call, first=L.Linear(N_IN, 8), last=L.Linear(8, N_OUT))


def forgotten():
    """F.forget runs backward, and so stores gradients, inside backward."""
    def call(m, x):
        h = F.forget(lambda x: F.tanh(m.first(x)), chainer.Variable(x))
        return m.last(F.tanh(m.both(F.forget(m.both, h))))

    return Called(call, first=L.Linear(N_IN, 8), both=L.Linear(8, 8), last=L.Linear(8, N_OUT))


def backward_in_loss():
    """A loss that computes gradients of its own, and clears them."""
    def call(m, x):
        F.sum(m.first(x)).backward(retain_grad=True)
        m.cleargrads()
        return m.last(F.tanh(m.first(x)))

    return Called(call, first=L.Linear(N_IN, 8), last=L.Linear(8, N_OUT))


def in_threads():
    def call(m, x):
        h = F.tanh(m.first(x))
        parts = [None, None]

        def branch(i, link):
            parts[i] = F.tanh(link(h))

        threads = [threading.Thread(target=branch, args=(i, link))
                   for i, link in enumerate((m.left, m.right))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return m.last(parts[0] + parts[1] + m.left(h))

    return Called(call, first=L.Linear(N_IN, 8), left=L.Linear(8, 8), right=L.Linear(8, 8),
                  last=L.Linear(8, N_OUT))


#: The laws of training have others.
MODELS = [called_three_times, tied, by_chainer_grad, by_gradients_of_parameters, forgotten,
          backward_in_loss, in_threads]
#: All gradients of these are sent during backward.
EARLY = [called_three_times, tied, by_chainer_grad, in_threads]


def batch_of(rank, update):
    rng = np.random.RandomState(10 * update + rank)
    x = rng.standard_normal((BATCH, N_IN)).astype(np.float32)
    return x, rng.randint(0, N_OUT, BATCH).astype(np.int32)


def prepared(comm, make, optimizer=None, **options):
    np.random.seed(5 + comm.rank)
    model = L.Classifier(make())
    actual = chainer.optimizers.MomentumSGD(0.1) if optimizer is None else optimizer()
    return chainermn.create_multi_node_optimizer(actual, comm, **options).setup(model)


def state_of(optimizer):
    """Bits of parameters, gradients, persistent values and the state of the optimizer."""
    target = {}
    for name, part in (('model', optimizer.target), ('optimizer', optimizer)):
        chainer.serializers.DictionarySerializer(target)[name].save(part)
    for path, param in optimizer.target.namedparams():
        target[f'gradient {path}'] = param.grad if param.is_initialized else None
    # What compression has not sent yet is the same, but kept by bucket.
    return {key: None if value is None else (value.dtype, np.asarray(value).tobytes())
            for key, value in target.items() if 'compression' not in key}


def same(a, b):
    assert a.keys() == b.keys()
    assert [key for key in a if a[key] != b[key]] == []


def trained(comm, make, n_updates=5, each=lambda optimizer, n: None, **options):
    optimizer = prepared(comm, make, **options)
    states = []
    for n in range(n_updates):
        np.random.seed(77 + n)
        optimizer.update(optimizer.target, *batch_of(comm.rank, n))
        each(optimizer, n)
        states.append(state_of(optimizer))
    return optimizer, states


def as_without(comm, make, **options):
    """Trains with and without overlap; returns the optimizer with it, after all bits were equal."""
    _, expected = trained(comm, make, **options)
    optimizer, states = trained(comm, make, overlap=ALWAYS, bucket_mb=BUCKET_MB, **options)
    for a, b in zip(states, expected, strict=True):
        same(a, b)
    assert _backprop_utils.backprop_step.__module__ == _backprop_utils.__name__
    return optimizer


@pytest.mark.sample(8)
@pytest.mark.parametrize('make', MODELS)
def test_models(comm, make):
    optimizer = as_without(comm, make, zero_fill=make is not tied)
    if make in EARLY:
        assert optimizer.n_early == len(optimizer.buckets) > 1


def test_buckets_have_the_order_of_backward(comm):
    optimizer = as_without(comm, mlp)
    params = dict(optimizer.target.namedparams())
    layers = optimizer.target.predictor
    found = [id(params[path]) for bucket in optimizer.buckets for path in bucket]
    # PyTorch's kernels finish the gradients of the bias first.
    assert [{*found[:2]}, {*found[2:4]}, {*found[4:]}] == [
        {id(layers[i].W), id(layers[i].b)} for i in (4, 2, 0)]
    assert optimizer.n_early == len(optimizer.buckets) >= 3


def test_gradients_within_the_backward_of_a_function(comm):
    """They are of the same graph, but nothing that the update uses."""
    class Inner(chainer.FunctionNode):
        def __init__(self, y, params):
            self.y, self.params = y, params

        def forward(self, inputs):
            return inputs[0].copy(),

        def backward(self, indexes, grads):
            with chainer.force_backprop_mode():
                inner = chainer.grad([F.sum(self.y)], self.params)
            return grads[0] * (1 + 0.01 * float(inner[0].array.sum())),

    def make():
        def call(m, x):
            h = F.tanh(m.mid(F.tanh(m.first(x))))
            return m.last(Inner(h, [m.mid.W, m.first.W]).apply((h,))[0])

        return Called(call, first=L.Linear(N_IN, 8), mid=L.Linear(8, 8), last=L.Linear(8, N_OUT))

    optimizer = as_without(comm, make)
    assert optimizer.n_early == len(optimizer.buckets)


def test_a_layer_that_one_rank_skips_without_zero_fill(comm):

    def make():
        def call(m, x):
            h = F.tanh(m.first(x))
            return m.last(F.tanh(m.at_times(h)) if m.skip != comm.rank else h)

        return Called(call, first=L.Linear(N_IN, 8), at_times=L.Linear(8, 8),
                      last=L.Linear(8, N_OUT))

    def run(**options):
        optimizer = prepared(comm, make, zero_fill=False, **options)
        model = optimizer.target
        texts = []
        for n in range(6):
            model.predictor.skip = comm.size - 1 if n in (2, 3) else None
            try:
                optimizer.update(model, *batch_of(comm.rank, n))
            except ValueError as error:
                texts.append(str(error).replace('queue_gradients', 'multi_node_mean_grad'))
        return texts, state_of(optimizer)

    texts, state = run(overlap=ALWAYS, bucket_mb=BUCKET_MB)
    expected, expected_state = run()
    assert texts == expected
    assert len(texts) == 2
    same(state, expected_state)


def test_multi_node_batch_normalization_where_ranks_differ(comm):
    """A rank that skips a layer holds back its buckets, but not the collectives of others."""
    def make():
        def call(m, x):
            h = m.bn(m.first(x))
            m.n_calls = getattr(m, 'n_calls', 0) + 1
            if m.n_calls % comm.size != comm.rank:
                h = F.tanh(m.at_times(h))
            return m.last(m.bn2(F.tanh(h)))

        return create_mnbn_model(
            Called(call, first=L.Linear(N_IN, 8), bn=L.BatchNormalization(8),
                   at_times=L.Linear(8, 8), bn2=L.BatchNormalization(8),
                   last=L.Linear(8, N_OUT)), comm)

    as_without(comm, make, n_updates=8)


def test_debug_mode(comm):
    def run(**options):
        optimizer = prepared(comm, mlp, **options)
        model = optimizer.target
        optimizer.update(model, *batch_of(comm.rank, 0))
        chainer.set_debug(True)
        try:
            with pytest.raises(ValueError, match='not finite') as info:
                optimizer.update(lambda: F.sum(F.absolute(model.predictor[0].W)) * np.float32(
                    np.inf if comm.rank == 0 else 1))
        finally:
            chainer.set_debug(False)
        return str(info.value)

    with np.errstate(invalid='ignore'):
        text = run(overlap=ALWAYS, bucket_mb=BUCKET_MB)
        assert text.replace('queue_gradients', 'multi_node_mean_grad') == run()


@pytest.mark.parametrize('change', [
    {'bucket_mb': 0}, {'bucket_mb': -1}, {'bucket_mb': float('nan')}, {'bucket_mb': 'large'},
    {'bucket_mb': True}, {'double_buffering': True}, {'overlap': 'often'}, {'overlap': 1},
], ids=str)
def test_invalid_arguments(comm, change):
    with pytest.raises((ValueError, TypeError), match=r'bucket_mb must|with overlap|overlap must'):
        chainermn.create_multi_node_optimizer(
            chainer.optimizers.SGD(), comm, **{'overlap': ALWAYS, **change})


def test_first_and_last_buckets_are_smaller():
    mb = 2**20
    buckets = _overlapped._assigned({f'/{n}': mb for n in range(200)}, 25 * mb)
    assert [path for bucket in buckets for path in bucket] == [f'/{n}' for n in range(200)]
    sizes = [len(bucket) for bucket in buckets]
    largest = sizes.index(25)
    assert sizes[:largest] == sorted(sizes[:largest]) and sizes[0] == 1
    last = sizes[largest:]
    assert last == sorted(last, reverse=True) and sizes[-1] == 1
    assert len(sizes) < 30


def test_buckets_of_large_parameters():
    mb = 2**20
    sizes = {'/a': 20 * mb, '/b': 8, '/c': 20 * mb, '/d': 8}
    assert _overlapped._assigned(sizes, 25 * mb) == [['/a', '/b'], ['/c', '/d']]
    assert _overlapped._assigned(sizes, 1) == [['/a'], ['/b'], ['/c'], ['/d']]


def test_where_nothing_can_be_hidden(comm):
    """With overlap=True it depends on the cores whether it is begun early; with the same bits."""
    _, expected = trained(comm, lazy)
    optimizer, states = trained(comm, lazy, overlap=True, bucket_mb=BUCKET_MB)
    for a, b in zip(states, expected, strict=True):
        same(a, b)
    is_profitable = comm.mean_queue().is_profitable
    assert comm.allgather_obj(is_profitable) == [is_profitable] * comm.size
    assert (len(optimizer.buckets) > 0) == is_profitable
    assert (optimizer.n_early > 0) == is_profitable
