"""Bugs in Chainer: missing gradients, and calls that failed."""

import subprocess
import sys
import threading
import warnings
import zipfile

import chainer
import chainer.functions as F
import chainer.links as L
import cloudpickle
import numpy as np
import pytest
from chainer.training.extensions import snapshot_writers
from time_limits import seconds

pytestmark = pytest.mark.mpi_skip


def transposed_convolution(x, W, b, stride, pad, outsize, dilate, groups):  # noqa: N803
    n, _, h, w = x.shape
    _, each, kh, kw = W.shape
    oh, ow = outsize or ((h - 1) * stride + (kh - 1) * dilate + 1 - 2 * pad,
                         (w - 1) * stride + (kw - 1) * dilate + 1 - 2 * pad)
    y = np.zeros((n, each * groups, oh + 2 * pad + stride, ow + 2 * pad + stride))
    x, W = x.reshape(n, groups, -1, h, w), W.reshape(groups, -1, each, kh, kw)  # noqa: N806
    for u, v in np.ndindex(kh, kw):
        products = np.einsum('ngchw,gco->ngohw', x, W[..., u, v]).reshape(n, -1, h, w)
        rows, columns = (slice(k * dilate, k * dilate + stride * (size - 1) + 1, stride)
                         for k, size in [(u, h), (v, w)])
        y[:, :, rows, columns] += products
    return y[:, :, pad:pad + oh, pad:pad + ow] + b[:, None, None]


@pytest.mark.parametrize('needed', [(True, True, True), (True, False, False), (False, True, False)])
@pytest.mark.parametrize(('stride', 'pad', 'outsize', 'dilate', 'groups'), [
    (1, 0, None, 1, 1), (2, 1, None, 1, 1), (2, 1, (6, 8), 1, 1), (2, 1, (5, 7), 1, 1),
    (1, 1, None, 2, 1), (2, 0, None, 1, 2),
])
def test_deconvolution_2d(check, normal, needed, stride, pad, outsize, dilate, groups):
    arguments = dict(stride=stride, pad=pad, outsize=outsize, dilate=dilate, groups=groups)
    check(lambda *xs: F.deconvolution_2d(*xs, **arguments),
          lambda *xs: transposed_convolution(*xs, **arguments),
          normal(2, 2, 3, 4), normal(2, 3, 3, 3, seed=2), normal(3 * groups, seed=3),
          needed=needed)


def test_an_array_is_a_batch_of_its_rows():
    rows = np.arange(6.).reshape(3, 2)
    np.testing.assert_array_equal(chainer.dataset.concat_examples(rows), rows)
    with pytest.raises(ValueError, match='batch is empty'):
        chainer.dataset.concat_examples(rows[:0])


def test_a_type_check_evaluates_expressions():
    class Same(chainer.Function):
        def check_type_forward(self, in_types):
            assert in_types.size().eval() == 1
            size = chainer.utils.type_check.Variable(np.prod, 'size')
            chainer.utils.type_check.expect(in_types[0].ndim == 2, size(in_types[0].shape) == 6)

        def forward(self, xs):
            return xs

    x = np.ones((2, 3), 'f')
    np.testing.assert_array_equal(Same()(x).array, x)
    with pytest.raises(chainer.utils.type_check.InvalidType, match='ndim'):
        Same()(x[None])
    with pytest.raises(chainer.utils.type_check.InvalidType, match='size'):
        Same()(x[:1])


def test_regions_of_interest_outside_of_the_image():
    """The gradient is that of a small difference; some regions end before they begin."""
    random = np.random.RandomState(0)
    for _ in range(20):
        x, roi = random.normal(size=(1, 1, 2, 3)), np.r_[0., random.randint(-4, 6, 4)][None]
        shape = [int(n) for n in random.randint(1, 4, 2)]
        variable = chainer.Variable(x)
        y = F.roi_pooling_2d(variable, roi, *shape, 1.)
        y.grad = gy = random.normal(size=y.shape)
        y.backward()
        for i in np.ndindex(x.shape):
            moved = x.copy()
            moved[i] += 1e-6
            change = F.roi_pooling_2d(moved, roi, *shape, 1.).array - y.array
            assert variable.grad[i] == pytest.approx(np.sum(change * gy) / 1e-6, abs=1e-5)


def test_no_ids():
    weights = chainer.Variable(np.ones((3, 2)))
    F.sum(F.embed_id(np.zeros(0, 'i'), weights)).backward()
    assert not weights.grad.any()


@pytest.mark.parametrize('used', range(4))
def test_transpose_sequence(used):
    """A loss that uses one output has gradients of zero elsewhere."""
    xs = [chainer.Variable(np.random.RandomState(n).normal(size=(n, 2))) for n in (4, 2, 1)]
    F.sum(F.transpose_sequence(xs)[used] ** 2).backward()
    for x in xs:
        wanted = np.zeros(x.shape)
        wanted[used:used + 1] = 2 * x.array[used:used + 1]
        np.testing.assert_array_equal(x.grad, wanted)


@pytest.mark.parametrize('name', ['ZippedImageDataset', 'MultiZippedImageDataset'])
def test_zipped_images(tmp_path, name):
    image = pytest.importorskip('PIL.Image')
    path = str(tmp_path / 'images.zip')
    with zipfile.ZipFile(path, 'w') as archive:
        for value in range(4):
            with archive.open(f'{value}.png', 'w') as file:
                image.fromarray(np.full((2, 3, 3), value, np.uint8)).save(file, 'png')
    data = getattr(chainer.datasets, name)(path if name[0] == 'Z' else [path])
    iterator = chainer.iterators.SerialIterator(data, 2, repeat=False)  # shuffles
    images = [x for batch in iterator for x in batch]
    assert sorted(x.max() for x in images) == [0, 1, 2, 3]
    assert {x.shape for x in images} == {(3, 2, 3)}


@pytest.mark.parametrize('kind, names', [('ThreadWriter', 'a'), ('ThreadQueueWriter', 'ab')])
def test_a_snapshot_written_later(kind, names, tmp_path):
    """Its arrays are those of its iteration, although updates change them before it is written."""
    may_write = threading.Event()

    def save(filename, target, **kwargs):
        assert may_write.wait(60)
        chainer.serializers.save_npz(filename, target)

    writer = getattr(snapshot_writers, kind)(savefun=save)
    link = L.Linear(2, 2, initialW=0)
    for name in names:
        serializer = chainer.serializers.DictionarySerializer()
        serializer.save(link)
        writer(name, str(tmp_path), serializer.target)
        link.W.array += 1
    may_write.set()
    writer.finalize()
    for n, name in enumerate(names):
        assert (np.load(tmp_path / name)['W'] == n).all()


@pytest.mark.filterwarnings('ignore:.* multi-threaded, use of fork:DeprecationWarning')
def test_a_snapshot_of_the_queue_of_a_process(tmp_path):
    """A thread pickles it for the process."""
    writer = snapshot_writers.ProcessQueueWriter()
    x = np.zeros(1 << 20, 'f')
    for n in range(3):
        writer(str(n), str(tmp_path), {'x': x, 'text': 'a'})
        x += 1
    writer.finalize()
    for n in range(3):
        assert (np.load(tmp_path / str(n))['x'] == n).all()


@pytest.mark.parametrize('dtype', ['e', 'f', 'd'])
def test_clipping_by_the_norm_of_all_gradients(dtype):
    """The square of each gradient is beyond float16."""
    model = chainer.Sequential(*[L.Scale(W_shape=(4,)) for _ in range(3)])
    optimizer = chainer.optimizers.SGD(1.).setup(model)
    optimizer.add_hook(chainer.optimizer_hooks.GradientClipping(1.))
    for param in model.params():
        param.array = np.zeros(4, dtype)
        param.grad = np.full(4, 300, dtype)
    optimizer.update()
    for param in model.params():
        np.testing.assert_allclose(param.array, -1 / np.sqrt(12), rtol=1e-3)


@pytest.mark.parametrize('dtype', ['e', 'f', 'd'])
@pytest.mark.parametrize('gradient', [0, 1e-5, 1e-3, 300])
def test_rate_of_lars(dtype, gradient):
    param = chainer.Parameter(np.ones(4, dtype))
    param.grad = np.full(4, gradient, dtype)
    chainer.optimizer_hooks.GradientLARS(weight_decay=.5)(None, param)
    expected = (gradient + .5) * 2 / (1e-9 + 2 * gradient + .5 * 2)
    np.testing.assert_allclose(param.grad, expected, rtol=2e-3 if dtype == 'e' else 1e-6)
    param.grad[...] = 0
    chainer.optimizer_hooks.GradientLARS()(None, param)
    assert (param.grad == 0).all()


def test_the_rate_of_adam_before_the_first_update():
    adam = chainer.optimizers.Adam().setup(L.Linear(1, 1))
    rate = adam.alpha_t
    adam.update(lambda: chainer.functions.sum(adam.target.W))
    assert rate == adam.alpha_t


def test_strides_of_foreign_memory():
    x = np.frombuffer(bytearray(np.arange(6, dtype='f').tobytes()), 'f')
    y = F.as_strided(chainer.Variable(x), (2, 2), (3, 1))
    np.testing.assert_array_equal(y.array, [[0, 1], [3, 4]])
    y = F.as_strided(F.tanh(chainer.Variable(x)), (2, 2), (3, 1))
    np.testing.assert_allclose(y.array, np.tanh([[0, 1], [3, 4]]), 1e-6)


@pytest.mark.parametrize('args', [(), (lambda: pytest.fail('the loss was computed'),)])
def test_update_before_setup(args):
    with pytest.raises(RuntimeError, match='Optimizer is not set up'):
        chainer.optimizers.Adam().update(*args)


@pytest.mark.parametrize('link, name', [
    (len, 'len'), (chainer.links.Linear, 'Linear'), (None, 'NoneType')])
def test_setup_of_something_else(link, name):
    with pytest.raises(TypeError, match=f'expects a chainer.Link, not {name}. Pass loss'):
        chainer.optimizers.Adam().setup(link)


def test_the_warning_about_an_evaluator_that_repeats():
    model = chainer.links.Classifier(chainer.links.Linear(2, 2))
    with pytest.warns(UserWarning, match=(
            r'the iterator main is set to `True`.*check the configuration of iterators$')) as found:
        chainer.training.extensions.Evaluator(chainer.iterators.SerialIterator([1], 1), model)
    assert found[0].filename == __file__
    with warnings.catch_warnings(record=True) as found:
        chainer.training.extensions.Evaluator(
            chainer.iterators.SerialIterator([1], 1, repeat=False), model)
    assert not found


def test_a_model_of_a_script_in_cloudpickle():
    class Net(chainer.Chain):
        def forward(self, x):
            return x + 1

    code = 'import chainer, pickle, sys; print(pickle.load(sys.stdin.buffer)()(1))'
    done = subprocess.run([sys.executable, '-c', code], input=cloudpickle.dumps(Net),
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=seconds(60))
    assert done.stdout == b'2\n'
