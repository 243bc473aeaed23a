"""Laws of conversions: modules and files compute the same as the model; weights can be loaded."""

import copy
import warnings

import chainer
import hypothesis
import numpy as np
import pytest
from laws.exported_models import exported
from laws.law import law, planted

import chainer_compat

torch = pytest.importorskip('torch')
from chainer_compat.pytorch.conversion import convert, onnx_file, weights  # noqa: E402

pytestmark = [pytest.mark.mpi_skip,
              pytest.mark.filterwarnings('ignore:A batch with no more than one sample')]

#: Batch sizes, including sizes that a conversion does not try.
SIZES = 1, 2, 3, 5, 6, 13, 30


def made(program):
    """Return the model and its example. Reject programs that Chainer cannot run."""
    try:
        model, example = program.model(), program.arrays(program.batch)
        inferred(model, example)
    except Exception:
        hypothesis.reject()
    return model, example


def inferred(model, arrays):
    with chainer.using_config('train', False), warnings.catch_warnings():
        warnings.simplefilter('ignore')  # NumPy warns about zeros
        return model(*arrays).array


def tensors(arrays):
    return [torch.from_numpy(np.array(x)) for x in arrays]


def assert_computes(run, model, program, is_dynamic, tolerance):
    """Assert that a run gives the model's results for any batch size, or raises an error."""
    assert is_dynamic or program.is_distinguishing
    for size in {program.batch, *(SIZES if is_dynamic else ())}:
        arrays = program.arrays(size, seed=1)
        expected = inferred(model, arrays)
        actual = run(arrays)
        assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype), size
        np.testing.assert_allclose(
            actual, expected, tolerance,
            tolerance * max(1., np.abs(expected).max(initial=0.)), err_msg=f'batch size {size}')


@law(exported(dtypes='d'), planted(convert, 'other_sizes', lambda _: lambda size: []), 10)
def test_to_torch(program):
    """``to_torch`` gives Chainer's results, for any values and any accepted batch size."""
    model, example = made(program)
    module = chainer_compat.to_torch(model, *example, train=program.train).eval()
    assert_computes(lambda arrays: module(*tensors(arrays)).detach().numpy(), model, program,
                    module.meta['chainer_batch'], 1e-7)


@law(exported(('smooth', 'shaped', 'batch', 'link', 'labeled'), 'f', (False,)),
     planted(onnx_file, '_export', lambda export: lambda module, inputs, file, size, opset: export(
         module, inputs, file, None, opset)), 1)
def test_to_onnx(program, tmp_path):
    """``to_onnx`` gives Chainer's results."""
    onnxruntime = pytest.importorskip('onnxruntime')
    pytest.importorskip('onnxscript')
    model, example = made(program)
    hypothesis.assume(not any(name == 'dropconnect' for _, name, _ in program.steps))  # random
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # PyTorch's exporter warns
        chainer_compat.to_onnx(model, tmp_path / 'model.onnx', *example)
    session = onnxruntime.InferenceSession(str(tmp_path / 'model.onnx'))
    inputs = session.get_inputs()
    assert_computes(lambda arrays: session.run(None, {
        each.name: x for each, x in zip(inputs, arrays, strict=True)})[0], model, program,
        not isinstance(inputs[0].shape[0], int), 2e-3)


@law(exported(('link', 'link', 'smooth'), 'df'), planted(
    weights, '_as_numpy', lambda as_numpy: lambda tensor: as_numpy(tensor.half())), 10)
def test_load_weights(program):
    """``load_weights(model, to_torch(model))`` restores all parameters and persistent values."""
    model, example = made(program)
    module = chainer_compat.to_torch(model, *example, train=program.train)
    expected, actual = (chainer.serializers.DictionarySerializer() for _ in range(2))
    expected.save(model)
    expected.target.update({key: np.array(x) for key, x in expected.target.items()})
    other = copy.deepcopy(model)
    for param in other.params():
        param.array[...] = 0
    for link in other.links():
        for name in link._persistent:
            link.__dict__[name] = link.__dict__[name] * 0
    module.train(program.seed % 2 == 0)
    chainer_compat.load_weights(other, module)
    assert module.training == (program.seed % 2 == 0)
    actual.save(other)
    assert actual.target.keys() == expected.target.keys()
    for key, x in expected.target.items():
        np.testing.assert_array_equal(actual.target[key], x, key)
