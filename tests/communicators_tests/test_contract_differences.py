"""Calls that differ between the ranks: all ranks raise the same error, and go on."""

import chainer
import numpy as np
import pytest

X = np.arange(6, dtype=np.float32).reshape(2, 3)


def model(shape=(3,), dtype=np.float32, path='w', grad=True):
    """A model with two parameters, of which only the last has to be told."""
    link = chainer.Link()
    with link.init_scope():
        link.a = chainer.Parameter(np.zeros(2, np.float32))
        setattr(link, path, chainer.Parameter(np.zeros(shape, dtype)))
    link.cleargrads()
    link.a.grad = np.zeros(2, np.float32)
    if grad:
        getattr(link, path).grad = np.zeros(shape, dtype)
    return link


VERBS = {
    'bcast': lambda comm: comm.bcast(X),
    'gather': lambda comm: comm.gather(X),
    'allgather': lambda comm: comm.allgather(X),
    'allreduce': lambda comm: comm.allreduce(X),
    'allreduce_many': lambda comm: comm.allreduce_many([X]),
    'reduce': lambda comm: comm.reduce(X),
    'reduce_scatter': lambda comm: comm.reduce_scatter([X] * comm.size),
    'multi_node_mean': lambda comm: comm.multi_node_mean(X),
    'alltoall': lambda comm: comm.alltoall([X] * comm.size),
    'scatter': lambda comm: comm.scatter([X] * comm.size),
    'bcast_obj': lambda comm: comm.bcast_obj('x'),
    'gather_obj': lambda comm: comm.gather_obj('x'),
    'allgather_obj': lambda comm: comm.allgather_obj('x'),
    'allreduce_obj': lambda comm: comm.allreduce_obj('x'),
    'scatter_obj': lambda comm: comm.scatter_obj(['x'] * comm.size),
    'bcast_data': lambda comm: comm.bcast_data(model()),
    'multi_node_mean_grad': lambda comm: comm.multi_node_mean_grad(model()),
    'split': lambda comm: comm.split(0, 0),
    'new_group': lambda comm: comm.new_group([0]),
    'barrier': lambda comm: comm.barrier(),
    'finalize': lambda comm: comm.finalize(),
}

DIM9 = (1, 2, 1, 1, 1, 1, 1, 1, 1)

# (verb, what differs): (the usual call, that of the odd rank, what the table shows).
DIFFERENT = {
    **{(verb, 'roots'): (lambda comm, verb=verb: getattr(comm, verb)([X] * comm.size, root=0),
                         lambda comm, verb=verb: getattr(comm, verb)([X] * comm.size, root=1),
                         ('root=0', 'root=1'))
       for verb in ('scatter', 'bcast_obj', 'gather_obj', 'scatter_obj')},
    **{(verb, 'roots'): (lambda comm, verb=verb: getattr(comm, verb)(X, root=0),
                         lambda comm, verb=verb: getattr(comm, verb)(X, root=1),
                         ('root=0', 'root=1'))
       for verb in ('bcast', 'gather', 'reduce')},
    **{(verb, 'dtypes'): (lambda comm, verb=verb: getattr(comm, verb)(X),
                          lambda comm, verb=verb: getattr(comm, verb)(X.astype(np.float16)),
                          ('float32 (2, 3)', 'float16 (2, 3)'))
       for verb in ('gather', 'allgather', 'allreduce', 'reduce', 'multi_node_mean')},
    ('alltoall', 'dtypes'): (lambda comm: comm.alltoall([X] * comm.size),
                             lambda comm: comm.alltoall([X.astype(int)] * comm.size),
                             ('float32', 'int64')),
    **{(verb, 'shapes'): (lambda comm, verb=verb: getattr(comm, verb)(X),
                          lambda comm, verb=verb: getattr(comm, verb)(X.T),
                          ('(2, 3)', '(3, 2)'))
       for verb in ('allreduce', 'reduce', 'multi_node_mean')},
    ('allreduce', 'shapes of equal size'): (lambda comm: comm.allreduce(np.zeros(())),
                                            lambda comm: comm.allreduce(np.zeros(1)),
                                            ('float64 ()', 'float64 (1,)')),
    ('allreduce', 'long shapes'): (lambda comm: comm.allreduce(np.zeros(DIM9)),
                                   lambda comm: comm.allreduce(np.zeros(DIM9[::-1])),
                                   ('with 9 dimensions', '<- shapes differ')),
    ('allreduce', 'operations'): (lambda comm: comm.allreduce(X),
                                  lambda comm: comm.allreduce(X, 'max'), ("'sum'", "'max'")),
    **{(verb, 'operations'): (lambda comm, verb=verb: getattr(comm, verb)([X] * comm.size),
                              lambda comm, verb=verb: getattr(comm, verb)([X] * comm.size, 'max'),
                              ("'sum'", "'max'"))
       for verb in ('allreduce_many', 'reduce_scatter', 'allreduce_obj')},
    **{(verb, what): (lambda comm, verb=verb: getattr(comm, verb)([X] * comm.size),
                      lambda comm, verb=verb, x=x: getattr(comm, verb)([x] * comm.size),
                      ('  xs[0]: ', 'float32 (2, 3) on', fact))
       for verb in ('allreduce_many', 'reduce_scatter')
       for what, x, fact in (('arrays: shapes', X.T, 'float32 (3, 2) on'),
                             ('arrays: dtypes', X.astype(int), 'int64 (2, 3) on'))},
    ('allreduce_many', 'arrays: number'): (lambda comm: comm.allreduce_many([X, X]),
                                           lambda comm: comm.allreduce_many([X]),
                                           ('  xs[1]: ', 'nothing on')),
    ('new_group', 'ranks'): (lambda comm: comm.new_group([0]),
                             lambda comm: comm.new_group([1]), ('[0] on', '[1] on')),
    **{(verb, f'parameters: {what}'): (lambda comm, verb=verb: getattr(comm, verb)(model()),
                                       lambda comm, verb=verb, other=other:
                                       getattr(comm, verb)(other()), facts)
       for verb in ('bcast_data', 'multi_node_mean_grad')
       for what, other, facts in (
           ('shape', lambda: model((1, 3)), ('  /w: ', 'float32 (3,) on', 'float32 (1, 3) on')),
           ('dtype', lambda: model(dtype=np.float16), ('  /w: ', 'float16 (3,) on')),
           ('path', lambda: model(path='z'), ('  /w: ', '  /z: ', 'nothing on')),
           ('number', chainer.Link, ('  /a: ', 'float32 (2,) on', '  /w: ', 'nothing on')))},
    ('multi_node_mean_grad', 'parameters: no gradient'): (
        lambda comm: comm.multi_node_mean_grad(model()),
        lambda comm: comm.multi_node_mean_grad(model(grad=False)),
        ('  /w: ', 'float32 (3,) on', 'nothing on')),
    ('multi_node_mean_grad', 'parameters: zero_fill'): (
        lambda comm: comm.multi_node_mean_grad(model(grad=False)),
        lambda comm: comm.multi_node_mean_grad(model(grad=False), zero_fill=True),
        ('  /w: ', 'nothing on', 'float32 (3,) on')),
}


@pytest.mark.parametrize('verb, what', DIFFERENT, ids=map(': '.join, DIFFERENT))
def test_another_argument_on_one_rank(comms, verb, what, same_error, check_usable):
    usual, other, facts = DIFFERENT[verb, what]
    for comm in comms:
        for odd in range(comm.size if comm.size > 1 else 0):
            error = same_error(other if comm.rank == odd else usual, comm)
            assert isinstance(error, ValueError)
            text = str(error)
            assert text.startswith(f'{verb} refused: ')
            assert 'differ between the ranks; no data was exchanged' in text
            assert ('zero_fill=True' in text) == (verb == 'multi_node_mean_grad')
            assert all(fact in text for fact in facts), text
            if comm.size > 2 and '<-' in text:
                marked = [line for line in text.splitlines() if '<-' in line]
                assert marked[-1].startswith(f'  rank {odd}: '), text
        check_usable(comm)


@pytest.mark.parametrize('verb', VERBS)
def test_another_verb_on_one_rank(comms, verb, same_error, check_usable):
    for comm in comms:
        for n, other in enumerate(VERBS):
            if other == verb or comm.size == 1:
                continue
            odd = n % comm.size
            error = same_error(VERBS[other if comm.rank == odd else verb], comm)
            assert isinstance(error, ValueError)
            text = str(error)
            assert text.startswith('the ranks called different verbs; no data was exchanged\n')
            assert f'rank {odd}: {other}' in text
            assert 'All ranks have to make the same collective calls in the same order' in text
        check_usable(comm)


def test_every_rank_calls_another_verb(comm, same_error, check_usable):
    if comm.size > 1:
        verbs = list(VERBS)[:comm.size]
        text = str(same_error(VERBS[verbs[comm.rank]], comm))
        assert all(f'rank {rank}: {verb}' in text for rank, verb in enumerate(verbs))
    check_usable(comm)


def test_equal_shapes_elsewhere_are_no_difference(comm):
    """Whether the memory of a rank is ordered otherwise does not matter."""
    x = np.asfortranarray(X) if comm.rank == 0 else X
    np.testing.assert_array_equal(comm.allreduce(x), comm.size * X)
    # longlong is int64 under another name.
    x = np.zeros(2, np.longlong if comm.rank == 0 else np.int64)
    assert comm.allreduce(x).dtype == np.int64


def test_arguments_of_other_ranks_are_ignored(comm):
    """Where only the root gives something, the others may pass anything."""
    for root in range(comm.size):
        mine = comm.rank == root
        assert comm.bcast(X if mine else 'anything', root).shape == X.shape
        assert comm.scatter([X] * comm.size if mine else 'anything', root).shape == X.shape
        assert comm.bcast_obj('x' if mine else (lambda: 0), root=root) == 'x'
        assert comm.scatter_obj(['x'] * comm.size if mine else (lambda: 0), root) == 'x'
