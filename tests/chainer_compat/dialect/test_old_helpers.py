"""Private functions of Chainer 1 to 6: under their old paths, with values by hand."""

import importlib

import chainer
import numpy as np
import pytest

from chainer_compat.dialect import old_names

pytestmark = pytest.mark.mpi_skip


def old(module, name):
    with pytest.warns(DeprecationWarning, match=f'{name} is a name of an old version'):
        return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize(
    'module', ['chainer.optimizer', 'chainer.optimizer_hooks.gradient_clipping'])
def test_sum_of_squares(module):
    assert old(module, '_sum_sqnorm')([np.full((2, 2), 3, 'f'), np.array(2, 'f')]) == 40


def test_rows():
    as_mat = old('chainer.functions.connection.linear', '_as_mat')
    x = np.zeros((2, 3, 4))
    assert as_mat(x).shape == (2, 12)
    assert as_mat(x[0]).shape == (3, 4)


def test_a_gradient_summed_to_a_shape():
    backward = old('chainer.functions.array.broadcast', '_backward_one')
    g = np.arange(6, dtype='f').reshape(1, 2, 3)
    assert backward(np, (2, 1), 'f', g).tolist() == [[3], [12]]
    assert backward(np, (), 'f', g).tolist() == 15
    assert backward(np, (2,), 'i', None).tolist() == [0, 0]
    assert backward(np, (1, 2, 3), 'f', g).tolist() == g.tolist()
    x = chainer.Variable(g)
    y = backward(x, (2, 1))
    y.grad = np.array([[1], [2]], 'f')
    y.backward()
    assert y.array.tolist() == [[3], [12]]
    assert x.grad.tolist() == [[[1, 1, 1], [2, 2, 2]]]


def test_a_normalized_array():
    normalized = old('chainer.functions.normalization.batch_normalization', '_xhat')
    x = np.array([[1., 2.], [3., 6.]])
    result = normalized(x, np.array([1., 2.]), np.array([2., 4.]), (None, slice(None)))
    assert result.tolist() == [[0, 0], [1, 1]]
    assert x[0, 0] == 1


def test_constants():
    check = old('chainer.functions.math.basic_math', '_check_constant_type')
    for value in 1, 2., np.float32(3), np.zeros(2):
        check(value)
    with pytest.raises(TypeError, match='got list'):
        check([1])


def test_dtypes():
    accepts = old('chainer.functions.connection.convolution_2d', '_check_cudnn_acceptable_type')
    assert accepts(np.dtype('f'), np.dtype('f')) is True
    assert accepts(np.dtype('f'), np.dtype('d')) is False


def test_names_of_arguments():
    argname = old('chainer.utils.type_check', 'argname')

    class Named(chainer.Function):
        def check_type_forward(self, in_types):
            argname(in_types, ('scores',))
            chainer.utils.type_check.expect(in_types[0].ndim == 2)

        def forward(self, xs):
            return xs

    with pytest.raises(chainer.utils.type_check.InvalidType, match=r'scores\.ndim == 2'):
        Named()(np.zeros(3, 'f'))


@pytest.mark.parametrize(('module', 'name'), [
    (module, name) for module, names in old_names.NAMES.items() for name in names
    if name.startswith('_')])
def test_each_is_a_function(module, name):
    assert callable(old(module, name))


def test_backward_of_an_old_subclass():
    base = importlib.import_module(
        'chainer.functions.connection.convolution_2d').Convolution2DFunction

    with pytest.warns(UserWarning, match=r'Scaled.backward_cpu is never called.*Convolution2DFunc'):
        class Scaled(base):
            def backward_cpu(self, inputs, grad_outputs):
                return super().backward_cpu(inputs, grad_outputs)

    class Other(base):
        def backward_gpu(self, inputs, grad_outputs):
            return None

        def backward(self, indexes, grad_outputs):
            return super().backward(indexes, grad_outputs)

    class Old(chainer.Function):
        def backward_cpu(self, inputs, grad_outputs):
            return grad_outputs

    assert issubclass(Other, base)
    assert issubclass(Old, chainer.Function)
