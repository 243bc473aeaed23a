"""What programs do with results, labels and special values in runs: the same as with NumPy."""

import chainer
import chainer.functions as F
import numpy as np
import pytest
from chainer import Variable

pytestmark = [pytest.mark.mpi_skip, pytest.mark.filterwarnings('ignore:.*encountered')]

MODES = 'auto', 'never'


def scores():
    return Variable(np.array([[1, 2, 3], [0, -1, 2]], 'f'))


def labels_are_reused(x):
    labels = np.array([0, 1], 'i')
    loss = F.softmax_cross_entropy(x, labels)
    labels[...] = 2
    loss.backward()
    return x.grad


def ids_are_reused(x):
    ids = np.array([0, 1, 1], 'i')
    y = F.embed_id(ids, x)
    ids[...] = 0
    F.sum(y).backward()
    return x.grad


def scores_are_replaced(x):
    loss = F.softmax_cross_entropy(x, np.array([0, 1]))
    x.array = x.array / 2
    loss.backward()
    return x.grad


def a_hook_watches_changed_scores(x):
    h = x * 1
    loss = F.softmax_cross_entropy(h, np.array([0, 1]))
    h.array[...] /= 2
    with chainer.function_hooks.TimerHook():
        loss.backward()
    return x.grad


def an_ignored_row(x):
    loss = F.softmax_cross_entropy(x, np.array([0, -1], 'i'))
    loss.grad = np.array(np.nan, 'f')
    loss.backward()
    return x.grad


@pytest.mark.parametrize('program', [
    labels_are_reused, ids_are_reused, scores_are_replaced, a_hook_watches_changed_scores,
    an_ignored_row])
def test_gradients_of_labels(program):
    found = []
    for mode in MODES:
        with chainer.using_config('use_torch', mode):
            found.append(program(scores()))
    np.testing.assert_allclose(*found, 1e-6, 1e-7)


FUNCTIONS = {
    'abs': abs, 'absolute_error': lambda x: F.absolute_error(x, np.zeros(x.shape, 'f')),
    'mean_absolute_error': lambda x: F.mean_absolute_error(x, np.zeros(x.shape, 'f')),
    'elu': F.elu, 'leaky_relu': F.leaky_relu,
    'layer_normalization': lambda x: F.layer_normalization(
        x, np.ones(x.shape[1], 'f'), np.zeros(x.shape[1], 'f'))}


@pytest.mark.parametrize('name', FUNCTIONS)
@pytest.mark.parametrize('value', [np.nan, 1e19, -3e38])
def test_gradients_of_special_values(name, value):
    found = []
    for mode in MODES:
        with chainer.using_config('use_torch', mode):
            x = Variable(np.array([[value, 1, -2]], 'f'))
            y = FUNCTIONS[name](x)
            y.grad = np.ones(y.shape, 'f')
            y.backward()
            found.append([y.array, x.grad])
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, 1e-5, 1e-6)


def test_broadcast_results_are_read_only():
    y = F.broadcast_to(F.tanh(Variable(np.zeros((1, 3), 'f'))), (2, 3))
    with pytest.raises(ValueError, match='read-only'):
        y.array[0, 0] = 5


@pytest.mark.parametrize('call', [
    lambda x: F.softmax_cross_entropy(x, np.array([0, 1]), ignore_label=None),
    lambda x: F.huber_loss(x, x.array, 0), lambda x: F.softmax_cross_entropy(
        x, np.array([0, 1]), cache_score=False)])
def test_valid_options_do_not_warn(call):
    with chainer.using_config('use_torch', 'never'):
        expected = call(scores()).array
    np.testing.assert_allclose(call(scores()).array, expected, 1e-6)


@pytest.mark.parametrize('call, error', [
    (lambda x: x[..., ...], IndexError), (lambda x: F.broadcast_to(x[:, :1], (2, -1)), ValueError),
    (lambda x: F.split_axis(x, [1.5], 1), TypeError)])
def test_invalid_options(call, error):
    with pytest.raises(error):
        call(F.tanh(scores()))


@pytest.mark.parametrize('mode', MODES)
def test_a_cut_that_is_undone(mode):
    x = Variable(np.array([1., 2.], 'f'))
    with chainer.using_config('use_torch', mode):
        h = F.tanh(x * 2)
        creator = h.node.creator_node
        h.node.creator_node = None
        h.node.creator_node = creator
        F.sum(h * h).backward()
    h = np.tanh(2 * x.array)
    np.testing.assert_allclose(x.grad, 4 * h * (1 - h * h), rtol=1e-4)


@pytest.mark.parametrize('is_cut', [True, False])
def test_losses_that_are_stored_do_not_fragment_memory(is_cut, python):
    pytest.importorskip('torch')
    python(f'''
import chainer, numpy as np
import chainer.functions as F
def resident():
    with open('/proc/self/statm') as file:
        return int(file.read().split()[1]) * 4096 / 1e6
x, stored = chainer.Variable(np.ones((1, 1_000_000), 'f')), []
for step in range(200):
    loss = F.sum(F.tanh(x))
    loss.backward()
    x.cleargrad()
    if {is_cut}:
        loss.unchain_backward()
        stored.append(loss)
    else:
        stored.append(loss.array)
    if step == 50:
        before = resident()
assert resident() < before + 100, (before, resident())
''')
