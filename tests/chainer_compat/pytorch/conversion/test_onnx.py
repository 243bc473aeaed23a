"""ONNX files give Chainer's outputs in ONNX Runtime, for any batch size."""

import chainer
import chainer.functions as F
import numpy as np
import pytest
from models_to_convert import Net, draw, make

import chainer_compat

pytestmark = pytest.mark.mpi_skip

onnxruntime = pytest.importorskip('onnxruntime')
pytest.importorskip('onnxscript')


@pytest.mark.filterwarnings('ignore')  # of PyTorch's exporter
@pytest.mark.parametrize('name', ['mlp', 'imagenet', 'generator', 'LSTM', 'transformer'])
def test_any_batch_size(name, tmp_path):
    model, inputs = make(name)
    file = tmp_path / 'model.onnx'
    chainer_compat.to_onnx(model, file, *inputs, dynamic_batch=True)
    session = onnxruntime.InferenceSession(str(file))
    inputs = [np.concatenate([x, x, x]) for x in inputs]
    outputs = session.run(None, {each.name: x for each, x in zip(
        session.get_inputs(), inputs, strict=True)})
    with chainer.using_config('train', False):
        if name == 'LSTM':
            model.rnn.reset_state()
        np.testing.assert_allclose(outputs[0], model(*inputs).array, rtol=1e-3, atol=1e-5)


@pytest.mark.filterwarnings('ignore')
def test_sequences_have_fixed_lengths(tmp_path):
    model, inputs = make('NStepGRU')
    with pytest.warns(UserWarning, match='only the shapes of the example') as found:
        chainer_compat.to_onnx(model, tmp_path / 'model.onnx', *inputs)
    assert __file__ in {each.filename for each in found}


def test_no_file_after_an_error(tmp_path):
    model = Net(lambda self, x: F.relu(x) if x.sum() > 0 else x)
    with pytest.raises(chainer_compat.ConversionError):
        chainer_compat.to_onnx(model, tmp_path / 'model.onnx', draw(2, 3))
    assert list(tmp_path.iterdir()) == []


def test_import_of_onnx_chainer():
    with pytest.raises(ImportError, match=r'Use chainer_compat\.to_onnx'):
        __import__('onnx_chainer')


def test_arguments_in_another_order(tmp_path):
    with pytest.raises(TypeError, match='path must be the path of a file, not ndarray'):
        chainer_compat.to_onnx(chainer.links.Linear(3, 2), draw(2, 3), tmp_path / 'model.onnx')


def test_a_folder_that_does_not_exist(tmp_path):
    with pytest.raises(FileNotFoundError, match=r'the folder .*none does not exist\. Create it'):
        chainer_compat.to_onnx(
            chainer.links.Linear(3, 2), tmp_path / 'none' / 'model.onnx', draw(2, 3))
