"""Shards cover an array exactly once; messages arrive as written; compressed ones are small."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chainermn.communicators import compression
from chainermn.kvstore import _sharding
from chainermn.kvstore._sharding import Entry, KeyLayout

SHAPES = st.lists(st.integers(0, 7), max_size=3).map(tuple)


@given(SHAPES, st.integers(1, 5), st.integers(0, 9), st.integers(0, 30), st.booleans())
def test_shards(shape, n_servers, key_id, bound, is_row_sparse):
    if not shape:
        is_row_sparse = False
    layout = KeyLayout.of('key', key_id, shape, np.dtype(int), is_row_sparse, n_servers, bound)
    x = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    assert layout.is_split == (n_servers > 1 and shape != () and x.size >= bound)
    assert set(layout.shards) == (
        set(range(n_servers)) if layout.is_split else {key_id % n_servers})
    shards = {server: layout.shard(x, server) for server in layout.shards}
    for server, shard in shards.items():
        assert shard.shape == layout.shard_shape(server)
        if is_row_sparse:
            np.testing.assert_array_equal(shard, x[layout.shard_rows(server)])
    np.testing.assert_array_equal(
        np.concatenate([shards[server].reshape(-1) for server in sorted(shards)]), x.reshape(-1))
    if layout.is_split:
        lengths = [len(shard) for shard in shards.values()]
        assert max(lengths) - min(lengths) <= 1


def test_shards_are_views():
    x = np.zeros((3, 4))
    layout = KeyLayout.of(0, 0, x.shape, x.dtype, False, 5, 1)
    for server in layout.shards:
        layout.shard(x, server)[...] += 1
    np.testing.assert_array_equal(x, np.ones((3, 4)))


@pytest.mark.parametrize('is_row_sparse, text', [
    (False, "'W': float32 (2, 3)"), (True, "'W': row-sparse float32 (2, 3)")])
def test_text(is_row_sparse, text):
    assert str(KeyLayout.of('W', 0, (2, 3), np.dtype('f'), is_row_sparse, 1, 1)) == text


# --- messages ---

ARRAYS = st.tuples(st.sampled_from(['int8', 'float16', 'float32', 'complex128']),
                   st.integers(0, 20)).map(lambda args: np.arange(args[1]).astype(args[0]))
ENTRIES = st.builds(
    Entry, st.integers(0, 2**40),
    st.sampled_from([_sharding.DENSE, _sharding.COMPRESSED, _sharding.ROWS]),
    st.lists(st.integers(0, 2**50)).map(lambda ids: np.array(ids, np.int64)), ARRAYS)


@given(st.lists(ENTRIES, max_size=5))
def test_entries(entries):
    message = _sharding.join(_sharding.encode(entries))
    assert (message.dtype, message.ndim, len(message) % 8) == (np.uint8, 1, 0)
    found = list(_sharding.decode(message))
    assert len(found) == len(entries)
    for one, entry in zip(found, entries, strict=True):
        assert (one.key_id, one.kind) == (entry.key_id, entry.kind)
        assert one.row_ids.tolist() == entry.row_ids.tolist()
        assert one.values.tobytes() == entry.values.tobytes()


# --- compression ---

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
