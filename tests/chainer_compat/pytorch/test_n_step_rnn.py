"""Recurrent layers agree with Chainer's, with any lengths, dropout, and second derivatives."""

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest

torch = pytest.importorskip('torch')

pytestmark = pytest.mark.mpi_skip

LINKS = [L.NStepLSTM, L.NStepBiLSTM, L.NStepGRU, L.NStepBiGRU, L.NStepRNNTanh, L.NStepRNNReLU,
         L.NStepBiRNNTanh, L.NStepBiRNNReLU]


def with_own_rnn(link):
    """Return a subclass with its own ``rnn``, for which only functions call PyTorch."""
    return type(link.__name__, (link,), {'rnn': lambda self, *args: link.rnn(self, *args)})


def draw(*shape, dtype='d', seed=0):
    return np.random.RandomState(seed).standard_normal(shape).astype(dtype)


def network(link, layers, dropout, dtype):
    """Return a function of states and sequences, the first axes of the states, and the link."""
    with chainer.using_config('dtype', np.dtype(dtype)):
        model = link(layers, 3, 4, dropout)
    # Biases are zeros otherwise.
    for number, parameter in enumerate(model.params()):
        parameter.array[...] = draw(*parameter.shape, seed=number) / 2
    n_states = 2 if 'LSTM' in link.__name__ else 1
    directions = 2 if 'Bi' in link.__name__ else 1

    def compute(*inputs):
        *out, ys = model(*inputs[:n_states], list(inputs[n_states:]))
        return *out, *ys

    return compute, [layers * directions] * n_states, model


def arrays(sizes, lengths, dtype):
    states = [draw(size, len(lengths), 4, dtype=dtype, seed=i)
              for i, size in enumerate(sizes)]
    return *states, *(draw(length, 3, dtype=dtype, seed=length) for length in lengths)


def test_values_and_gradients(agree):
    for number, link in enumerate([*LINKS, *map(with_own_rnn, LINKS)]):
        for layers, dropout, lengths, dtype in [
            (2, .3, (5, 3, 2), 'd'), (1, 0., (3, 3), 'f'), (1, 0., (1,), 'd'),
            (2, 0., (2, 4, 1), 'f'), (2, .3, (2, 9, 4, 9), 'f'), (1, 0., (6, 5, 6), 'f'),
            (1, 0., (8, 8, 8, 4, 4, 3), 'f'),
        ][:7 if number % len(LINKS) < 2 else 2]:
            f, sizes, _ = network(link, layers, dropout, dtype)
            agree(f, *arrays(sizes, lengths, dtype))


def test_float16_is_computed_by_chainer(agree):
    f, sizes, _ = network(L.NStepLSTM, 1, 0., 'e')
    agree(f, *arrays(sizes, (3, 2), 'e'), is_used=False, second=False)


def test_gradients_of_some_results():
    """Gradients of parameters through a final state or the output of one sequence, twice."""
    for result in 0, 1, 3:
        found = []
        for mode in 'never', 'auto':
            f, sizes, model = network(L.NStepLSTM, 1, 0., 'd')
            with chainer.using_config('use_torch', mode):
                results = f(*arrays(sizes, (1, 2), 'd'))
                loss = F.sum(results[result] ** 2)
                if mode == 'never':  # Chainer fails if some sequences have no gradient
                    loss += sum(0 * F.sum(y) for y in results)
                loss.backward(retain_grad=True)
                loss.backward(retain_grad=True)
            found.append([p.grad for p in model.params()])
        for a, b in zip(*found, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


def test_forget_and_no_backprop(operators):
    f, sizes, model = network(L.NStepLSTM, 2, 0., 'd')
    inputs = [chainer.Variable(x) for x in arrays(sizes, (3, 2), 'd')]
    found = []
    for mode, forget in [('never', False), ('auto', True)]:
        model.cleargrads()
        with chainer.using_config('use_torch', mode), operators() as names:
            ys = F.forget(lambda *v: tuple(f(*v)), *inputs) if forget else f(*inputs)
            sum(F.sum(y * y) for y in ys).backward()
        assert bool(names) == forget
        found.append([y.array for y in ys] + [p.grad for p in model.params()])
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)
    with chainer.no_backprop_mode():
        for a, b in zip(f(*inputs), ys, strict=True):
            np.testing.assert_array_equal(a.array, b.array)
            assert a.creator is None


def gradients_of(model, compute, hold):
    """Return the gradients by Chainer and by PyTorch; parameters in ``hold`` need none."""
    for path, param in model.namedparams():
        needs = not any(path.endswith(name) for name in hold)
        param._requires_grad = param.node._requires_grad = needs
    found = []
    for mode in 'never', 'auto':
        model.cleargrads()
        with chainer.using_config('use_torch', mode):
            compute().backward()
        found.append({path: param.grad for path, param in model.namedparams()})
    return found


@pytest.mark.parametrize('link', LINKS)
def test_parameters_without_gradient(link):
    """PyTorch has one array for the weights of all gates, and one for their biases."""
    f, sizes, model = network(link, 1, 0., 'd')
    inputs = arrays(sizes, (3, 2), 'd')
    for hold in [], ['w0'], ['w1', 'b0'], ['b0', 'b1']:
        expected, found = gradients_of(model, lambda: F.sum(F.concat(
            f(*inputs)[len(sizes):], axis=0) ** 2), hold)
        for path in expected:
            assert (found[path] is None) == any(path.endswith(name) for name in hold)
            if found[path] is not None:
                np.testing.assert_allclose(found[path], expected[path], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize('link', LINKS)
@pytest.mark.parametrize('lengths', [(3, 3), (3, 2), (2, 3), (1,), (4,)])
def test_arrays_may_change_before_backward(link, lengths):
    """States and sequences, and all results, as when the program passes on a state in place."""
    f, sizes, model = network(link, 1, 0., 'f')

    def compute():
        inputs = arrays(sizes, lengths, 'f')
        results = f(*inputs)
        loss = F.sum(F.concat([F.reshape(y, (-1, 4)) for y in results], axis=0) ** 2)
        for array in (*inputs, *(y.array for y in results)):
            array[...] = 9
        return loss

    expected, found = gradients_of(model, compute, [])
    for path in expected:
        np.testing.assert_allclose(found[path], expected[path], rtol=1e-4, atol=1e-5)
