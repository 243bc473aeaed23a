"""bfloat16 in kernels: the products of rounded operands, summed up in float32.

The references are Chainer's NumPy code in float64, with operands rounded here, and PyTorch.
"""

import warnings

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest

torch = pytest.importorskip('torch')

from chainer_compat.pytorch.tensors import compute_dtype, gpu_arrays  # noqa: E402

pytestmark = pytest.mark.mpi_skip

@pytest.fixture(params=[True, False], ids=['instructions', 'no instructions'])
def has_instructions(request, monkeypatch):
    """Compute as on processors with or without instructions for bfloat16."""
    monkeypatch.setattr(compute_dtype, 'has_instructions', lambda: request.param)
    monkeypatch.setattr(compute_dtype, 'warn_once', lambda: None)
    return request.param


@pytest.fixture
def slow_processor(monkeypatch):
    """Pretend that this process has not warned yet, and that it has a slow processor."""
    monkeypatch.setattr(compute_dtype, 'has_instructions', lambda: False)
    compute_dtype.warn_once.cache_clear()
    yield
    compute_dtype.warn_once.cache_clear()


def in_bfloat16():
    return chainer.using_config('torch_compute_dtype', 'bfloat16')


@pytest.fixture(autouse=True)
def seeded():
    np.random.seed(0)  # Chainer draws initial weights from it


def draw(*shape, seed=0):
    return np.random.RandomState(seed).standard_normal(shape).astype('f')


def rounded(x):
    """Round float32 to bfloat16, to nearest and ties to even, as float64."""
    bits = x.view('u4').astype('u8')
    bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000
    return bits.astype('u4').view('f').astype('d')


def assert_close(found, expected, tolerance):
    """Compare with a tolerance relative to the largest element."""
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * abs(b).max(initial=1e-30))


def backward(f, inputs, gy):
    """Return the output of ``f`` and the gradients of its inputs."""
    variables = [chainer.Variable(x) for x in inputs]
    y = f(*variables)
    y.grad = gy.astype(y.dtype)
    y.backward()
    return [y.array, *(v.grad for v in variables)]


def test_second_derivatives(has_instructions):
    for f, *inputs in [
        (lambda *v: F.convolution_2d(*v, stride=2), draw(2, 3, 7, 8), draw(4, 3, 3, 3), draw(4)),
        (lambda *v: F.deconvolution_2d(*v, pad=1), draw(2, 3, 5, 4), draw(3, 4, 3, 3)),
        (F.linear, draw(5, 8), draw(7, 8), draw(7)),
        (lambda x, h, *w: F.n_step_gru(1, 0., h, [w[:6]], [w[6:]], [x[:2], x[2:]])[1][0],
         draw(4, 4), draw(1, 2, 5), *(draw(5, 4 if i < 3 else 5, seed=i) for i in range(6)),
         *(draw(5, seed=i) for i in range(6))),
    ]:
        found = []
        for dtype, value in ('d', None), ('f', 'bfloat16'):
            variables = [chainer.Variable(x.astype(dtype)) for x in inputs]
            with chainer.using_config('torch_compute_dtype', value):
                y = f(*variables)
                first = chainer.grad([F.sum(F.sin(y))], variables, enable_double_backprop=True)
                second = chainer.grad([sum(F.sum(g * g) for g in first)], variables)
            found.append([g.array for g in second])
        assert_close(found[1], found[0], 5e-2)


def recurrent(link, n_layers, n_in=6, n_out=8):
    """Return a link with random biases."""
    model = link(n_layers, n_in, n_out, 0)
    for number, parameter in enumerate(model.params()):
        parameter.array[...] = draw(*parameter.shape, seed=number) / 3
    return model


def run(model, xs):
    """Return the outputs, and the gradients of inputs and parameters, of a weighted sum."""
    model.cleargrads()
    xs = [chainer.Variable(x) for x in xs]
    *_, ys = model(*[None] * (2 if 'LSTM' in type(model).__name__ else 1), xs)
    weights = abs(draw(sum(map(len, xs)), ys[0].shape[1], seed=9)).astype(ys[0].dtype)
    F.sum(F.concat(ys, 0) * weights).backward()
    return [y.array for y in ys] + [x.grad for x in xs], [p.grad for p in model.params()]


def widened(model, change):
    """Return a copy of a link in float64."""
    copied = model.copy('copy')
    for parameter in copied.params():
        parameter.array = change(parameter.array)
    return copied


@pytest.mark.parametrize('link', [
    L.NStepLSTM, L.NStepBiLSTM, L.NStepGRU, L.NStepBiGRU, L.NStepRNNTanh, L.NStepBiRNNTanh],
    ids=lambda link: link.__name__)
def test_recurrent_layers(link, has_instructions):
    for n_layers, lengths in (1, (5, 5)), (1, (4, 6, 1)), (1, (2, 7, 6, 6)), (2, (3, 5)):
        model = recurrent(link, n_layers)
        xs = [draw(length, 6, seed=i) for i, length in enumerate(lengths)]
        plain = run(model, xs)
        with in_bfloat16():
            found = run(model, xs)
        assert {a.dtype.char for part in found for a in part} == {'f'}
        with chainer.using_config('use_torch', 'never'):
            wide = run(widened(model, lambda a: a.astype('d')), [x.astype('d') for x in xs])
            same = run(widened(model, rounded), [rounded(x) for x in xs])
        for part, reference in zip(found, wide, strict=True):
            assert_close(part, reference, 4e-2)
        if n_layers == 1:  # otherwise, the input of the second layer is also rounded
            # Some time steps have as many sequences as others, and are one call.
            is_native = has_instructions and 'LSTM' in link.__name__ and len(lengths) != 3
            for part, reference in zip(found, same, strict=True):
                assert_close(part, reference, 4e-2 if is_native else 1e-4)
        assert any((a != b).any() for a, b in zip(found[0], plain[0], strict=True))


def test_gradients_of_long_sequences():
    """PyTorch's autocast adds the gradients of all steps in bfloat16; off by 0.1 and more here."""
    for link in L.NStepLSTM, L.NStepGRU, L.NStepRNNTanh:
        # PyTorch's kernel of float32 sums is that for equal lengths, on processors with it.
        for lengths in [(300, 300), (300, 299)][link is L.NStepLSTM:]:
            model = recurrent(link, 1)
            xs = [draw(length, 6, seed=i) for i, length in enumerate(lengths)]
            expected = run(model, xs)[1]
            for has in True, False:
                with pytest.MonkeyPatch.context() as patch, in_bfloat16():
                    patch.setattr(compute_dtype, 'has_instructions', lambda has=has: has)
                    patch.setattr(compute_dtype, 'warn_once', lambda: None)
                    assert_close(run(model, xs)[1], expected, 2e-2)


def test_values_of_the_option():
    x, W = draw(2, 3, 5, 5), draw(4, 3, 3, 3)
    for value in 'float16', 'float32', True, '', torch.bfloat16, np.float32, np.dtype('f'):
        for f, *inputs in (F.convolution_2d, x, W), (F.linear, x, draw(2, 75)):
            with chainer.using_config('torch_compute_dtype', value), pytest.raises(
                    ValueError, match=r"compute_dtype is .*\. Use 'bfloat16', 'tf32' or None\."):
                f(*inputs)


@pytest.mark.parametrize('kind', ['convolution', 'matmul', 'rnn'])
def test_precision_sets_and_restores_a_flag_of_pytorch(kind):
    class OnDevice:
        is_cuda = True

    flags = gpu_arrays.FLAGS[kind]
    before = getattr(*flags)
    for dtype, value in (None, gpu_arrays.FULL), ('tf32', gpu_arrays.TF32):
        with (chainer.using_config('torch_compute_dtype', dtype),
              gpu_arrays.precision(OnDevice(), kind)):
            assert getattr(*flags) == value
        assert getattr(*flags) == before
    with pytest.raises(ZeroDivisionError), gpu_arrays.precision(OnDevice(), kind):
        raise ZeroDivisionError
    assert getattr(*flags) == before


PROGRAM = '''
import warnings
import chainer, numpy
warnings.filterwarnings('ignore', 'This processor has no bfloat16')
x = numpy.full((1, 1), 1.001, 'f')
print(chainer.config.torch_compute_dtype, chainer.functions.linear(x, x).array[0, 0])
'''


def test_the_environment_variable(python):
    assert python('import chainer; print(chainer.config.torch_compute_dtype)',
                  CHAINER_TORCH_COMPUTE_DTYPE='') == 'None'
    assert python(PROGRAM, CHAINER_TORCH_COMPUTE_DTYPE='bfloat16') == 'bfloat16 1.0'
    said = python('import chainer', check=False, CHAINER_TORCH_COMPUTE_DTYPE='float16')
    assert ("ValueError: CHAINER_TORCH_COMPUTE_DTYPE is 'float16'. "
            'Use bfloat16 or tf32, or unset it.' in said)


def test_one_warning_on_slow_processors(slow_processor):
    x, W = draw(3, 4), draw(2, 4)
    F.linear(x, W)  # none: the option is off
    with in_bfloat16():
        F.relu(x)  # none: there is no product of matrices
        F.linear(x.astype('d'), W.astype('d'))
        with pytest.warns(UserWarning, match='no bfloat16 instructions.*slower than in float32. '
                          'Set chainer.config.torch_compute_dtype = None, or unset CHAINER_TORCH'):
            F.linear(x, W)
        F.linear(x, W)  # pytest makes an error of a second one


def test_the_warning_as_an_error_and_silenced(slow_processor):
    x, W = draw(3, 4), draw(2, 4)
    with in_bfloat16():
        with pytest.raises(UserWarning, match=r'^This processor has no bfloat16'):
            F.linear(x, W)  # and not the message that a kernel failed
        with warnings.catch_warnings():
            warnings.filterwarnings('ignore', 'This processor has no bfloat16')
            F.linear(x, W)
        F.linear(x, W)


@pytest.mark.parametrize(('text', 'expected'), [
    ('processor\t: 0\nflags\t\t: fpu avx2 avx512f avx512_bf16 amx_tile\nbugs\t: \n', True),
    ('flags\t\t: fpu avx512f amx_bf16\n', True),
    ('model name\t: bf16\nflags\t\t: fpu avx2 avx512f avx512_bf16x\nbugs\t: bf16\n', False),
    ('BogoMIPS\t: 243.75\nFeatures\t: fp asimd i8mm bf16 sve\n', True),
    ('Features\t: fp asimd\n', False),
    ('cpu\t\t: POWER10\n', True),  # not known
    ('', True),
    (None, True),
])
def test_instructions_of_a_processor(text, expected, tmp_path, monkeypatch):
    path = tmp_path / 'cpuinfo'
    if text is not None:
        path.write_text(text)
    monkeypatch.setattr(compute_dtype, 'CPUINFO', str(path))
    assert compute_dtype.has_instructions.__wrapped__() is expected
