"""Compressed messages are small; compression between devices."""

import numpy as np
import pytest

from chainermn.communicators import compression
from chainermn.kvstore import _sharding

# --- messages ---


def adding(kv):
    kv.set_updater(lambda key, input, stored: stored.__iadd__(input))


@pytest.mark.parametrize('dtype', [np.float16, np.float32, np.float64])
def test_bytes_of_a_compressed_push(dist, dtype):
    """16 values take the bytes of one float32."""
    n = 160_000
    dist.init('w', np.zeros(n, dtype))
    plain = sent_bytes(dist, np.ones(n, dtype))
    dist.set_gradient_compression({'type': '2bit'})
    compressed = sent_bytes(dist, np.ones(n, dtype))
    assert n * np.dtype(dtype).itemsize <= plain <= n * np.dtype(dtype).itemsize + 100
    assert n // 4 <= compressed <= n // 4 + 100


def sent_bytes(kv, x):
    messages = _sharding.shard_values(
        [kv._layouts['w']], [x], kv.num_workers, kv._backend.server.compress)
    return sum(len(_sharding.join(_sharding.encode(entries))) for entries in messages.values())


@pytest.mark.parametrize('type', ['local', 'device'])
def test_compression_between_devices(create, type):
    kv = create(type)
    kv.init('w', np.zeros(3, np.float32))
    adding(kv)
    kv.set_gradient_compression({'type': '2bit', 'threshold': .5})
    kv.push('w', [np.array([.75, .25, 0], 'f'), np.array([.25, -.5, -9], 'f')])
    np.testing.assert_array_equal(kv.pull('w'), [.5, -.5, -.5])
    kv.push('w', [np.array([.25, .25, 0], 'f'), np.array([.25, 0, 0], 'f')])
    np.testing.assert_array_equal(kv.pull('w'), [1.5, 0, -1])
    kv.push('w', np.array([.25, .25, .25], 'f'))  # of one device: is not sent
    np.testing.assert_array_equal(kv.pull('w'), [1.75, .25, -.75])


@pytest.mark.mpi(min_size=2)
def test_ranks_need_the_same_compression(dist, same_error, comm):
    error = same_error(dist.set_gradient_compression,
                       {'type': '2bit', 'threshold': 1. + comm.rank})
    assert isinstance(error, ValueError)
    assert 'the ranks made different calls' in str(error)
    assert repr(compression.TwoBit(1.)) in str(error)
