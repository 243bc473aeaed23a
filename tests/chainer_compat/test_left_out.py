"""If optional software is missing, a feature that needs it raises a clear error when used."""

import importlib.util

import chainer
import chainer.links as L
import numpy as np
import pytest
from chainer.training import updaters

pytestmark = pytest.mark.mpi_skip

WITHOUT_CUPY = pytest.mark.skipif(
    importlib.util.find_spec('cupy') is not None, reason='is for environments without CuPy')


@pytest.mark.slow
@pytest.mark.parametrize('module', ['chainer.links.caffe', 'chainer.links.caffe.caffe_function',
                                    'chainer.exporters', 'chainer.exporters.caffe'])
def test_caffe(python, module):
    said = python(f'import {module}', check=False)
    if said == '0 ':
        pytest.skip('has protobuf 3, which Chainer reads Caffe with')
    assert "ImportError: Reading and writing Caffe models with Chainer requires protobuf 3" in said


def test_onnx():
    if importlib.util.find_spec('onnx') is not None:
        pytest.skip('has ONNX')
    import onnx_chainer

    with pytest.raises(ImportError, match=r"pip install 'onnx<1.7.0'"):
        onnx_chainer.export(L.Linear(2, 1), np.ones((1, 2), 'f'))


@WITHOUT_CUPY
def test_parallel_updaters():
    assert not updaters.MultiprocessParallelUpdater.available()
    optimizer = chainer.optimizers.SGD().setup(L.Linear(2, 1))
    iterators = [chainer.iterators.SerialIterator([1, 2], 1)]
    with pytest.raises(Exception, match='NCCL is not enabled'):
        updaters.MultiprocessParallelUpdater(iterators, optimizer, devices=[0])


@WITHOUT_CUPY
@pytest.mark.parametrize('use', [
    lambda link: link.to_gpu(),
    lambda link: link.to_device('@cupy:0'),
    lambda link: chainer.get_device(0),
    lambda link: chainer.backends.cuda.to_gpu(np.ones(2)),
    lambda link: chainer.Variable(np.ones(2, 'f')).to_gpu(),
    lambda link: chainer.backends.cuda.check_cuda_available(),
    lambda link: chainer.dataset.concat_examples([np.ones(2)], device=0),
], ids=['to_gpu', 'to_device', 'get_device', 'cuda.to_gpu', 'Variable', 'check', 'concat_examples'])
def test_no_gpu(use):
    with pytest.raises(RuntimeError, match=r'(?s)CUDA environment is not correctly set up.*cupy'):
        use(L.Linear(2, 1))


@WITHOUT_CUPY
def test_backend_without_cupy_does_without_a_gpu():
    cuda = chainer.backends.cuda
    cuda.clear_memo()
    assert cuda.get_device_from_id(None) is cuda.DummyDevice
    assert cuda.to_cpu(np.ones(2)).tolist() == [1, 1]
    kernel = cuda.fuse()(lambda x, y: x * y + 1)
    assert kernel(np.arange(3), 2).tolist() == [1, 3, 5]


def test_chainerx_is_not_built():
    import chainerx

    assert not chainerx.is_available()
    with pytest.raises(RuntimeError, match='ChainerX is not available'):
        L.Linear(2, 1).to_chx()
