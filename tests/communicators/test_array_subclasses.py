"""Subclasses of arrays as results, parameters, values and data; test_contract.py sends them."""

import chainer
import numpy as np
import pytest
from contract import LAYOUTS

import chainermn

pytestmark = pytest.mark.every_size


KINDS = {name: LAYOUTS[name] for name in ('matrix', 'odd')}


def plain(rank, rows=4, columns=3):
    return (np.arange(rows * columns, dtype='f').reshape(rows, columns) * (rank + 1)) % 5


def test_out(comms, same_error):
    for comm in comms:
        out = np.zeros((4, 3), 'f').view(np.matrix)
        expected = sum(plain(rank) for rank in range(comm.size))
        assert comm.allreduce(plain(comm.rank), out=out) is out
        np.testing.assert_array_equal(out, expected)
        masked = np.ma.masked_array([1., 2.], [False, True])
        assert 'lose its mask' in str(same_error(comm.allreduce, masked, table=False))


@pytest.mark.parametrize('kind', KINDS)
def test_models(comms, kind):
    for comm in comms:
        link = chainer.Link()
        with link.init_scope():
            link.w = chainer.Parameter(plain(comm.rank))
        link.w.array = KINDS[kind](plain(comm.rank))
        link.w.grad = KINDS[kind](plain(comm.rank))
        comm.multi_node_mean_grad(link)
        comm.bcast_data(link)
        expected = np.mean([plain(rank) for rank in range(comm.size)], axis=0)
        np.testing.assert_allclose(np.asarray(link.w.grad), expected, rtol=1e-6)
        np.testing.assert_array_equal(np.asarray(link.w.array), plain(0))


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
