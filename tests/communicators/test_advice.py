"""Mistakes of users of PyTorch, Horovod, mpi4py and NumPy: the error says what to write instead."""

import chainer
import numpy as np
import pytest
from each_case import each_case
from mpi4py import MPI

import chainermn

X = np.arange(3, dtype=np.float32)


class FromTorch:
    """Stands for a tensor."""


class FromJax:
    def __array__(self, dtype=None, copy=None):
        return X


FromTorch.__module__, FromJax.__module__ = 'torch', 'jaxlib.xla'

#: Calls that every rank makes, and what the error says.
COLLECTIVES = {
    'list': (lambda comm: comm.allreduce([1., 2.]), 'pass numpy.asarray(x), or use '
                                                    'allreduce_obj(x)'),
    'number': (lambda comm: comm.allreduce(1.5), 'use allreduce_obj(x)'),
    'number in gather': (lambda comm: comm.gather(1.5), 'use gather_obj(x)'),
    'number in reduce': (lambda comm: comm.reduce(1.5), 'use allreduce_obj(x)'),
    'number in a mean': (lambda comm: comm.multi_node_mean(1.5), 'use allreduce_obj(x)'),
    'numbers': (lambda comm: comm.alltoall([1.] * comm.size), 'such as bcast_obj'),
    'text': (lambda comm: comm.allgather('text'), 'for other objects, use allgather_obj'),
    'None': (lambda comm: comm.allreduce(None), 'got None; pass an array'),
    'tensor': (lambda comm: comm.allreduce(FromTorch()), 'x.detach().cpu().numpy()'),
    'jax': (lambda comm: comm.allreduce(FromJax()), 'pass numpy.asarray(x)'),
    'Variable': (lambda comm: comm.allreduce(chainer.Variable(X)), 'pass its .array'),
    'objects': (lambda comm: comm.allreduce(np.array([None])), 'Use allreduce_obj(x)'),
    'structured': (lambda comm: comm.allgather(np.zeros(2, [('a', 'f4')])),
                   "Send each field, such as x['a'], or use allgather_obj(x)"),
    'mean': (lambda comm: comm.allreduce(X, 'mean'), 'use multi_node_mean(x)'),
    'mean of large': (lambda comm: comm.allreduce(np.ones(9000), op='avg'), 'multi_node_mean(x)'),
    'mean of objects': (lambda comm: comm.allreduce_obj(1., 'mean'), 'divide the sum by comm.size'),
    'SUM': (lambda comm: comm.reduce(X, 'SUM'), "write op='sum'"),
    'MPI.MAX': (lambda comm: comm.allreduce(X, MPI.MAX), "write op='max'"),
    'MPI.BAND': (lambda comm: comm.allreduce(X, MPI.BAND), 'must be one of'),
    'np.add': (lambda comm: comm.allreduce(X, np.add), "write op='sum'"),
    'max': (lambda comm: comm.allreduce_obj(1, max), "write op='max'"),
    'lambda': (lambda comm: comm.allreduce_obj(1, lambda x, y: x), 'reduce the result'),
    'result as second': (lambda comm: comm.allreduce(X, np.empty(3)), 'as out='),
    'average=': (lambda comm: comm.allreduce(X, average=True), 'call multi_node_mean(x)'),
    'async_op=': (lambda comm: comm.allreduce(X, async_op=True), 'call allreduce(x, '),
    'name=': (lambda comm: comm.allgather(X, name='x'), 'Operations have no names'),
    'group=': (lambda comm: comm.barrier(group=None), 'comm.new_group(ranks)'),
    'src=': (lambda comm: comm.bcast(X, src=0), 'Use root='),
    'root_rank=': (lambda comm: comm.bcast(X, root_rank=0), 'Use root='),
    'list to gather into': (lambda comm: comm.allgather([X], X), 'call allgather(x)'),
    'root -1': (lambda comm: comm.bcast(X, -1), 'root must be a rank from 0 to'),
    'bool as root': (lambda comm: comm.bcast(X, np.False_), 'root must be an integer'),
    'array as root': (lambda comm: comm.bcast(X, X), 'root must be an integer'),
    'dict of arrays': (lambda comm: comm.allreduce_many({'x': X}), 'pass [*xs]'),
    'mean of integers': (lambda comm: comm.multi_node_mean(np.ones(3, int)), 'x.astype('),
    'state': (lambda comm: comm.bcast_data({'x': X}), 'such as bcast_obj'),
    'split(None)': (lambda comm: comm.split(None, 0), 'use new_group(ranks)'),
    'split(UNDEFINED)': (lambda comm: comm.split(MPI.UNDEFINED, 0), 'use new_group(ranks)'),
    'split(color)': (lambda comm: comm.split(0), 'call split(color, key)'),
    'new_group(None)': (lambda comm: comm.new_group(None), 'ranks must be a list of integers'),
    'new_group(text)': (lambda comm: comm.new_group([0, '1']), 'ranks must be a list of integers'),
}
#: Calls of one rank, which raise on this rank only, since nothing is sent.
MESSAGES = {
    'dst=': (lambda comm, peer: comm.send(X, dst=peer), 'Use root= in collectives, dest='),
    'no tag': (lambda comm, peer: comm.send(X, peer), 'call send(data, dest, tag)'),
    'buffer': (lambda comm, peer: comm.recv(X, peer), 'x = comm.recv(source, tag)'),
    'buffer of irecv': (lambda comm, peer: comm.irecv(X, peer), 'x = comm.recv(source, tag)'),
    'bool': (lambda comm, peer: comm.isend(X, np.True_), 'dest and tag must be integers'),
    'tag as status': (lambda comm, peer: comm.recv_obj(peer, 4), 'tag=4'),
    'no requests': (lambda comm, peer: comm.waitall(None), 'waitall takes requests'),
}


@each_case('what', COLLECTIVES)
def test_collectives(comms, what, same_error, check_usable):
    call, advice = COLLECTIVES[what]
    for comm in comms:
        error = same_error(call, comm)
        assert isinstance(error, (TypeError, ValueError))
        assert advice in str(error) and ' at 0x' not in str(error)
        check_usable(comm)


@each_case('what', MESSAGES)
def test_messages(comms, what, check_usable):
    call, advice = MESSAGES[what]
    for comm in comms:
        peer, source = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        with pytest.raises(TypeError) as error:
            call(comm, peer)
        assert advice in str(error.value)
        # Nothing was posted: the next message is received as usual.
        comm.send_obj(comm.rank, peer, tag=4)
        assert comm.recv_obj(source, tag=4) == source
        check_usable(comm)


def test_similar_calls_are_right(comms):
    """Integers of NumPy, arrays without dimensions and names of arguments stay accepted."""
    for comm in comms:
        for root in (np.int64(0), np.array(0)):
            np.testing.assert_array_equal(comm.bcast(X, root=root), X)
        assert comm.allreduce_obj(1, op=np.str_('sum')) == comm.size
        np.testing.assert_array_equal(comm.allreduce(x=X, op=np.str_('sum')), X * comm.size)
        assert comm.split(comm.rank == 0, 0).size == max(1, comm.size - 1 if comm.rank else 1)
        group = comm.new_group(np.arange(1))
        assert (group is None) == (comm.rank > 0)
        status = MPI.Status()
        comm.send_obj('x', (comm.rank + 1) % comm.size, 3)
        comm.recv_obj((comm.rank - 1) % comm.size, status)
        assert status.tag == 3


def test_an_error_inside_an_operation_keeps_its_text(comm):
    if comm.size > 1:
        with pytest.raises(TypeError, match=r'^unsupported operand') as error:
            comm.allreduce_obj({})
        assert 'call allreduce_obj' not in str(error.value)


def test_mpi4py_communicator_as_name(same_error):
    error = same_error(chainermn.create_communicator, MPI.COMM_WORLD)
    assert "create_communicator('flat', mpi_comm=comm)" in str(error)
