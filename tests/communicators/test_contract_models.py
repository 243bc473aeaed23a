"""Model operations: parameters copied from rank 0, and gradients averaged in place."""

import chainer
import chainer.links as L
import numpy as np
import pytest
from shared_fixtures import raises_on_all

from chainermn._transport import owned_arrays
from chainermn.communicators._channel import Channel
from chainermn.communicators._nccl_communicator_base import NcclCommunicatorBase

pytestmark = pytest.mark.every_size


@pytest.fixture(autouse=True)
def takes_models_on_the_cpu(comm):
    if isinstance(comm, NcclCommunicatorBase):
        pytest.skip('takes models on a GPU only')


@pytest.fixture
def mean(comm, name):
    """The expected gradient, given the mean and the gradient of this rank."""
    return lambda mean, own: own if name == 'dummy' else mean


def test_bcast_data_keeps_bits(comm):
    """NaNs with a payload, negative zeros, and dtypes that gradients cannot have."""
    link = chainer.Link()
    bits = np.array([0x7fc01234, 0xffc00001, 0x80000000, 1], np.uint32)
    with link.init_scope():
        link.w = chainer.Parameter((bits + comm.rank).view(np.float32))
        link.n = chainer.Parameter(np.array([2**62 + 1, -1]) * (comm.rank + 1))
        link.c = chainer.Parameter(np.array([1j, 2]) * (comm.rank + 1))
    comm.bcast_data(link)
    assert link.w.array.tobytes() == bits.tobytes()
    assert link.n.array.tolist() == [2**62 + 1, -1]
    assert link.c.array.tolist() == [1j, 2]


@pytest.mark.parametrize('tied', ['nowhere', 'everywhere', 'on rank 0'])
def test_bcast_data_of_parameters_that_share_memory(comm, tied):
    """A model that was copied or pickled has lost its ties, and would train differently."""
    link = chainer.Link()
    with link.init_scope():
        link.a = chainer.Parameter(np.full((2, 3), comm.rank + 1.))
        link.b = chainer.Parameter(np.full((3, 2), comm.rank + 1.))
    if tied == 'everywhere' or (tied == 'on rank 0' and comm.rank == 0):
        link.b.array = link.a.array.T
    if tied == 'on rank 0' and comm.size > 1:
        with raises_on_all(ValueError, match=r'/b: .*, shares memory with /a on rank 0'):
            comm.bcast_data(link)
        return
    comm.bcast_data(link)
    assert np.shares_memory(link.a.array, link.b.array) == (
        tied == 'everywhere' or (tied == 'on rank 0' and comm.rank == 0))
    assert (link.a.array == 1).all()
    assert (link.b.array == 1).all()


@pytest.mark.parametrize('is_default', [False, True], ids=['own', 'default'])
def test_allgather_shards(comm, is_default):
    """Arrays of several dtypes and lengths; some ranks have none, and some arrays no elements."""
    channel = Channel(comm) if is_default else comm._chainermn_channel

    def value(rank, length, dtype):
        return (np.arange(length) * 3 + rank).astype(dtype)

    kinds = [[], [(5, 'f4'), (0, 'f4'), (20000, 'f4')], [(3, 'f2'), (2, 'i8'), (1, 'f8')]]
    shards = [[value(rank if rank == comm.rank else 99, *kind) for kind in kinds[rank % 3]]
              for rank in range(comm.size)]
    arrays = [array for shard in shards for array in shard]
    channel.allgather_shards(shards)
    assert all(a is b for a, b in zip(arrays, sum(shards, []), strict=True))  # noqa: RUF017
    for rank, shard in enumerate(shards):
        for array, kind in zip(shard, kinds[rank % 3], strict=True):
            np.testing.assert_array_equal(array, value(rank, *kind))


@pytest.mark.mpi(min_size=2)
def test_different_shards(comm, same_error):
    x, others = np.zeros((2, 3), 'f'), [[]] * (comm.size - 1)
    for odd, facts in (([[x.T], *others], ('float32 (2, 3) on', 'float32 (3, 2) on')),
                       ([*others, [x]], ('array 0 of the shard of rank 0', 'nothing on'))):
        error = same_error(comm._chainermn_channel.allgather_shards,
                           odd if comm.rank == 1 else [[x], *others])
        assert str(error).startswith('Collective mismatch in allgather_shards: ')
        assert all(fact in str(error) for fact in facts)


@pytest.mark.parametrize('is_default', [False, True], ids=['own', 'default'])
def test_mean_grad_shards(comm, mean, is_default, monkeypatch):
    """Gradients in many chunks. All ranks get a parameter in no shard, or in every shard."""
    size = 30_000
    monkeypatch.setattr(owned_arrays, 'CHUNK', 2**15)
    channel = Channel(comm) if is_default else comm._chainermn_channel
    link = chainer.Link()
    shards = [{'/a': (size * rank // comm.size, size * (rank + 1) // comm.size), '/d': (0, 3)}
              for rank in range(comm.size)]
    shards[-1]['/c'] = 0, size
    begin, end = shards[comm.rank]['/a']
    with link.init_scope():
        for name, length in ('a', size), ('b', 4), ('c', size), ('d', 3):
            setattr(link, name, chainer.Parameter(np.zeros(length, 'f')))
            getattr(link, name).grad = np.arange(length, dtype='f') % 1000 + comm.rank
    channel.mean_grad_shards(link, True, shards)
    shift = mean((comm.size - 1) / 2, comm.rank)
    np.testing.assert_array_equal(
        link.a.grad[begin:end], (np.arange(size) % 1000 + shift).astype('f')[begin:end])
    if comm.rank == comm.size - 1:
        np.testing.assert_array_equal(
            link.c.grad, (np.arange(size) % 1000 + shift).astype('f'))
    np.testing.assert_array_equal(link.b.grad, np.arange(4) + shift)
    np.testing.assert_array_equal(link.d.grad, np.arange(3) + shift)


def set_gradients_of(model, comm):
    means, own = {}, {}
    for path, param in model.namedparams():
        means[path] = (np.arange(param.size) % 9 - 4).reshape(param.shape).astype(param.dtype)
        param.grad = means[path] + param.dtype.type(2 * comm.rank - comm.size + 1)
        own[path] = param.grad.copy()
    return means, own


def test_float16_gradients_are_summed_in_float32(comm, mean):
    link = chainer.Link()
    with link.init_scope():
        link.w = chainer.Parameter(np.zeros(3, np.float16))
    # The sum of the first two is beyond float16; that of the last loses its ones there.
    own = np.array([65504, -65504, 2048 if comm.rank == 0 else 1], np.float16)
    link.w.grad = own.copy()
    comm.multi_node_mean_grad(link)
    last = np.float32((2048 + comm.size - 1) / comm.size).astype(np.float16)
    np.testing.assert_array_equal(link.w.grad,
                                  mean(np.array([65504, -65504, last], np.float16), own))


def test_allreduce_grad_warns(comm, mean):
    model = L.Linear(3, 2)
    means, own = set_gradients_of(model, comm)
    with pytest.warns(DeprecationWarning, match='multi_node_mean_grad') as caught:
        comm.allreduce_grad(model)
    assert caught[0].filename == __file__
    np.testing.assert_array_equal(model.W.grad, mean(means['/W'], own['/W']))
    model.cleargrads()
    with pytest.warns(DeprecationWarning, match='multi_node_mean_grad'):
        comm.allreduce_grad(model, zero_fill=True)
    assert not model.W.grad.any()


class Sent:
    """An array with the attributes of a parameter that ChainerMN 7 reads, and no others."""

    def __init__(self, array):
        self.data = self.grad = array

    def namedparams(self):
        yield '/array', self


def test_objects_that_are_not_links(comm, mean):
    """Distributed K-FAC for Chainer sends its matrices in this way."""
    sent = Sent(np.full((3, 2), comm.rank + 1, np.float32))
    comm.bcast_data(sent)
    np.testing.assert_array_equal(sent.data, np.ones((3, 2), np.float32))
    sent.grad = np.full((3, 2), comm.rank, np.float32)
    comm.multi_node_mean_grad(sent)
    wanted = mean((comm.size - 1) / 2, comm.rank)
    np.testing.assert_array_equal(sent.grad, np.full((3, 2), wanted, np.float32))

