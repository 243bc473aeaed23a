"""Compressed gradients on a GPU: the same encoded bytes and means as on the host."""

import chainer
import numpy as np
import pytest
from mpi4py import MPI

import chainermn
from chainermn.communicators import compression

pytestmark = pytest.mark.gpu

SIZE = MPI.COMM_WORLD.size
RANK = MPI.COMM_WORLD.rank
KINDS = ['fp16', 'bf16', {'type': '2bit', 'threshold': 0.5}]


def gradient(rank, dtype='float32', size=70001):
    return np.random.RandomState(rank).normal(size=size).astype(dtype)


@pytest.mark.parametrize('kind', KINDS, ids=str)
@pytest.mark.parametrize('dtype', ['float16', 'float32', 'float64'])
@pytest.mark.parametrize('size', [0, 1, 16, 17, 70001])
def test_wires_are_those_of_the_host(kind, dtype, size):
    import cupy

    on_host, on_device = compression.get(kind), compression.get(kind)
    x = gradient(0, dtype, size)
    x[5:8] = [np.nan, np.inf, -np.inf][:max(0, size - 5)]
    if kind == 'fp16' and cupy.__version__.startswith('13.'):
        x = x.astype('f').astype(dtype)  # CuPy 13 casts float64 to float16 by way of float32
    for _ in range(3):
        encoded = on_device.compress(cupy.asarray(x), 'key')
        expected = on_host.compress(x, 'key')
        assert encoded.dtype == expected.dtype
        wires = [encoded.get(), expected]
        if kind == 'bf16':  # a GPU may give another NaN where it casts float16 to float32
            wires = [np.where(wire & 0x7fff > 0x7f80, np.uint16(0x7fff), wire) for wire in wires]
        np.testing.assert_array_equal(*wires)
        np.testing.assert_array_equal(
            on_device.decompress(encoded, size, x.dtype).get(),
            on_host.decompress(expected, size, x.dtype))


@pytest.mark.parametrize('name', ['naive', 'flat', 'pure_nccl', 'non_cuda_aware'])
@pytest.mark.parametrize('kind', KINDS, ids=str)
def test_means(name, kind):
    import cupy

    comm = chainermn.create_communicator(name)
    compressor = compression.get(kind)
    theirs = [compression.get(kind) for _ in range(SIZE)]
    for _ in range(3):
        model = chainer.Link()
        with model.init_scope():
            model.w = chainer.Parameter(cupy.zeros(70001, 'f'))
        model.w.grad = cupy.asarray(gradient(RANK))
        comm.multi_node_mean_grad(model, compression=compressor)
        parts = [each.decompress(each.compress(gradient(rank), 0), 70001, np.float32)
                 for rank, each in enumerate(theirs)]
        tolerance = {'fp16': 2e-3, 'bf16': 2e-2}.get(str(kind), 1e-6)
        np.testing.assert_allclose(model.w.grad.get(), np.mean(parts, axis=0), tolerance, tolerance)
        bits = MPI.COMM_WORLD.allgather(model.w.grad.tobytes())
        assert bits == bits[:1] * SIZE
    comm.finalize()

