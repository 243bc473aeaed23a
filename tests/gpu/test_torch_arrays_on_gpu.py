"""Arrays pass between CuPy and PyTorch's tensors on a GPU without a copy."""

import numpy as np
import pytest

torch = pytest.importorskip('torch')
cupy = pytest.importorskip('cupy')
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(
    not torch.cuda.is_available(), reason='needs a PyTorch for GPUs')]


@pytest.fixture(name='gpu_arrays')
def _gpu_arrays():
    from chainer_compat.pytorch.tensors import gpu_arrays
    return gpu_arrays


VIEWS = {
    'all': lambda x: x, 'reshaped': lambda x: x.reshape(3, 4), 'more axes': lambda x: x[:, :, None],
    'first row': lambda x: x[:1], 'last row': lambda x: x[1:], 'empty': lambda x: x[1:1],
    'other dtype': lambda x: x.view('d'), 'end': lambda x: x.ravel()[5:], 'one': lambda x: x[0, 3]}


@pytest.mark.parametrize('view', VIEWS)
@pytest.mark.parametrize('source', ['PyTorch', 'a view of PyTorch', 'CuPy'])
def test_views_of_arrays_become_tensors_of_the_same_memory(gpu_arrays, view, source):
    if source == 'CuPy':
        whole = cupy.arange(12, dtype='f').reshape(2, 6)
    elif source == 'PyTorch':
        whole = gpu_arrays.array(torch.arange(12., device='cuda').reshape(2, 6))
    else:
        whole = gpu_arrays.array(torch.arange(20., device='cuda')[4:16].reshape(2, 6))
    array = VIEWS[view](whole)
    tensor = gpu_arrays.tensor(array)
    assert tuple(tensor.shape) == array.shape
    assert array.size == 0 or tensor.data_ptr() == array.data.ptr
    np.testing.assert_array_equal(tensor.cpu().numpy(), array.get())
    array[...] = 7
    torch.cuda.synchronize()
    np.testing.assert_array_equal(tensor.cpu().numpy(), array.get())


def test_an_array_of_a_transposed_tensor_keeps_its_order(gpu_arrays):
    tensor = torch.arange(12., device='cuda').reshape(3, 4).t()
    array = gpu_arrays.array(tensor)
    np.testing.assert_array_equal(array.get(), tensor.cpu().numpy())
    flat = array.T  # contiguous, and begins where the tensor does
    np.testing.assert_array_equal(gpu_arrays.tensor(flat).cpu().numpy(), flat.get())


def test_an_array_of_a_tensor_that_requires_gradients_becomes_one_that_does_not(gpu_arrays):
    tensor = torch.ones(3, device='cuda', requires_grad=True)
    array = gpu_arrays.array(tensor)
    assert not gpu_arrays.tensor(array).requires_grad
