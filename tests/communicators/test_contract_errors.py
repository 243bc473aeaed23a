"""Invalid arguments: all ranks raise the same error, and the communicator remains usable."""

import chainer
import numpy as np
import pytest
from collective_calls import NAMES, X, call
from each_case import each_case


class Unpicklable:
    def __reduce__(self):
        raise OSError('this object stays here')


def integer_model():
    link = chainer.Link()
    with link.init_scope():
        link.w = chainer.Parameter(np.zeros(3, np.int64))
    link.w.grad = np.zeros(3, np.int64)
    return link


#: Operations after which the communicator can be used.
USUAL = [name for name in NAMES if name != 'finalize']

# What one rank passes where an array is expected.
BAD_ARRAYS = {
    'None': None,
    'number': 1.5,
    'list': [1., 2.],
    'tuple': (X, X),
    'text': 'text',
    'Variable': chainer.Variable(X),
    'array of objects': np.array([None, 1]),
    'array of text': np.array(['a', 'b']),
    'array of bytes': np.array([b'a', b'b']),
    'longdouble': np.zeros(3, np.longdouble),
    'clongdouble': np.zeros(3, np.clongdouble),
    'datetime64': np.zeros(3, 'datetime64[s]'),
    'structured': np.zeros(3, [('a', 'f4'), ('b', 'i4')]),
    'foreign longdouble': np.zeros(3, np.dtype(np.longdouble).newbyteorder()),
}
BAD_ROOTS = {
    'None': (None, TypeError), 'float': (0., TypeError), 'text': ('0', TypeError),
    'bool': (True, TypeError), 'negative': (-1, ValueError), 'size': (10**9, ValueError),
    'huge': (2**70, ValueError),
}

# (operation, invalid argument): (the call, its error); rank ``root`` makes the call.
BAD = {}
for what, x in BAD_ARRAYS.items():
    for operation in ('bcast', 'gather', 'allgather', 'allreduce', 'reduce', 'multi_node_mean'):
        BAD[operation, what] = lambda comm, root, name=operation, x=x: getattr(comm, name)(
            x, **({'root': root} if name in ('bcast', 'gather', 'reduce') else {})), TypeError
    if what != 'tuple':
        BAD['allreduce_many', what] = \
            lambda comm, root, x=x: comm.allreduce_many([X, x]), TypeError
        BAD['reduce_scatter', what] = lambda comm, root, x=x: comm.reduce_scatter(
            (X,) * (comm.size - 1) + (x,)), TypeError
        BAD['alltoall', what] = \
            lambda comm, root, x=x: comm.alltoall((X,) * (comm.size - 1) + (x,)), TypeError
        BAD['scatter', what] = \
            lambda comm, root, x=x: comm.scatter((X,) * (comm.size - 1) + (x,), root), TypeError
for what, (bad_root, error) in BAD_ROOTS.items():
    for operation, x in {'bcast': X, 'gather': X, 'reduce': X, 'scatter': (), 'bcast_obj': X,
                    'gather_obj': X, 'scatter_obj': ()}.items():
        BAD[operation, f'root {what}'] = (
            lambda comm, root, name=operation, x=x, bad_root=bad_root: getattr(comm, name)(
                x, root=bad_root)), error
for operation in ('alltoall', 'reduce_scatter', 'scatter', 'scatter_obj'):
    for what, xs, error in (
            ('too few', lambda comm: [X] * (comm.size - 1), ValueError),
            ('too many', lambda comm: [X] * (comm.size + 1), ValueError),
            ('no sequence', lambda comm: 5, TypeError),
            ('nothing', lambda comm: None, (TypeError, ValueError))):
        BAD[operation, what] = lambda comm, root, name=operation, xs=xs: getattr(comm, name)(
            xs(comm), *([root] if name.startswith('scatter') else [])), error
BAD |= {
    ('scatter', 'other number of rows'):
        (lambda comm, root: comm.scatter(np.zeros((comm.size + 1, 3)), root), ValueError),
    ('scatter', 'no rows'): (lambda comm, root: comm.scatter(np.array(1.), root), TypeError),
    ('multi_node_mean', 'integers'): (lambda comm, root: comm.multi_node_mean(
        np.zeros(3, np.int32)), TypeError),
    ('multi_node_mean', 'complex'): (lambda comm, root: comm.multi_node_mean(
        np.zeros(3, np.complex64)), TypeError),
    ('allreduce', 'unknown op'): (lambda comm, root: comm.allreduce(X, 'mean'), ValueError),
    ('allreduce', 'no op'): (lambda comm, root: comm.allreduce(X, None), ValueError),
    ('allreduce_obj', 'no op'): (lambda comm, root: comm.allreduce_obj('x', None), ValueError),
    ('allreduce', 'list as op'): (lambda comm, root: comm.allreduce(X, ['sum']), ValueError),
    ('allreduce', 'order of complex'):
        (lambda comm, root: comm.allreduce(X.astype(np.complex64), 'max'), TypeError),
    **{('allreduce', f'out {what}'): (
        lambda comm, root, out=out: comm.allreduce(X, out=out), error)
       for what, out, error in (
           ('text', 'text', TypeError), ('list', [0.] * 6, TypeError),
           ('of another shape', X.T.copy(), ValueError),
           ('of another dtype', X.astype(np.float64), ValueError),
           ('read-only', np.broadcast_to(np.float32(0), X.shape), ValueError))},
    **{(operation, 'unknown op'): (lambda comm, root, name=operation, x=x: getattr(comm, name)(
        x(comm), 'mean'), ValueError)
       for operation, x in {'allreduce_many': lambda comm: [], 'reduce': lambda comm: X,
                       'reduce_scatter': lambda comm: [X] * comm.size,
                       'allreduce_obj': lambda comm: X}.items()},
    ('allreduce_many', 'array'): (lambda comm, root: comm.allreduce_many(X), TypeError),
    ('allreduce_many', 'order of complex'):
        (lambda comm, root: comm.allreduce_many([X, X.astype(complex)], 'max'), TypeError),
    ('new_group', 'no ranks'): (lambda comm, root: comm.new_group([]), ValueError),
    ('new_group', 'twice'): (lambda comm, root: comm.new_group([0, 0]), ValueError),
    ('new_group', 'not a rank'): (lambda comm, root: comm.new_group([comm.size]), ValueError),
    ('new_group', 'negative'): (lambda comm, root: comm.new_group([-1]), ValueError),
    ('new_group', 'number'): (lambda comm, root: comm.new_group(0), TypeError),
    ('new_group', 'text'): (lambda comm, root: comm.new_group('0'), TypeError),
    ('bcast_obj', 'unpicklable'):
        (lambda comm, root: comm.bcast_obj(Unpicklable(), root=root), TypeError),
    ('gather_obj', 'unpicklable'): (lambda comm, root: comm.gather_obj(lambda: 0, root), TypeError),
    ('allgather_obj', 'unpicklable'):
        (lambda comm, root: comm.allgather_obj([Unpicklable()]), TypeError),
    ('allreduce_obj', 'unpicklable'): (lambda comm, root: comm.allreduce_obj(lambda: 0), TypeError),
    ('scatter_obj', 'unpicklable'): (lambda comm, root: comm.scatter_obj(
        [0] * (comm.size - 1) + [Unpicklable()], root), TypeError),
    ('bcast_data', 'None'): (lambda comm, root: comm.bcast_data(None), TypeError),
    ('bcast_data', 'array'): (lambda comm, root: comm.bcast_data(X), TypeError),
    ('multi_node_mean_grad', 'None'):
        (lambda comm, root: comm.multi_node_mean_grad(None), TypeError),
    ('multi_node_mean_grad', 'integer gradients'):
        (lambda comm, root: comm.multi_node_mean_grad(integer_model()), TypeError),
    ('split', 'negative color'): (lambda comm, root: comm.split(-1, 0), ValueError),
    ('split', 'long color'): (lambda comm, root: comm.split(2**31, 0), ValueError),
    ('split', 'long key'): (lambda comm, root: comm.split(0, -2**31 - 1), ValueError),
    ('split', 'color None'): (lambda comm, root: comm.split(None, 0), TypeError),
    ('split', 'color float'): (lambda comm, root: comm.split(1., 0), TypeError),
    ('split', 'key text'): (lambda comm, root: comm.split(0, 'a'), TypeError),
}


@each_case('operation, what', BAD)
def test_invalid_argument_on_one_rank(comms, operation, what, same_error, check_usable):
    bad, kind = BAD[operation, what]
    for n, comm in enumerate(comms):
        odd = (len(what) + n) % comm.size  # each rank in turn
        error = same_error(lambda: bad(comm, odd) if comm.rank == odd else call(  # noqa: B023
            comm, operation, odd), failed=odd)  # noqa: B023
        assert isinstance(error, kind)
        if comm.size > 1:
            assert str(error).startswith(f'{operation} failed on rank {odd} (no data was sent)')
        check_usable(comm)


@pytest.mark.parametrize('operation, what', [
    ('gather', 'None'), ('gather', 'root size'), ('allreduce', 'unknown op'),
    ('alltoall', 'too few'), ('gather_obj', 'unpicklable'), ('split', 'negative color'),
    ('bcast_data', 'None')])
def test_invalid_argument_on_all_ranks(comms, operation, what, same_error, check_usable):
    bad, kind = BAD[operation, what]
    for comm in comms:
        error = same_error(bad, comm, 0)
        assert isinstance(error, kind)
        assert '<- failed' not in str(error)
        check_usable(comm)


def test_error_while_others_call_another_operation(comm, same_error, check_usable):
    """Other ranks raise the error of the failed rank, whichever operation they call."""
    for n, good in enumerate(USUAL):
        odd = n % comm.size
        error = same_error(lambda: comm.gather(None) if comm.rank == odd else call(  # noqa: B023
            comm, good), failed=odd)  # noqa: B023
        assert type(error) is TypeError
    check_usable(comm)


def test_errors_on_several_ranks(comm, same_error, check_usable):
    """The lowest failed rank determines the type; the text contains all errors."""
    if comm.size > 1:
        last = comm.size - 1
        bad = {0: ('allreduce', 'unknown op'), last: ('gather', 'None')}
        error = same_error(lambda: BAD[bad[comm.rank]][0](comm, 0) if comm.rank in bad else call(
            comm, 'allreduce'))
        assert isinstance(error, ValueError)
        assert "rank 0: ValueError: op must be one of 'sum'" in str(error)
        assert f'rank {last}: TypeError: expected a numpy or cupy array' in str(error)
        check_usable(comm)


def test_refuse(comm, same_error, check_usable):
    """For functions built on communicators."""
    def refuse(odd, operation):
        if comm.rank == odd:
            comm.refuse('my_function', KeyError('no such thing'))
        call(comm, operation)

    for odd in range(comm.size):
        for operation in ('allreduce', 'barrier', 'bcast_data'):
            error = same_error(refuse, odd, operation, failed=odd)
            assert isinstance(error, KeyError)
            assert 'no such thing' in str(error)
    check_usable(comm)


def test_refuse_uses_a_type_known_on_all_ranks(comm, same_error, check_usable):
    """Errors of types unknown to other ranks become their nearest built-in base."""
    class OwnError(LookupError):
        pass

    def refuse(error):
        if comm.rank == 0:
            comm.refuse('my_function', error)
        comm.barrier()

    if comm.size > 1:
        assert type(same_error(refuse, OwnError('mine'), failed=0)) is LookupError
        # An error that takes more than a message.
        decode_error = UnicodeDecodeError('ascii', b'\xff', 0, 1, 'not ASCII')
        error = same_error(refuse, decode_error, failed=0)
        assert type(error) is UnicodeError
        assert 'not ASCII' in str(error)
        check_usable(comm)


def test_sender_and_receiver_get_the_same_error(comm, check_usable):
    bad = [('send', x) for what, x in BAD_ARRAYS.items() if what not in ('list', 'tuple')]
    bad += [('send', [X, None]), ('send', (X, (X,))), ('send_obj', Unpicklable())]
    bad += [('isend', x) for operation, x in bad if operation == 'send']
    if comm.size == 1:
        return
    for source in range(comm.size):
        dest = (source + 1) % comm.size
        for operation, x in bad if source == 0 else bad[-5:]:
            error = None
            if comm.rank == source:
                with pytest.raises(TypeError) as error:
                    getattr(comm, operation)(x, dest, 11)
            elif comm.rank == dest:
                with pytest.raises(TypeError) as error:
                    request = getattr(comm, operation.replace('send', 'recv'))(source, tag=11)
                    if operation == 'isend':
                        request.wait()
            texts = set(comm.allgather_obj(None if error is None else str(error.value)))
            texts -= {None}
            assert len(texts) == 1
            (text,) = texts
            assert text.startswith(
                f'{operation} from rank {source} to rank {dest} with tag 11 failed '
                '(no data was sent)')
        if comm.rank == source:
            comm.send(X, dest, 11)
        elif comm.rank == dest:
            np.testing.assert_array_equal(comm.recv(source, 11), X)
    check_usable(comm)


@pytest.mark.parametrize('peer, tag, kind', [
    (None, 0, TypeError), ('0', 0, TypeError), (0., 0, TypeError), (True, 0, TypeError),
    (-100, 0, ValueError), (10**9, 0, ValueError), (2**70, 0, ValueError),
    (0, 'tag', TypeError), (0, 1.5, TypeError), (0, None, TypeError),
    (0, -5, ValueError), (0, 2**70, ValueError)])
def test_invalid_peer_or_tag(comm, peer, tag, kind):
    """No rank waits for such a message, so only this rank raises."""
    with pytest.raises(kind, match=r'^dest|^tag'):
        comm.send(X, peer, tag)
    with pytest.raises(kind, match=r'^dest|^tag'):
        comm.isend(X, peer, tag)
    with pytest.raises(kind, match=r'^source|^tag'):
        comm.irecv(peer, tag)
    with pytest.raises(kind, match=r'^dest|^tag'):
        comm.send_obj(X, peer, tag)
    with pytest.raises(kind, match=r'^source|^tag'):
        comm.recv(peer, tag)
    with pytest.raises(kind, match=r'^source|^tag'):
        comm.recv_obj(peer, tag=tag)


def test_send_to_own_rank_raises(comm):
    """Arrays would wait forever; objects may be sent."""
    with pytest.raises(ValueError, match='this rank itself'):
        comm.send(X, comm.rank, 0)
    with pytest.raises(ValueError, match='this rank itself'):
        comm.recv(comm.rank, 0)
    with pytest.raises(TypeError, match='stays here') as sent:
        comm.send_obj(Unpicklable(), comm.rank)
    with pytest.raises(TypeError) as received:
        comm.recv_obj(comm.rank)
    assert str(received.value) == str(sent.value)


def test_failed_isend_to_own_rank_is_raised_by_recv(comm):
    request = comm.irecv(comm.rank)
    with pytest.raises(TypeError) as sent:
        comm.isend('text', comm.rank)
    with pytest.raises(TypeError) as received:
        request.wait()
    assert str(received.value) == str(sent.value)
