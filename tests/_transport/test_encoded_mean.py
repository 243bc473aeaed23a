"""Compressed gradients: means, bytes sent, and invalid compressors."""

import chainer
import numpy as np
import pytest
from failing_compressor import Fails
from mpi4py import MPI

import chainermn
from chainermn._transport import topology
from chainermn.communicators import compression
from chainermn.communicators.compression import TwoBit

pytestmark = pytest.mark.every_size

SIZE = 1000


def model_of(*grads):
    """A model with parameters ``p0``, ``p1``, ... that have these gradients."""
    link = chainer.Link()
    with link.init_scope():
        for n, grad in enumerate(grads):
            param = chainer.Parameter(np.zeros(grad.shape, grad.dtype))
            param.grad = grad.copy()
            setattr(link, f'p{n}', param)
    return link


def gradient(rank, step=0, dtype='float32', size=SIZE):
    return np.random.RandomState(100 * step + rank).normal(scale=.4, size=size).astype(dtype)


def check_same_bits(comm, name, model):
    bits = comm.allgather_obj([param.grad.tobytes() for param in model.params()])
    if name != 'dummy':
        assert all(theirs == bits[0] for theirs in bits)


def ranks_of(comm, name):
    """The ranks whose gradients are averaged; with dummy, only this rank."""
    return [comm.rank] if name == 'dummy' else range(comm.size)


class Counted:
    """An MPI communicator that counts what this rank sends to others."""

    def __init__(self, mpi_comm):
        self.mpi_comm = mpi_comm
        self.n_bytes = 0

    def __getattr__(self, name):
        return getattr(self.mpi_comm, name)

    def Allreduce(self, *args):  # noqa: N802
        self.n_bytes += 2 * args[1].nbytes * (self.size - 1) // self.size  # what a ring sends
        self.mpi_comm.Allreduce(*args)

    def Allgatherv(self, sent, received):  # noqa: N802
        self.n_bytes += sent.nbytes * (self.size - 1)
        self.mpi_comm.Allgatherv(sent, received)

    def Alltoallv(self, sent, received):  # noqa: N802
        self.n_bytes += sum(n for rank, n in enumerate(sent[1]) if rank != self.rank)
        self.mpi_comm.Alltoallv(sent, received)


def n_bytes(comm, compressor):
    comm.multi_node_mean_grad(model_of(gradient(comm.rank)))  # so that flat has its shared memory
    transport = comm._context.transport
    plain, transport.mpi_comm = transport.mpi_comm, Counted(transport.mpi_comm)
    try:
        comm.multi_node_mean_grad(
            model_of(*(gradient(comm.rank, n, size=960) for n in range(3))), False, compressor)
        return transport.mpi_comm.n_bytes
    finally:
        transport.mpi_comm = plain


def test_bytes_that_a_rank_sends(comm, name):
    others = comm.size - 1
    if name == 'dummy':
        assert n_bytes(comm, 'fp16') == n_bytes(comm, TwoBit()) == 0
        return
    uncompressed = 3 * 2 * 960 * 4 * others // comm.size
    # Without compression flat moves arrays on the host through shared memory.
    assert n_bytes(comm, None) == (0 if name == 'flat' else uncompressed)
    # All slices but its own, and the mean of its own slice to all other ranks.
    assert n_bytes(comm, 'fp16') == n_bytes(comm, 'bf16') == uncompressed // 2
    assert n_bytes(comm, TwoBit()) == 3 * 960 // 4 * others


@pytest.mark.parametrize('kind', ['fp16', 'bf16', '2bit'])
def test_dummy_sends_no_gradients_between_nodes(monkeypatch, kind):
    rank = MPI.COMM_WORLD.rank
    monkeypatch.setattr(topology, 'here', lambda: topology.Place(f'node {rank}', 1 << rank))
    comm = chainermn.create_communicator('dummy')
    own = np.full(SIZE, (-1) ** rank * .5, 'f')  # exact in each encoding
    model = model_of(own)
    comm.multi_node_mean_grad(model, compression=compression.get(kind))
    np.testing.assert_array_equal(model.p0.grad, own)
    comm.finalize()


def test_overflow_on_all_ranks(comm, name):
    for compressor, seen in (('fp16', np.isinf), ('bf16', np.isnan), (TwoBit(), np.isnan)):
        x = np.ones(20, np.float32)
        if comm.rank == comm.size - 1:
            x[3] = 1e6 if compressor == 'fp16' else np.nan
        model = model_of(x)
        comm.multi_node_mean_grad(model, compression=compressor)
        if name != 'dummy' or comm.rank == comm.size - 1:
            assert np.flatnonzero(seen(model.p0.grad)).tolist() == [3]


class Own:
    """Sends the signs and the mean magnitude; not derived from any class of ours."""

    def compress(self, x, key):
        return np.append(np.packbits(x > 0), np.float32([abs(x).mean()]).view(np.uint8))

    def decompress(self, encoded, size, dtype):
        signs = 2. * np.unpackbits(encoded[:-4])[:size] - 1
        return (encoded[-4:].copy().view(np.float32) * signs).astype(dtype)


def test_custom_compressor(comm, name):
    model = model_of(gradient(comm.rank))
    comm.multi_node_mean_grad(model, compression=Own())
    check_same_bits(comm, name, model)
    expected = np.mean([np.sign(x) * abs(x).mean() for x in
                        (gradient(rank) for rank in ranks_of(comm, name))], axis=0)
    np.testing.assert_allclose(model.p0.grad, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize('one, others', [
    ('fp16', None), ('fp16', 'bf16'), (TwoBit(1), TwoBit(2)), (Own(), 'fp16')])
@pytest.mark.mpi(min_size=2)
def test_compression_must_be_equal_on_all_ranks(comm, one, others, same_error, check_usable):
    error = same_error(comm.multi_node_mean_grad, model_of(np.ones(3, np.float32)), False,
                       one if comm.rank == 0 else others)
    assert isinstance(error, ValueError)
    assert 'compression: ' in str(error)
    assert 'the same ' in str(error)
    check_usable(comm)


@pytest.mark.parametrize('bad, kind, message', [
    ('3bit', ValueError, 'unknown compression type'),
    (3, TypeError, 'compression must be None'),
    ('2bit', ValueError, 'chainermn.communicators.compression.get'),
    ({'type': '2bit', 'threshold': 0}, ValueError, 'threshold must be a positive number'),
])
def test_invalid_compressor(comm, bad, kind, message, same_error, check_usable):
    for odd in range(comm.size):
        error = same_error(comm.multi_node_mean_grad, model_of(np.ones(3, np.float32)), False,
                           bad if comm.rank == odd else None, failed=odd)
        assert isinstance(error, kind)
        assert message in str(error)
    check_usable(comm)


class Odd(Own):
    """Fails on one rank."""

    elementwise = False

    def __init__(self, how):
        self.how = how

    def compress(self, x, key):
        if self.how == 'raises':
            raise OverflowError('too much')
        if self.how == 'is longer':
            return np.append(super().compress(x, key), np.uint8(0))
        if self.how == 'is of another dtype':
            return super().compress(x, key).astype(np.float32)
        return np.zeros((2, 2)) if self.how == 'is not flat' else super().compress(x, key)


@pytest.mark.parametrize('how, kind, message', [
    ('raises', OverflowError, 'too much'), ('is longer', ValueError, 'encoded 0: uint8'),
    ('is of another dtype', ValueError, 'encoded 0: uint8'), ('is not flat', ValueError, '(2, 2)')])
def test_compressor_fails_on_one_rank(comm, how, kind, message, same_error,
                                                  check_usable):
    if comm.size == 1 and message == 'encoded 0: uint8':
        pytest.skip('needs two ranks to differ')
    error = same_error(comm.multi_node_mean_grad, model_of(np.ones(30, np.float32)), False,
                       Odd(how if comm.rank == comm.size - 1 else ''), table=False)
    assert isinstance(error, kind)
    assert message in str(error)
    check_usable(comm)


@pytest.mark.parametrize('method, call', [
    ('compress', 'first'), ('compress', 'second'), ('decompress', 'first'), ('decompress', 'last')])
def test_an_error_during_the_exchange_is_raised_on_all_ranks(comm, name, method, call, same_error,
                                                             check_usable):
    if name == 'dummy' and call != 'first':
        pytest.skip('calls each method once')
    number = {'first': 1, 'second': 2, 'last': comm.size + 1}[call]
    model = model_of(np.ones(30, np.float32))
    for odd in range(comm.size):
        error = same_error(comm.multi_node_mean_grad, model, False,
                           Fails(method, number) if comm.rank == odd else Fails())
        assert type(error) is MemoryError
        assert 'too much' in str(error)
        is_sent = (method, call) != ('compress', 'first')
        assert comm.size == 1 or is_sent == ('the gradients are invalid' in str(error))
    comm.multi_node_mean_grad(model, False, Fails())
    check_usable(comm)

