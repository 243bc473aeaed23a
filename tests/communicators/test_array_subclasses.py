"""Subclasses and unaligned arrays as results, parameters, values and data.

test_contract.py sends them.
"""

import chainer
import numpy as np
import pytest
from contract import LAYOUTS
from each_case import each_case

import chainermn

pytestmark = pytest.mark.every_size


KINDS = {name: LAYOUTS[name] for name in ('matrix', 'odd', 'unaligned')}


def broadcast(x):
    """An array whose columns share memory, and can be written to."""
    return np.lib.stride_tricks.as_strided(x, x.shape, (x.strides[0], 0))


def plain(rank, rows=4, columns=3):
    return (np.arange(rows * columns, dtype='f').reshape(rows, columns) * (rank + 1)) % 5


@each_case('kind, rows', [('matrix', 4), ('odd', 4), ('unaligned', 4), ('unaligned', 30000)])
def test_models(comms, kind, rows):
    for comm in comms:
        link = chainer.Link()
        with link.init_scope():
            link.w = chainer.Parameter(plain(comm.rank, rows))
        make = KINDS[kind] if comm.rank == 0 else np.asarray
        link.w.array = make(plain(comm.rank, rows))
        link.w.grad = make(plain(comm.rank, rows))
        comm.multi_node_mean_grad(link)
        comm.bcast_data(link)
        expected = np.mean([plain(rank, rows) for rank in range(comm.size)], axis=0)
        np.testing.assert_allclose(np.asarray(link.w.grad), expected, rtol=1e-6)
        np.testing.assert_array_equal(np.asarray(link.w.array), plain(0, rows))


def test_elements_that_share_memory(comms, same_error):
    for comm in comms:
        link = chainer.Link()
        with link.init_scope():
            link.w = chainer.Parameter(plain(0))
        grads = [broadcast(plain(rank)) if rank == 0 else plain(rank) for rank in range(comm.size)]
        link.w.grad, expected = grads[comm.rank], np.mean(grads, axis=0)
        comm.multi_node_mean_grad(link)
        np.testing.assert_allclose(link.w.grad, expected, rtol=1e-6)
        link.w.array = broadcast(plain(0))
        error = same_error(lambda link=link, comm=comm: comm.bcast_data(link))
        assert 'parameter /w: several elements of its array share' in str(error)


def test_foreign_byte_order_of_a_parameter(comms, same_error, check_usable):
    for comm in comms:
        link = chainer.Link()
        with link.init_scope():
            link.w = chainer.Parameter(plain(0).astype('>f4'))
        error = same_error(lambda link=link, comm=comm: comm.bcast_data(link))
        assert 'parameter /w: its array has a non-native byte order' in str(error)
        check_usable(comm)


def test_kvstore(comms):
    kv = chainermn.kvstore.create('dist_sync', comms[0])
    kv.init('key', plain(0).view(np.matrix))
    kv.push('key', plain(comms[0].rank).view(np.matrix))
    out = np.zeros((4, 3), 'f')
    kv.pull('key', out)
    np.testing.assert_allclose(out, sum(plain(rank) for rank in range(comms[0].size)))
    kv.close()


def test_scatter_dataset(comms):
    comm = comms[0]
    rows = np.arange(12.).reshape(6, 2)
    part = chainermn.scatter_dataset(rows.view(np.matrix) if comm.rank == 0 else None, comm)
    begin, end = chainermn.scatter_index(6, comm)
    got = np.concatenate([np.atleast_2d(np.asarray(part[i])) for i in range(len(part))])
    np.testing.assert_array_equal(got, rows[begin:end])

