"""Mismatched calls: all ranks raise the same error, and the communicator remains usable."""

import re

import chainer
import numpy as np
import pytest
from collective_calls import NAMES, X, call

import chainermn


def model(shape=(3,), dtype=np.float32, path='w', grad=True):
    """A model with two parameters, of which only the last varies."""
    link = chainer.Link()
    with link.init_scope():
        link.a = chainer.Parameter(np.zeros(2, np.float32))
        setattr(link, path, chainer.Parameter(np.zeros(shape, dtype)))
    link.cleargrads()
    link.a.grad = np.zeros(2, np.float32)
    if grad:
        getattr(link, path).grad = np.zeros(shape, dtype)
    return link


DIM9 = (1, 2, 1, 1, 1, 1, 1, 1, 1)

# (operation, difference): (the usual call, the call of the odd rank, the text in the table).
DIFFERENT = {
    **{(name, 'roots'): (lambda comm, name=name: getattr(comm, name)([X] * comm.size, root=0),
                         lambda comm, name=name: getattr(comm, name)([X] * comm.size, root=1),
                         ('root=0', 'root=1'))
       for name in ('scatter', 'bcast_obj', 'gather_obj', 'scatter_obj')},
    **{(name, 'roots'): (lambda comm, name=name: getattr(comm, name)(X, root=0),
                         lambda comm, name=name: getattr(comm, name)(X, root=1),
                         ('root=0', 'root=1'))
       for name in ('bcast', 'gather', 'reduce')},
    **{(name, 'dtypes'): (lambda comm, name=name: getattr(comm, name)(X),
                          lambda comm, name=name: getattr(comm, name)(X.astype(np.float16)),
                          ('float32 (2, 3)', 'float16 (2, 3)'))
       for name in ('gather', 'allgather', 'allreduce', 'reduce', 'multi_node_mean')},
    ('alltoall', 'dtypes'): (lambda comm: comm.alltoall([X] * comm.size),
                             lambda comm: comm.alltoall([X.astype(int)] * comm.size),
                             ('float32', 'int64')),
    **{(name, 'shapes'): (lambda comm, name=name: getattr(comm, name)(X),
                          lambda comm, name=name: getattr(comm, name)(X.T),
                          ('(2, 3)', '(3, 2)'))
       for name in ('allreduce', 'reduce', 'multi_node_mean')},
    ('allreduce', 'shapes of equal size'): (lambda comm: comm.allreduce(np.zeros(())),
                                            lambda comm: comm.allreduce(np.zeros(1)),
                                            ('float64 ()', 'float64 (1,)')),
    ('allreduce', 'long shapes'): (lambda comm: comm.allreduce(np.zeros(DIM9)),
                                   lambda comm: comm.allreduce(np.zeros(DIM9[::-1])),
                                   ('with 9 dimensions', '<- shapes differ')),
    ('allreduce', 'ops'): (lambda comm: comm.allreduce(X),
                           lambda comm: comm.allreduce(X, 'max'), ("'sum'", "'max'")),
    **{(name, 'ops'): (lambda comm, name=name: getattr(comm, name)([X] * comm.size),
                              lambda comm, name=name: getattr(comm, name)([X] * comm.size, 'max'),
                              ("'sum'", "'max'"))
       for name in ('allreduce_many', 'reduce_scatter', 'allreduce_obj')},
    **{(name, what): (lambda comm, name=name: getattr(comm, name)([X] * comm.size),
                      lambda comm, name=name, x=x: getattr(comm, name)([x] * comm.size),
                      ('  xs[0]: ', 'float32 (2, 3) on', fact))
       for name in ('allreduce_many', 'reduce_scatter')
       for what, x, fact in (('arrays: shapes', X.T, 'float32 (3, 2) on'),
                             ('arrays: dtypes', X.astype(int), 'int64 (2, 3) on'))},
    ('allreduce_many', 'arrays: number'): (lambda comm: comm.allreduce_many([X, X]),
                                           lambda comm: comm.allreduce_many([X]),
                                           ('  xs[1]: ', 'nothing on')),
    ('new_group', 'ranks'): (lambda comm: comm.new_group([0]),
                             lambda comm: comm.new_group([1]), ('[0] on', '[1] on')),
    **{(name, f'parameters: {what}'): (lambda comm, name=name: getattr(comm, name)(model()),
                                       lambda comm, name=name, other=other:
                                       getattr(comm, name)(other()), facts)
       for name in ('bcast_data', 'multi_node_mean_grad')
       for what, other, facts in (
           ('shape', lambda: model((1, 3)), ('  /w: ', 'float32 (3,) on', 'float32 (1, 3) on')),
           ('dtype', lambda: model(dtype=np.float16), ('  /w: ', 'float16 (3,) on')),
           ('path', lambda: model(path='z'), ('  /w: ', '  /z: ', 'nothing on')),
           ('number', chainer.Link, ('  /a: ', 'float32 (2,) on', '  /w: ', 'nothing on')))},
    ('allgather_shards', 'arrays: shape'): (
        lambda comm: comm._chainermn_channel.allgather_shards([[X]] + [[]] * (comm.size - 1)),
        lambda comm: comm._chainermn_channel.allgather_shards([[X.T]] + [[]] * (comm.size - 1)),
        ('shard of rank 0', 'float32 (2, 3) on', 'float32 (3, 2) on')),
    ('allgather_shards', 'arrays: owner'): (
        lambda comm: comm._chainermn_channel.allgather_shards([[X]] + [[]] * (comm.size - 1)),
        lambda comm: comm._chainermn_channel.allgather_shards([[]] * (comm.size - 1) + [[X]]),
        ('array 0 of the shard of rank 0', 'nothing on')),
    ('multi_node_mean_grad', 'parameters: no gradient'): (
        lambda comm: comm.multi_node_mean_grad(model()),
        lambda comm: comm.multi_node_mean_grad(model(grad=False)),
        ('  /w: ', 'float32 (3,) on', 'nothing on')),
    ('multi_node_mean_grad', 'parameters: zero_fill'): (
        lambda comm: comm.multi_node_mean_grad(model(grad=False)),
        lambda comm: comm.multi_node_mean_grad(model(grad=False), zero_fill=True),
        ('  /w: ', 'nothing on', 'float32 (3,) on')),
}


@pytest.mark.parametrize('operation, what', DIFFERENT, ids=map(': '.join, DIFFERENT))
def test_different_argument_on_one_rank(comms, operation, what, same_error, check_usable):
    usual, other, facts = DIFFERENT[operation, what]
    for comm in comms:
        for odd in range(comm.size if comm.size > 1 else 0):
            error = same_error(other if comm.rank == odd else usual, comm)
            assert isinstance(error, ValueError)
            text = str(error)
            assert text.startswith(f'Collective mismatch in {operation}: ')
            assert 'differ between ranks (no data was sent)' in text
            assert ('zero_fill=True' in text) == (operation == 'multi_node_mean_grad')
            assert all(fact in text for fact in facts), text
            if comm.size > 2 and '<-' in text:
                marked = [line for line in text.splitlines() if '<-' in line]
                assert marked[-1].startswith(f'  rank {odd}: '), text
        check_usable(comm)


@pytest.mark.sample(8)
@pytest.mark.parametrize('operation', NAMES)
def test_different_operation_on_one_rank(comms, operation, same_error, check_usable):
    for comm in comms:
        for n, other in enumerate(NAMES):
            if other == operation or comm.size == 1:
                continue
            odd = n % comm.size
            error = same_error(call, comm, other if comm.rank == odd else operation)
            assert isinstance(error, ValueError)
            text = str(error)
            assert text.startswith(
                'Collective mismatch: ranks called different operations (no data was sent)\n')
            assert f'rank {odd}: {other}' in text
            assert 'All ranks must call the same collectives in the same order' in text
        check_usable(comm)


def test_different_operation_on_every_rank(comm, same_error, check_usable):
    if comm.size > 1:
        operations = NAMES[:comm.size]
        text = str(same_error(call, comm, operations[comm.rank]))
        assert all(f'rank {rank}: {operation}' in text for rank, operation in enumerate(operations))
    check_usable(comm)


def test_memory_order_may_differ(comm):
    """The memory layout need not be equal on all ranks."""
    x = np.asfortranarray(X) if comm.rank == 0 else X
    np.testing.assert_array_equal(comm.allreduce(x), comm.size * X)
    # longlong is int64 under another name.
    x = np.zeros(2, np.longlong if comm.rank == 0 else np.int64)
    assert comm.allreduce(x).dtype == np.int64


def test_arguments_of_other_ranks_are_ignored(comm):
    """If only the root sends data, other ranks may pass anything."""
    for root in range(comm.size):
        mine = comm.rank == root
        assert comm.bcast(X if mine else 'anything', root).shape == X.shape
        assert comm.scatter([X] * comm.size if mine else 'anything', root).shape == X.shape
        assert comm.bcast_obj('x' if mine else (lambda: 0), root=root) == 'x'
        assert comm.scatter_obj(['x'] * comm.size if mine else (lambda: 0), root) == 'x'


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize('text, shown', [
    ('the real\n  reason', 'ValueError: the real reason'), ('', 'ValueError'),
    ('x' * 999, 'ValueError: ' + 'x' * 200)])
def test_an_exception_that_a_rank_is_handling_is_shown(comm, text, shown, check_usable):
    """As in "finally: comm.barrier()"; without it, the reason of the mismatch would be lost."""
    with pytest.raises(chainermn.CollectiveMismatchError) as caught:
        try:
            if comm.rank == 1:
                raise ValueError(text)
            comm.allgather_obj(1)
        finally:
            if comm.rank == 1:
                comm.barrier()
    found = re.search('rank 1: barrier, .*, while handling (.*?) +<- ', str(caught.value))
    assert found[1] == shown
    if comm.rank == 1:
        assert isinstance(caught.value.__context__, ValueError)
    check_usable(comm)
