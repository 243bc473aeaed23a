"""Gradients and parameters on a GPU, by every communicator that takes them there."""

import chainer
import numpy as np
import pytest
from mpi4py import MPI

import chainermn
from chainermn._transport import topology

pytestmark = pytest.mark.gpu

SIZE = MPI.COMM_WORLD.size
RANK = MPI.COMM_WORLD.rank

# Of no elements, of one, of a piece of the batched copy and a little more, of many.
SHAPES = [(0, 3), (), (1,), (3, 5), (8191,), (8192,), (8193,), (3, 70001)]


def make_model(dtypes, rank, grads=True):
    """A model with parameters of all shapes and some dtypes, and with the numbers of a rank."""
    import cupy

    random = np.random.RandomState(rank)
    model = chainer.Link()
    with model.init_scope():
        for i, shape in enumerate(SHAPES):
            for dtype in dtypes:
                x = random.standard_normal(shape).astype(dtype)
                param = chainer.Parameter(cupy.asarray(x))
                if grads:
                    param.grad = cupy.asarray(random.standard_normal(shape).astype(dtype))
                setattr(model, f'p{i}_{dtype}', param)
    return model


def grads_of(model):
    return {name: param.grad.get() for name, param in model.namedparams()}


def mean_of(models, transfer=None):
    """What the mean gradients have to be, and how far off they may be."""
    each = [grads_of(model) for model in models]
    for name in each[0]:
        grads = [grads[name] for grads in each]
        dtype = grads[0].dtype
        sent = [grad.astype(transfer or dtype).astype('f8') for grad in grads]
        eps = max(float(np.finfo(t).eps) for t in (dtype, transfer or dtype))
        yield name, sum(sent) / len(sent), 4 * eps


def check_means(model, expected):
    grads = grads_of(model)
    for name, value, tolerance in expected:
        np.testing.assert_allclose(
            grads[name].astype('f8'), value, tolerance, tolerance, err_msg=name)
    everywhere = MPI.COMM_WORLD.allgather({name: x.tobytes() for name, x in grads.items()})
    assert everywhere == everywhere[:1] * SIZE


@pytest.mark.parametrize('batched', [True, False])
@pytest.mark.parametrize('dtypes', [['float16'], ['float32'], ['float64'],
                                    ['float16', 'float32', 'float64']], ids='-'.join)
def test_mean_grad(comm, name, dtypes, batched):
    comm.set_config('batched_copy', batched)
    models = [make_model(dtypes, rank) for rank in range(SIZE)]
    expected = list(mean_of(models, 'float32' if name == 'pure_nccl' else None))
    for _ in range(3):  # after the first time they are equal, and stay so
        comm.multi_node_mean_grad(models[RANK])
        check_means(models[RANK], expected)


@pytest.mark.parametrize('batched', [True, False])
@pytest.mark.parametrize('transfer', ['float16', 'float32', 'float64'])
def test_allreduce_grad_dtype(transfer, batched):
    comm = chainermn.create_communicator(
        'pure_nccl', allreduce_grad_dtype=transfer, batched_copy=batched)
    models = [make_model(['float16', 'float32', 'float64'], rank) for rank in range(SIZE)]
    expected = list(mean_of(models, transfer))
    comm.multi_node_mean_grad(models[RANK])
    check_means(models[RANK], expected)
    comm.finalize()


@pytest.mark.parametrize('compression', [None, 'fp16'])
def test_a_sum_that_is_too_large_for_float16(compression):
    """The mean is not."""
    import cupy

    comm = chainermn.create_communicator('pure_nccl', allreduce_grad_dtype='float16')
    model = chainer.Link()
    with model.init_scope():
        model.w = chainer.Parameter(cupy.zeros(1000, 'f2'))
    model.w.grad = cupy.full(1000, 40000, 'f2')
    comm.multi_node_mean_grad(model, compression=compression)
    np.testing.assert_allclose(model.w.grad.get(), 40000, rtol=2e-3)
    comm.finalize()


@pytest.mark.parametrize('dtype,transfer', [
    (np.float32, 'float32'), (np.float16, 'float16'), (chainer.mixed16, 'float16'),
    (np.float64, 'float64')])
def test_dtype_of_the_configuration(dtype, transfer):
    comm = chainermn.create_communicator('pure_nccl')
    models = [make_model(['float32'], rank) for rank in range(SIZE)]
    expected = list(mean_of(models, transfer))
    with chainer.using_config('dtype', dtype):
        comm.multi_node_mean_grad(models[RANK])
    check_means(models[RANK], expected)
    comm.finalize()


def test_both_ways_to_copy_give_the_same_bits(comm):
    results = []
    for batched in (True, False):
        comm.set_config('batched_copy', batched)
        model = make_model(['float16', 'float32'], RANK)
        comm.multi_node_mean_grad(model)
        results.append({name: x.tobytes() for name, x in grads_of(model).items()})
    assert results[0] == results[1]


@pytest.mark.parametrize('batched', [True, False])
def test_strided_gradients(comm, batched):
    import cupy

    comm.set_config('batched_copy', batched)
    models = [make_model(['float32'], rank) for rank in range(SIZE)]
    expected = list(mean_of(models))
    param = models[RANK].p7_float32
    param.grad = cupy.asfortranarray(param.grad)
    assert not param.grad.flags.c_contiguous
    comm.multi_node_mean_grad(models[RANK])
    check_means(models[RANK], expected)


@pytest.mark.parametrize('dtype', ['float16', 'float32', 'float64'])
def test_gradients_at_any_address(comm, name, dtype):
    """Whether or not the kernels can take 16 bytes at a time."""
    import cupy

    comm.set_config('batched_copy')
    models = [make_model([dtype], rank) for rank in range(SIZE)]
    expected = list(mean_of(models, 'float32' if name == 'pure_nccl' else None))
    for shift, param in enumerate(models[RANK].params()):
        memory = cupy.empty(param.size + shift % 3, dtype)
        grad = memory[shift % 3:].reshape(param.shape)
        grad[...] = param.grad
        param.grad = grad
    comm.multi_node_mean_grad(models[RANK])
    check_means(models[RANK], expected)


def test_zero_fill(comm):
    model = make_model(['float32'], RANK)
    expected = model.p3_float32.grad.get() if RANK == 0 else None
    expected = MPI.COMM_WORLD.bcast(expected) / SIZE
    if RANK != 0:
        model.p3_float32.grad = None
    comm.multi_node_mean_grad(model, zero_fill=True)
    np.testing.assert_allclose(model.p3_float32.grad.get(), expected, 1e-6, 1e-6)


def test_bcast_data_is_exact(comm):
    import cupy

    dtypes = ['float16', 'float32', 'float64']
    model, expected = make_model(dtypes, RANK), make_model(dtypes, 0)
    for m in (model, expected):
        m.p3_float16.array[0, :3] = cupy.array([np.nan, np.inf, -0.])
    comm.bcast_data(model)
    for (_, param), (_, other) in zip(
            sorted(model.namedparams()), sorted(expected.namedparams()), strict=True):
        assert param.array.get().tobytes() == other.array.get().tobytes()


@pytest.mark.parametrize('own_stream', [False, True])
def test_order_with_the_stream_of_the_caller(comm, side, own_stream):
    """Gradients that are still being computed, and that are used at once."""
    import cupy

    model = chainer.Link()
    with model.init_scope():
        model.w = chainer.Parameter(cupy.zeros((side, side), 'f4'))
    stream = cupy.cuda.Stream(non_blocking=True) if own_stream else cupy.cuda.Stream.null
    with stream:
        for step in range(10):
            a = cupy.full((side, side), (RANK + step) / side, 'f4')
            b = cupy.ones((side, side), 'f4')
            for _ in range(5):
                a = a @ b / side
            model.w.grad = a * side
            comm.multi_node_mean_grad(model)
            doubled = model.w.grad * 2
            model.cleargrads()  # the memory is free for the next step
            cupy.testing.assert_allclose(doubled, 2 * step + SIZE - 1, rtol=1e-4)


def test_async_of_chainermn_7():
    import cupy

    comm = chainermn.create_communicator('pure_nccl')
    models = [make_model(['float32'], rank) for rank in range(SIZE)]
    expected = list(mean_of(models))
    stream = cupy.cuda.Stream(non_blocking=True)
    comm._multi_node_mean_grad_async(models[RANK], False, stream)
    stream.synchronize()
    check_means(models[RANK], expected)
    comm.finalize()


def test_split(comm):
    part = comm.split(RANK % 2, -RANK)
    models = [make_model(['float32'], rank) for rank in range(SIZE)]
    expected = list(mean_of(models[RANK % 2::2]))
    part.multi_node_mean_grad(models[RANK])
    for name, value, tolerance in expected:
        np.testing.assert_allclose(grads_of(models[RANK])[name], value, tolerance, tolerance)
    part.finalize()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize('batched', [True, False])
def test_two_nodes(monkeypatch, batched):
    """NCCL within each of two made-up nodes, MPI between them."""
    monkeypatch.setattr(topology.MPI, 'Get_processor_name', lambda: f'node {2 * RANK // SIZE}')
    comm = chainermn.create_communicator('non_cuda_aware', batched_copy=batched)
    assert comm.inter_size == 2
    models = [make_model(['float16', 'float32'], rank) for rank in range(SIZE)]
    expected = list(mean_of(models))
    comm.multi_node_mean_grad(models[RANK])
    check_means(models[RANK], expected)
    comm.bcast_data(models[RANK])
    for (_, param), (_, other) in zip(sorted(models[RANK].namedparams()),
                                      sorted(make_model(['float16', 'float32'], 0).namedparams()),
                                      strict=True):
        np.testing.assert_array_equal(param.array.get(), other.array.get())
    comm.finalize()


@pytest.mark.mpi(min_size=2)
def test_allreduce_grad_dtype_that_differs(same_error):
    error = same_error(lambda: chainermn.create_communicator(
        'pure_nccl', allreduce_grad_dtype='float16' if RANK == 1 else 'float32'))
    assert isinstance(error, chainermn.CollectiveMismatchError)
    assert 'arguments differ between ranks' in str(error)


@pytest.mark.parametrize('name', ['pure_nccl', 'non_cuda_aware'])
def test_a_model_on_the_host(comm, same_error):
    model = make_model(['float32'], RANK)
    if RANK == SIZE - 1:
        model.to_device('@numpy')
    for call in (comm.multi_node_mean_grad, comm.bcast_data):
        error = same_error(call, model)
        assert isinstance(error, TypeError)
        assert 'needs models on a GPU' in str(error)


def test_debug_of_a_mean(same_error):
    """All gradients are finite, but overflow in the dtype in which they are sent."""
    comm = chainermn.create_communicator('pure_nccl', allreduce_grad_dtype='float16')
    model = make_model(['float32'], RANK)
    model.p3_float32.grad[...] = 1e6
    with chainer.using_config('debug', True):
        error = same_error(comm.multi_node_mean_grad, model)
    assert 'the mean gradient of /p3_float32 is not finite' in str(error)
    comm.finalize()


def test_connects_again_after_finalize():
    for _ in range(3):
        comm = chainermn.create_communicator('pure_nccl')
        models = [make_model(['float32'], rank) for rank in range(SIZE)]
        expected = list(mean_of(models))
        comm.multi_node_mean_grad(models[RANK])
        check_means(models[RANK], expected)
        comm.finalize()

