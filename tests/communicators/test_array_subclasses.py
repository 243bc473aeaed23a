"""Subclasses of arrays, and unaligned arrays, are sent as arrays: the results are NumPy's."""

import chainer
import numpy as np
import pytest
from each_case import each_case

import chainermn

pytestmark = pytest.mark.every_size


class Odd(np.ndarray):
    """All that a program may call raises, as in a class with other semantics."""

    def _raise(self, *args, **kwargs):
        raise OSError('a method of a subclass was called')

    __getitem__ = __iter__ = __array_ufunc__ = __array_function__ = tobytes = copy = _raise
    astype = reshape = ravel = flatten = view = _raise


class Grows(np.ndarray):
    """Its rows are not those of the array."""

    def __getitem__(self, i):
        return np.append(np.asarray(self)[i], 1)


def unaligned(x):
    memory = np.empty(x.nbytes + 1, np.uint8)
    y = memory[1:].view(x.dtype).reshape(x.shape)
    y[...] = x
    return y


def broadcast(x):
    """An array whose columns share memory, and can be written to."""
    return np.lib.stride_tricks.as_strided(x, x.shape, (x.strides[0], 0))


KINDS = {
    'unaligned': unaligned,
    'matrix': lambda x: x.view(np.matrix), 'odd': lambda x: x.view(Odd),
    'grows': lambda x: x.view(Grows)}


def plain(rank, rows=4, columns=3):
    return (np.arange(rows * columns, dtype='f').reshape(rows, columns) * (rank + 1)) % 5


def cases(comm, rows):
    """The expected result of each operation, and a call that gives it."""
    rank, size = comm.rank, comm.size
    xs = [plain(each, rows) for each in range(size)]
    mine = xs[rank]
    grid = [[plain(source * size + dest, rows) for dest in range(size)] for source in range(size)]
    stacked = np.stack([np.ravel(x) for x in xs])  # of two dimensions, as a matrix
    peer, source = (rank + 1) % size, (rank - 1) % size
    return {
        'bcast': (xs[0], lambda m: comm.bcast(m(mine))),
        'gather': (tuple(xs) if rank == 0 else None, lambda m: comm.gather(m(mine))),
        'allgather': (tuple(xs), lambda m: comm.allgather(m(mine))),
        'alltoall': (tuple(row[rank] for row in grid),
                     lambda m: comm.alltoall([m(x) for x in grid[rank]])),
        'alltoall of rows': (tuple(stacked[rank] for _ in xs), lambda m: comm.alltoall(m(stacked))),
        'scatter': (xs[rank], lambda m: comm.scatter([m(x) for x in xs])),
        'scatter of rows': (stacked[rank], lambda m: comm.scatter(m(stacked))),
        'allreduce': (sum(xs), lambda m: comm.allreduce(m(mine))),
        'allreduce max': (np.max(xs, axis=0), lambda m: comm.allreduce(m(mine), 'max')),
        'allreduce_many': ((sum(xs), sum(xs) * 2),
                           lambda m: comm.allreduce_many([m(mine), m(mine * 2)])),
        'reduce': (sum(xs) if rank == 0 else None, lambda m: comm.reduce(m(mine))),
        'reduce_scatter': (sum(xs) * (rank + 1), lambda m: comm.reduce_scatter(
            [m(mine * (each + 1)) for each in range(size)])),
        'multi_node_mean': (sum(xs) / size, lambda m: comm.multi_node_mean(m(mine))),
        'send': (xs[source], lambda m: _ring(comm, m(mine), peer, source)),
        'isend': ((xs[source], xs[source] * 2), lambda m: _ring(
            comm, (m(mine), m(mine * 2)), peer, source)),
    }


def _ring(comm, x, peer, source):
    sent = comm.isend(x, peer)
    received = comm.irecv(source).wait()
    sent.wait()
    return received


def check_equal(result, expected):
    if isinstance(expected, tuple):
        assert type(result) is tuple and len(result) == len(expected)
        for one, other in zip(result, expected, strict=True):
            check_equal(one, other)
    elif expected is None:
        assert result is None
    else:
        assert type(result) is np.ndarray
        assert (result.dtype, result.shape) == (expected.dtype, expected.shape)
        np.testing.assert_allclose(result, expected, rtol=1e-6)


@each_case('kind, rows', [(kind, rows) for kind in KINDS for rows in (4, 9000)] + [
    ('unaligned', 1500)])  # neither inline nor in shared memory
def test_operations(comms, kind, rows):
    for comm in comms:
        for odd in (comm.size - 1, None):  # the rank with a subclass; None: all
            make = KINDS[kind] if odd in (comm.rank, None) else np.asarray
            for expected, call in cases(comm, rows).values():
                check_equal(call(make), expected)


def test_send_to_another_rank(comms):
    for comm in comms:
        if comm.size > 1 and comm.rank == 0:
            comm.send(plain(0).view(np.matrix), 1, 3)
        elif comm.rank == 1:
            check_equal(comm.recv(0, 3), plain(0))


def test_out(comms):
    for comm in comms:
        for kind in 'matrix', 'unaligned':
            out = KINDS[kind](np.zeros((1500, 3), 'f'))
            expected = sum(plain(rank, 1500) for rank in range(comm.size))
            assert comm.allreduce(plain(comm.rank, 1500), out=out) is out
            np.testing.assert_array_equal(out, expected)


def test_masked_arrays_are_refused(comms, same_error, check_usable):
    """They would lose the mask."""
    masked = np.ma.masked_array([1., 2.], [False, True])
    calls = [lambda comm: comm.allreduce(masked), lambda comm: comm.scatter([masked] * comm.size),
             lambda comm: comm.allreduce(np.ones(2), out=masked)]
    for comm in comms:
        for call in calls:
            assert 'mask' in str(same_error(call, comm, table=False))
        check_usable(comm)


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
        assert 'parameter /w: elements of its array share memory' in str(error)


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
