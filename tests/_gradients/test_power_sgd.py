"""PowerSGD: means of low rank, what is sent, errors; tests/optimizers trains with it."""

import chainer
import numpy as np
import pytest
from shared_fixtures import communicators

import chainermn
from chainermn._transport.array_list import ArrayList
from chainermn.communicators import compression
from chainermn.communicators.compression import PowerSGD

pytestmark = pytest.mark.every_size

comm = communicators('naive', 'flat')


class Weight(chainer.Link):
    def __init__(self, *shapes):
        super().__init__()
        with self.init_scope():
            for n, shape in enumerate(shapes):
                setattr(self, f'w{n}', chainer.Parameter(np.zeros(shape, np.float32)))


def mean(comm, gradients, compressor):
    """Averages gradients; returns the means."""
    model = Weight(*(gradient.shape for gradient in gradients))
    for param, gradient in zip(model.params(), gradients, strict=True):
        param.grad = gradient.copy()
    comm.multi_node_mean_grad(model, compression=compressor)
    means = [param.grad for param in model.params()]
    assert len(set(comm.allgather_obj(b''.join(x.tobytes() for x in means)))) == 1
    return means


def normal(seed, *shape):
    return np.random.RandomState(seed).normal(size=shape).astype(np.float32)


def mean_of(comm, make):
    return sum(make(rank) for rank in range(comm.size)) / comm.size


def test_a_mean_of_low_rank_is_exact(comm):
    # All ranks have the same left vectors, so the mean also has rank 2.
    def gradient(rank):
        return normal(100, 30, 2) @ normal(rank, 2, 5 * 8).reshape(2, 40)

    result, = mean(comm, [gradient(comm.rank).reshape(30, 5, 8)], PowerSGD(rank=2))
    expected = mean_of(comm, gradient).reshape(30, 5, 8)
    np.testing.assert_allclose(result, expected, atol=1e-4)


def test_vectors_and_small_matrices_are_sent_as_they_are(comm):
    gradients = [normal(comm.rank, 1000), normal(comm.rank, 4, 4), normal(comm.rank, 1, 1000)]
    compressor = PowerSGD()
    for n, result in enumerate(mean(comm, gradients, compressor)):
        np.testing.assert_allclose(
            result, mean_of(comm, lambda rank, n=n: normal(rank, *gradients[n].shape)), atol=1e-6)
    assert compressor.state == {}


@pytest.mark.parametrize('shape, rank, rate, is_compressed', [
    ((100, 100), 1, 2, True), ((100, 100), 25, 2, True), ((100, 100), 26, 2, False),
    ((10, 4, 25), 2, 4, True), ((10, 4, 25), 2, 5, False), ((100,), 1, 1, False),
    ((), 1, 1, False), ((0, 5), 1, 1, False), ((5, 0), 1, 1, False)])
def test_minimum_compression_rate(shape, rank, rate, is_compressed):
    assert PowerSGD(rank, rate).is_compressed(shape) == is_compressed


def test_numbers_sent(comm):
    sent = []

    def average(arrays, results):
        sent.extend(x.size for x in arrays)
        comm._context.transport.mean(ArrayList.of(arrays), results)

    arrays = [normal(0, 200, 300), normal(0, 50)]
    PowerSGD(rank=3).mean(['/W', '/b'], arrays, arrays, average, pytest.fail)
    assert sum(sent) == 3 * (200 + 300) + 50


@pytest.mark.parametrize('owner, name', [
    (PowerSGD, '_matrix'), (np.linalg, 'qr'), (PowerSGD, '_store')])
def test_an_error_on_one_rank_is_raised_on_all(comm, owner, name, same_error, check_usable,
                                               monkeypatch):
    def fail(*args):
        raise np.linalg.LinAlgError('too much')

    compressor, gradients = PowerSGD(), [normal(comm.rank, 30, 30), normal(comm.rank, 7)]
    with monkeypatch.context() as patch:
        if comm.rank == comm.size - 1:
            patch.setattr(owner, name, fail)
        error = same_error(mean, comm, gradients, compressor)
    assert isinstance(error, ValueError)
    assert 'too much' in str(error)
    check_usable(comm)
    mean(comm, gradients, compressor)


def test_state_of_another_rank_of_the_approximation_is_dropped(comm):
    compressor = PowerSGD(rank=1)
    mean(comm, [normal(comm.rank, 30, 20)], compressor)
    if comm.rank == 0:  # as after loading a snapshot that has the state of one rank
        compressor.state = {key: value.repeat(3, axis=1) if key.endswith('.q') else value
                            for key, value in compressor.state.items()}
    else:
        compressor.state = {}
    mean(comm, [normal(comm.rank, 30, 20)], compressor)
    assert [value.shape for key, value in compressor.state.items() if key.endswith('.q')] == [
        (20, 1)]


def test_double_buffering_is_rejected(comm):
    with pytest.raises(ValueError, match='cannot be combined with double_buffering'):
        chainermn.create_multi_node_optimizer(
            chainer.optimizers.SGD(), comm, double_buffering=True, compression='powersgd')


@pytest.mark.parametrize('parameters, error, message', [
    ({'rank': 0}, ValueError, r'factors\) must be a positive integer, not 0'),
    ({'rank': 1.5}, TypeError, 'must be a positive integer, not 1.5'),
    ({'rank': True}, TypeError, 'must be a positive integer, not True'),
    ({'min_compression_rate': .5}, ValueError, 'must be at least 1, not 0.5'),
    ({'min_compression_rate': float('nan')}, ValueError, 'must be at least 1'),
    ({'min_compression_rate': '2'}, TypeError, 'must be a number'),
    ({'threshold': 1}, ValueError, 'no parameter threshold; it has rank, min_compression_rate')])
def test_invalid_parameters(parameters, error, message):
    with pytest.raises(error, match=message):
        compression.get({'type': 'powersgd', **parameters})


@pytest.mark.mpi(min_size=2)
def test_different_ranks_of_the_approximation_raise(comm):
    model = Weight((30, 20))
    model.w0.grad = normal(0, 30, 20)
    with pytest.raises(ValueError, match=r'compression: powersgd rank=1 .* on rank 0'):
        comm.multi_node_mean_grad(model, compression=PowerSGD(1 if comm.rank == 0 else 2))
