"""Multi-node batch normalization against Chainer's on the batches of all ranks."""
import copy

import chainer
import chainer.functions as F
import numpy as np
import pytest
from shared_fixtures import create

from chainermn.functions.batch_normalization import get_communication_backend
from chainermn.links import MultiNodeBatchNormalization

pytestmark = pytest.mark.every_size


@pytest.fixture(scope='module', params=['naive', 'version7'])
def comm(request):
    return create(request.param)


def batches(comm, shape, dtype, scale=1.0, offset=0.0):
    """The batch of each rank."""
    rng = np.random.RandomState(0)
    return [(rng.normal(offset, scale, shape)).astype(dtype) for _ in range(comm.size)]


def run(bn, x, weight):
    """Forward, and backward from a loss in which each element weighs differently."""
    x = chainer.Variable(x)
    bn.cleargrads()
    y = bn(x)
    F.sum(F.cast(y, np.float64) * weight).backward()
    return y.array, x.grad


@pytest.mark.parametrize('dtype', [np.float16, np.float32, np.float64])
@pytest.mark.parametrize('shape', [(4, 3), (2, 3, 4, 5)])
@pytest.mark.parametrize('gamma_and_beta', [True, False])
def test_equals_one_process_with_all_batches(comm, dtype, shape, gamma_and_beta):
    xs = batches(comm, shape, dtype, scale=2, offset=1)
    weights = batches(comm, shape, np.float64)
    kwargs = {'use_gamma': gamma_and_beta, 'use_beta': gamma_and_beta,
              'dtype': np.float64 if dtype == np.float64 else np.float32}
    one = chainer.links.BatchNormalization(3, initial_avg_var=0, **kwargs)
    ours = MultiNodeBatchNormalization(3, comm, **kwargs)
    for _ in range(3):
        y_all, gx_all = run(one, np.concatenate(xs), np.concatenate(weights))
        y, gx = run(ours, xs[comm.rank], weights[comm.rank])
    begin = shape[0] * comm.rank
    tolerance = {np.float16: 5e-3, np.float32: 2e-5, np.float64: 1e-10}[dtype]
    close = {'rtol': tolerance, 'atol': tolerance}
    np.testing.assert_allclose(y, y_all[begin:begin + shape[0]], **close)
    np.testing.assert_allclose(gx, gx_all[begin:begin + shape[0]], **close)
    assert y.dtype == gx.dtype == dtype
    np.testing.assert_allclose(ours.avg_mean, one.avg_mean, **close)
    if gamma_and_beta:
        # The optimizer will take the mean over the ranks, of losses that are summed here.
        np.testing.assert_allclose(ours.gamma.grad * comm.size, one.gamma.grad, **close)
        np.testing.assert_allclose(ours.beta.grad * comm.size, one.beta.grad, **close)
    np.testing.assert_allclose(ours.avg_var, one.avg_var, **close)


def test_batches_of_different_length_count_by_example(comm):
    x = np.random.RandomState(1).normal(3, 2, (10 * comm.size, 3)).astype(np.float32)
    begins = [0]
    for rank in range(comm.size):
        begins.append(begins[-1] + 2 * rank + 3)
    x = x[:begins[-1]]
    weight = np.random.RandomState(2).normal(0, 1, x.shape)
    mine = slice(begins[comm.rank], begins[comm.rank + 1])
    y_all, gx_all = run(chainer.links.BatchNormalization(3), x, weight)
    y, gx = run(MultiNodeBatchNormalization(3, comm), x[mine], weight[mine])
    np.testing.assert_allclose(y, y_all[mine], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(gx, gx_all[mine], rtol=1e-4, atol=1e-5)


def test_an_empty_batch_on_one_rank_does_not_count(comm):
    if comm.size == 1:
        pytest.skip('takes two ranks')
    xs = batches(comm, (6, 3), np.float32)
    xs[-1] = xs[-1][:0]
    y_all, _ = run(chainer.links.BatchNormalization(3), np.concatenate(xs), np.float64(1))
    if comm.rank < comm.size - 1:
        y = MultiNodeBatchNormalization(3, comm)(xs[comm.rank]).array
        np.testing.assert_allclose(y, y_all[6 * comm.rank:][:6], rtol=1e-5, atol=1e-5)
    else:
        assert MultiNodeBatchNormalization(3, comm)(xs[-1]).shape == (0, 3)


def test_variance_far_from_zero_is_stable(comm):
    """Mean square minus squared mean would have no correct digit here."""
    xs = batches(comm, (50, 1), np.float32, scale=1, offset=1e4)
    y = MultiNodeBatchNormalization(1, comm)(xs[comm.rank]).array
    whole = np.concatenate(xs).astype(np.float64)
    expected = (xs[comm.rank] - whole.mean()) / whole.std()
    np.testing.assert_allclose(y, expected, atol=5e-3)


def test_statistics_have_the_same_bits_on_all_ranks(comm):
    bn = MultiNodeBatchNormalization(3, comm)
    run(bn, batches(comm, (5, 3), np.float32)[comm.rank], np.float64(comm.rank + 1))
    mine = [bn.avg_mean.tobytes(), bn.avg_var.tobytes(), bn.gamma.grad.tobytes()]
    assert comm.allgather_obj(mine) == [mine] * comm.size


def test_mixed16_keeps_float32_parameters(comm):
    with chainer.using_config('dtype', chainer.mixed16):
        bn = MultiNodeBatchNormalization(3, comm)
    assert bn.gamma.dtype == bn.avg_var.dtype == np.float32
    assert bn(np.ones((2, 3), np.float16)).dtype == np.float16


def test_in_test_mode_nothing_is_exchanged(comm):
    bn = MultiNodeBatchNormalization(3, comm)
    bn(batches(comm, (5, 3), np.float32)[comm.rank])
    if comm.rank == 0:  # the other ranks do not take part
        with chainer.using_config('train', False):
            x = np.ones((2, 3), np.float32)
            expected = (x - bn.avg_mean) / np.sqrt(bn.avg_var + bn.eps)
            np.testing.assert_allclose(bn(x).array, expected, rtol=1e-4)


def test_fine_tuning_takes_plain_averages(comm):
    bn = MultiNodeBatchNormalization(3, comm)
    means = []
    for i in range(3):
        xs = batches(comm, (5, 3), np.float32, offset=i)
        bn(xs[comm.rank], finetune=True)
        means.append(np.concatenate(xs).mean(axis=0))
    assert bn.N == 3
    np.testing.assert_allclose(bn.avg_mean, np.mean(means, axis=0), rtol=1e-4, atol=1e-6)
    bn.start_finetuning()
    assert bn.N == 0


def test_recomputing_leaves_the_averages(comm):
    bn = MultiNodeBatchNormalization(3, comm)
    x = batches(comm, (5, 3), np.float32)[comm.rank]
    run(bn, x, np.float64(1))
    before = bn.avg_mean.copy(), bn.avg_var.copy()
    with chainer.using_config('in_recomputing', True):
        bn(x)
    np.testing.assert_array_equal(bn.avg_mean, before[0])
    np.testing.assert_array_equal(bn.avg_var, before[1])


def test_second_derivative_is_rejected(comm):
    bn = MultiNodeBatchNormalization(3, comm)
    x = chainer.Variable(batches(comm, (5, 3), np.float32)[comm.rank])
    with pytest.raises(RuntimeError, match='second derivative'):
        F.sum(bn(x)).backward(enable_double_backprop=True)


def test_copies_share_the_communicator(comm):
    bn = MultiNodeBatchNormalization(3, comm)
    assert copy.deepcopy(bn).comm is comm
    assert bn.copy().comm is comm


def test_other_shape_on_one_rank_raises_on_all_ranks(comm):
    if comm.size == 1:
        pytest.skip('takes two ranks')
    size = 4 if comm.rank == 0 else 3
    with pytest.raises(ValueError, match='rank 0: 4'):
        MultiNodeBatchNormalization(size, comm)(np.ones((2, size), np.float32))


def test_backends(comm):
    assert get_communication_backend(comm) == 'mpi'
    assert get_communication_backend(comm, 'mpi') == 'mpi'
    with pytest.raises(ValueError, match='nccl is not supported'):
        MultiNodeBatchNormalization(3, comm, communication_backend='nccl')
    with pytest.raises(ValueError, match='must be'):
        MultiNodeBatchNormalization(3, comm, communication_backend='tcp')
