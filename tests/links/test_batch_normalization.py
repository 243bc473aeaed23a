"""Multi-node batch normalization: what random batches do not show."""
import copy

import chainer
import chainer.functions as F
import numpy as np
import pytest
from shared_fixtures import communicators

from chainermn.functions.batch_normalization import get_communication_backend
from chainermn.links import MultiNodeBatchNormalization

pytestmark = pytest.mark.every_size

comm = communicators('naive', 'version7')


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


def test_variance_far_from_zero_is_stable(comm):
    """Mean square minus squared mean would have no correct digit here."""
    xs = batches(comm, (50, 1), np.float32, scale=1, offset=1e4)
    y = MultiNodeBatchNormalization(1, comm)(xs[comm.rank]).array
    whole = np.concatenate(xs).astype(np.float64)
    expected = (xs[comm.rank] - whole.mean()) / whole.std()
    np.testing.assert_allclose(y, expected, atol=5e-3)


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


def test_a_finalized_communicator_suffices_in_test_mode(comm):
    part = comm.split(0, comm.rank)
    part.finalize()
    bn = MultiNodeBatchNormalization(3, part)
    with chainer.using_config('train', False):
        assert bn(np.ones((2, 3), np.float32)).shape == (2, 3)


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


@pytest.mark.mpi(min_size=2)
def test_other_shape_on_one_rank_raises_on_all_ranks(comm):
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
