"""_memory_utility and _communication_utility where they need a GPU."""

import chainer
import numpy as np
import pytest
from mpi4py import MPI

from chainermn.communicators import _communication_utility, _memory_utility

pytestmark = pytest.mark.gpu

WORLD = MPI.COMM_WORLD


def test_device_memory():
    import cupy

    memory = _memory_utility.DeviceMemory()
    memory.assign(64)
    x = cupy.arange(8, dtype='f4')
    memory.from_device(x, 32, offset=16)
    np.testing.assert_array_equal(memory.array((2, 4), 16).get().ravel(), np.arange(8))
    assert memory.array((8,), 16).data.ptr == memory.ptr() + 16
    y = cupy.zeros(4, 'f4')
    memory.to_device(y, 16, offset=32, stream=cupy.cuda.Stream.null)
    np.testing.assert_array_equal(y.get(), np.arange(4, 8))
    assert len(memory.buffer(48)) == 48


def test_host_pinned_memory():
    memory = _memory_utility.HostPinnedMemory()
    memory.assign(64)
    memory.array(8)[...] = np.arange(8)
    np.testing.assert_array_equal(memory.array(4, 16), np.arange(4, 8))
    assert bytes(memory.buffer(4)) == np.float32(0).tobytes()
    assert memory.ptr(16).value == memory.ptr().value + 16


def test_params_data():
    import cupy

    model = chainer.links.Linear(3, 4)
    model.to_device('@cupy:' + str(cupy.cuda.Device().id))
    model.W.grad = cupy.ones((4, 3), 'f4')
    params = _memory_utility.extract_params_set_grad(model, True)
    data = _memory_utility.ParamsData(params, 'grad', True)
    assert (data.n_params, data.n_elems) == (2, 16)
    np.testing.assert_array_equal(data.size_csum.get(), [0, 12, 16])
    np.testing.assert_array_equal(data.dtype.get(), [7, 7])
    np.testing.assert_array_equal(data.dptr.get(), [model.W.grad.data.ptr, model.b.grad.data.ptr])


@pytest.mark.parametrize('dtype', ['float16', 'float32'])
def test_pack_and_unpack(dtype):
    import cupy

    model = chainer.links.Linear(3, 4)
    model.to_device('@cupy:' + str(cupy.cuda.Device().id))
    model.cleargrads()
    model.W.grad = cupy.full((4, 3), 2, 'f4')
    params = _memory_utility.extract_params_set_grad(model, True)
    memory = _memory_utility.DeviceMemory()
    memory.assign(16 * np.dtype(dtype).itemsize)
    stream = cupy.cuda.Stream()
    cupy.cuda.get_current_stream().synchronize()
    _memory_utility.pack_params(params, 'grad', memory, dtype, True, stream)
    stream.synchronize()
    packed = memory.array((16,), dtype=dtype)
    np.testing.assert_array_equal(packed.get(), [2] * 12 + [0] * 4)
    packed *= 2
    _memory_utility.unpack_params(params, 'grad', memory, dtype, True)
    assert (model.W.grad == 4).all()


def test_nccl_and_inter_allreduce():
    import cupy

    from chainermn import nccl

    comm = _communication_utility.init_nccl_comm(WORLD)
    x = cupy.full(5, WORLD.rank + 1, 'f4')
    comm.allReduce(x.data.ptr, x.data.ptr, 5, nccl.NCCL_FLOAT32, nccl.NCCL_SUM,
                   cupy.cuda.get_current_stream().ptr)
    assert (x == sum(range(1, WORLD.size + 1))).all()
    cupy.cuda.Device().synchronize()
    comm.destroy()

    a, b = _memory_utility.DeviceMemory(), _memory_utility.DeviceMemory()
    n_bytes = 12 * WORLD.size
    a.assign(n_bytes)
    b.assign(n_bytes)
    b.array((3 * WORLD.size,))[...] = WORLD.rank + 1
    _communication_utility.inter_allreduce_gpu(
        WORLD, 2, a, b, n_bytes, 3, 12, cupy.cuda.get_current_stream())
    assert (b.array((3 * WORLD.size,)) == sum(range(1, WORLD.size + 1)) / 2).all()
