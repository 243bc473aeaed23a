"""pure_nccl on the stand-in: dtypes, streams, and invalid models."""

import chainer
import numpy as np
import pytest
from mpi4py import MPI

import chainermn
from chainermn.communicators import compression

SIZE = MPI.COMM_WORLD.size
RANK = MPI.COMM_WORLD.rank


@pytest.fixture(params=[True, False], ids=['batched', 'one by one'])
def comm(request, gpu):
    comm = chainermn.create_communicator('pure_nccl', batched_copy=request.param)
    yield comm
    comm.finalize()


def mean(models, name, dtype):
    """The documented mean gradient of pure_nccl, without rounding in the sum."""
    grads = [getattr(model, name).grad.astype(dtype).astype('f8') for model in models]
    return sum(grads) / len(grads)


@pytest.mark.parametrize('dtype', ['float16', 'float32', 'float64'])
def test_mean_grad(comm, gpu, make_model, dtype):
    comm.set_config('allreduce_grad_dtype', dtype)
    models = [make_model(rank) for rank in range(SIZE)]
    expected = {name: mean(models, name, dtype) for name in 'abcde'}
    model = models[RANK]
    addresses = [getattr(model, name).grad.data.ptr for name in 'abcde']
    for _ in range(2):  # the second time all are equal
        comm.multi_node_mean_grad(model)
        for name, value in expected.items():
            grad = getattr(model, name).grad
            assert grad.dtype == getattr(model, name).dtype
            tolerance = max(np.finfo(dtype).eps, np.finfo(grad.dtype).eps) * 4
            np.testing.assert_allclose(grad.astype('f8'), value, tolerance, tolerance)
    assert addresses == [getattr(model, name).grad.data.ptr for name in 'abcde']
    assert model.unused.grad is None
    everywhere = MPI.COMM_WORLD.allgather([getattr(model, name).grad.tobytes() for name in 'abcde'])
    assert everywhere == everywhere[:1] * SIZE


def test_batched_copy_is_bitwise_equal(gpu, make_model):
    results = []
    for batched in (True, False):
        comm = chainermn.create_communicator(
            'pure_nccl', batched_copy=batched, allreduce_grad_dtype=np.float16)
        model = make_model(RANK)
        comm.multi_node_mean_grad(model)
        results.append([getattr(model, name).grad.tobytes() for name in 'abcde'])
        comm.finalize()
    assert results[0] == results[1]


@pytest.mark.parametrize('kind', [None, 'fp16'])
@pytest.mark.parametrize('n', [1, 2])
def test_sum_overflows_float16(comm, gpu, n, kind):
    """The mean does not overflow."""
    comm.set_config('allreduce_grad_dtype', np.float16)
    model = chainer.Link()
    with model.init_scope():
        for i in range(n):
            param = chainer.Parameter(gpu.cupy.asarray(np.zeros(5, 'f4')))
            param.grad = gpu.cupy.asarray(np.full(5, 40000 + i, 'f4'))
            setattr(model, f'p{i}', param)
    comm.multi_node_mean_grad(model, compression=kind)
    for i in range(n):
        np.testing.assert_allclose(getattr(model, f'p{i}').grad, 40000 + i, rtol=2e-3)


@pytest.mark.parametrize('kind, operation, tolerance', [
    ('fp16', 'allReduce', 4e-3), ('bf16', 'allReduce', 3e-2), ('2bit', 'allGather', 1e-3)])
def test_compressed(comm, gpu, make_model, kind, operation, tolerance):
    compressor = compression.get(kind)
    theirs = [compression.get(kind) for _ in range(SIZE)]
    for step in range(3):
        models = [make_model(10 * step + rank) for rank in range(SIZE)]
        grads = [{name: np.array(getattr(model, name).grad, 'f8') for name in 'abcde'}
                 for model in models]
        gpu.log.clear()
        comm.multi_node_mean_grad(models[RANK], compression=compressor)
        assert f'{operation} on own' in gpu.log
        for name in 'abcde':
            grad = getattr(models[RANK], name).grad
            sent = [each.decompress(each.compress(of[name].ravel(), name), grad.size, np.float64)
                    for each, of in zip(theirs, grads, strict=True)]
            np.testing.assert_allclose(np.ravel(grad), np.mean(sent, axis=0), tolerance, tolerance)
        bits = MPI.COMM_WORLD.allgather(
            [getattr(models[RANK], name).grad.tobytes() for name in 'abcde'])
        assert bits == bits[:1] * SIZE


def test_order_on_the_streams(gpu, make_model):
    comm = chainermn.create_communicator('pure_nccl')
    model = make_model(RANK)
    comm.multi_node_mean_grad(model)
    assert gpu.log == [
        'own waits for caller', 'pack on own', 'allReduce on own', 'unpack on own',
        'caller waits for own']
    gpu.log.clear()
    exchange = comm.multi_node_mean_grad_async(model)
    assert gpu.log[-1] == 'unpack on own'
    exchange.wait()
    exchange.wait()  # perhaps on another stream
    assert gpu.log[-3:] == ['unpack on own', 'caller waits for own', 'caller waits for own']
    gpu.log.clear()
    comm._multi_node_mean_grad_async(model, False, type(gpu.streams[0])(gpu, 'old'))
    assert gpu.log[0] == 'own waits for caller'
    assert gpu.log[-1] == 'old waits for own'
    gpu.log.clear()
    comm.bcast_data(model)
    assert gpu.log == ['own waits for caller', 'bcast on own', 'caller waits for own'] * 3
    comm.finalize()
    assert gpu.log[-1] == 'destroy on caller'


def test_array_operations_do_not_wait_for_gradients(comm, gpu, make_model):
    """One NCCL communicator would serialize exchanges on two streams."""
    comm.bcast_data(make_model(RANK))
    exchange = comm.multi_node_mean_grad_async(make_model(RANK))
    comm.allreduce(gpu.cupy.asarray(np.ones(3)))
    exchange.wait()
    assert [[stream.name for stream in each.streams] for each in gpu.nccl_communicators] == [
        ['own'], ['caller']]


def test_one_table_for_the_same_addresses(gpu, make_model):
    from chainermn._transport import batched_copy

    comm = chainermn.create_communicator('pure_nccl')
    model = make_model(RANK)
    for _ in range(3):
        comm.multi_node_mean_grad(model)
    assert batched_copy.tables.n_made == 1
    comm.finalize()


def test_zero_fill(comm, make_model):
    model = make_model(RANK)
    if RANK == 0:
        model.unused.grad = model.unused.array + 1
    expected = make_model(0).unused.array + 1
    comm.multi_node_mean_grad(model, zero_fill=True)
    np.testing.assert_allclose(model.unused.grad, expected / SIZE, rtol=1e-6)


def test_bcast_data_is_exact(comm, make_model):
    model = make_model(RANK)
    model.b.array[:3] = np.nan, np.inf, -0.
    comm.bcast_data(model)
    expected = make_model(0)
    expected.b.array[:3] = np.nan, np.inf, -0.
    for (_, param), (_, other) in zip(
            sorted(model.namedparams()), sorted(expected.namedparams()), strict=True):
        if param.array is not None:
            assert param.array.tobytes() == other.array.tobytes()


def test_no_gradients(comm, gpu, make_model):
    model = make_model(RANK)
    model.cleargrads()
    comm.multi_node_mean_grad(model)
    comm.multi_node_mean_grad_async(model).wait()
    assert gpu.log == []


def test_dtype_of_the_exchange(comm):
    assert comm._transport._transfer_dtype() == np.float32
    for dtype, expected in [('float64', 'float64'), (chainer.mixed16, 'float16'),
                            ('float16', 'float16')]:
        with chainer.using_config('dtype', dtype if dtype is chainer.mixed16 else np.dtype(dtype)):
            assert comm._transport._transfer_dtype() == expected
    with chainer.using_config('dtype', chainer.mixed16):
        comm.set_config('allreduce_grad_dtype', np.float32)
        assert comm._transport._transfer_dtype() == np.float32
        comm.set_config('allreduce_grad_dtype', None)
        assert comm._transport._transfer_dtype() == np.float16


def test_config(comm, gpu):
    assert comm.can_overlap
    assert comm.get_config('allreduce_grad_dtype') is None
    for dtype in ('float16', np.float32, np.dtype('f8')):
        comm.set_config('allreduce_grad_dtype', dtype)
        assert comm.get_config('allreduce_grad_dtype') == np.dtype(dtype)
    for dtype in ('int32', np.complex64, np.longdouble, bool):
        with pytest.raises(ValueError, match='float16, float32 or float64'):
            comm.set_config('allreduce_grad_dtype', dtype)
    with pytest.raises(TypeError):
        comm.set_config('allreduce_grad_dtype', 'bfloat16')
    with pytest.raises(TypeError):
        comm.set_config('allreduce_grad_dtype', 'float16', other=1)
    comm.set_config('batched_copy', False)
    assert comm.get_config('batched_copy') is False
    with pytest.raises(ValueError, match='no configuration item'):
        comm.set_config('batched')
    comm.set_config('allreduce_grad_dtype', 'float16')
    part = comm.split(RANK % 2, 0)
    assert part.get_config() == comm.get_config()
    part.finalize()


def test_split_has_its_own_nccl(comm, make_model):
    part = comm.split(RANK % 2, -RANK)
    model = make_model(RANK)
    expected = np.mean([make_model(r).b.grad for r in range(RANK % 2, SIZE, 2)], axis=0)
    part.multi_node_mean_grad(model)
    np.testing.assert_allclose(model.b.grad, expected, rtol=1e-5, atol=1e-6)
    part.finalize()


def test_dtypes_that_differ(comm, make_model, same_error):
    if SIZE == 1:
        pytest.skip('needs two ranks')
    comm.set_config('allreduce_grad_dtype', 'float16' if RANK == 1 else 'float32')
    error = same_error(comm.multi_node_mean_grad, make_model(RANK))
    assert 'allreduce_grad_dtype: float32 on rank' in str(error)
    assert 'float16 on rank 1' in str(error)


@pytest.mark.parametrize('operation', ['multi_node_mean_grad', 'bcast_data'])
def test_model_on_the_host(comm, make_model, same_error, operation):
    model = make_model(RANK)
    if SIZE - 1 == RANK:
        model.b.array = np.array(model.b.array)
        model.b.grad = np.array(model.b.grad)
    error = same_error(getattr(comm, operation), model, failed=SIZE - 1)
    assert isinstance(error, TypeError)
    assert 'parameter /b: pure_nccl takes models on a GPU' in str(error)
    assert "to_device('@cupy:0')" in str(error)


def test_model_on_another_gpu(comm, gpu, make_model, same_error):
    model = make_model(RANK)
    device = gpu.cupy.cuda.Device
    gpu.cupy.cuda.Device = lambda id=int(RANK == 0): device(id)
    error = same_error(comm.multi_node_mean_grad, model, failed=0)
    assert 'is on GPU 0 but GPU 1 is the current one' in str(error)


def test_nccl_connection_failure(comm, gpu, make_model, same_error):
    gpu.nccl_error = 'NCCL_ERROR_INVALID_USAGE'
    error = same_error(comm.multi_node_mean_grad, make_model(RANK))
    assert isinstance(error, RuntimeError)
    assert 'NCCL_ERROR_INVALID_USAGE on GPU 0000:01:00.0' in str(error)
    assert 'get_device_from_id(comm.intra_rank).use()' in str(error)
    gpu.nccl_error = None
    comm.multi_node_mean_grad(make_model(RANK))


def test_debug(comm, make_model, same_error):
    model = make_model(RANK)
    if RANK == 0:
        model.b.grad[3] = np.nan
    with chainer.using_config('debug', True):
        error = same_error(comm.multi_node_mean_grad, model, failed=0)
    assert 'the gradient of /b is not finite: nan at [3], 1 of' in str(error)


def test_debug_of_a_mean(comm, make_model, same_error):
    """All gradients are finite, but not in the dtype of the exchange."""
    comm.set_config('allreduce_grad_dtype', np.float16)
    model = make_model(RANK)
    model.b.grad[3] = 1e6
    with chainer.using_config('debug', True), np.errstate(over='ignore'):
        error = same_error(comm.multi_node_mean_grad, model, table=False)
    assert 'the mean gradient of /b is not finite' in str(error)


def test_after_finalize(gpu, make_model):
    comm = chainermn.create_communicator('pure_nccl')
    comm.multi_node_mean_grad(make_model(RANK))
    comm.finalize()
    comm.finalize()
    with pytest.raises(RuntimeError, match='finalized'):
        comm.multi_node_mean_grad(make_model(RANK))


def test_double_buffering(comm, make_model):
    optimizer = chainermn.create_multi_node_optimizer(
        chainer.optimizers.SGD(lr=1), comm, double_buffering=True)
    assert optimizer.actual_optimizer.lr == 1
