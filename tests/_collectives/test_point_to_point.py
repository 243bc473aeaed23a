"""Point-to-point messages, around the size limit of inline payloads."""

import pickle
import signal
import time

import numpy as np
import pytest
from mpi4py import MPI

from chainermn._collectives import point_to_point

WORLD = MPI.COMM_WORLD
MAX_DIMS = 64 if np.lib.NumpyVersion(np.__version__) >= '2.0.0' else 32


@pytest.fixture(scope='module')
def messages():
    return point_to_point.Messages(WORLD.Dup(), WORLD.Dup())


def exchange(send, recv, value):
    """Send from the first rank to the last; return the received value there, else ``value``."""
    if WORLD.size == 1:
        return value
    if WORLD.rank == 0:
        send(value, WORLD.size - 1, 1)
    return recv(0, 1) if WORLD.rank == WORLD.size - 1 else value


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize('size', [1, 10 * point_to_point.INLINE])
def test_an_interrupted_receiver_receives_the_rest(messages, size):
    def interrupt(*_):
        raise KeyboardInterrupt

    xs = [np.full(size, n, 'f') for n in range(3)]
    if WORLD.rank == 0:
        time.sleep(.3)
        messages.send((xs[0], xs[1]), WORLD.size - 1, 1)
        messages.send(xs[2], WORLD.size - 1, 1)
    elif WORLD.rank == WORLD.size - 1:
        before = signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, .1)
        with pytest.raises(KeyboardInterrupt):
            messages.recv(0, 1)
        signal.signal(signal.SIGALRM, before)
        np.testing.assert_array_equal(messages.recv(0, 1), xs[2])


@pytest.mark.parametrize('size', [0, 1, point_to_point.INLINE - 1, point_to_point.INLINE,
                                  point_to_point.INLINE + 1, 10 * point_to_point.INLINE])
def test_sizes_of_arrays(messages, size):
    x = np.arange(size).astype(np.uint8)
    result = exchange(messages.send, messages.recv, x)
    np.testing.assert_array_equal(result, x)
    many = x, x[:size // 2], x.astype('f8'), x[:1]
    for y, z in zip(exchange(messages.send, messages.recv, many), many, strict=True):
        assert y.dtype == z.dtype
        np.testing.assert_array_equal(y, z)
    result[...] = 0


@pytest.mark.parametrize('ndim', [8, 9, MAX_DIMS])
@pytest.mark.parametrize('size', [point_to_point.INLINE, point_to_point.INLINE + 8])
def test_many_dimensions_around_the_limit(messages, ndim, size):
    """A long shape in the message does not reduce the limit of the payload."""
    x = np.arange(size // 8).reshape((1,) * (ndim - 1) + (-1,)).swapaxes(0, -1)
    count, kept = messages.record.count, len(messages.record.ring)
    result = exchange(messages.send, messages.recv, x)
    assert result.shape == x.shape
    np.testing.assert_array_equal(result, x)
    # Each message is in the flight recorder once.
    assert len(messages.record.ring) - kept == min(messages.record.count - count, 64 - kept)


@pytest.mark.parametrize('protocol', [0, 5])
@pytest.mark.parametrize('size', [1, 300000])
def test_the_pickler_that_a_program_gives_to_mpi4py(messages, protocol, size):
    """For example dill; a pickle of protocol 0 may start with the same bytes as a header."""
    def dumps(obj, *_, **__):
        return pickle.dumps([obj, 'dumped'], protocol)

    MPI.pickle.__init__(dumps, pickle.loads, protocol)
    try:
        obj = 'x' * size
        received = exchange(messages.send_obj, lambda *args: messages.recv_obj(*args, None), obj)
        assert received == (
            [obj, 'dumped'] if WORLD.rank == WORLD.size - 1 and WORLD.size > 1 else obj)
    finally:
        MPI.pickle.__init__()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize('size', [1, 300000])
@pytest.mark.parametrize('source', [0, MPI.ANY_SOURCE])
def test_receiving_the_wrong_kind_raises_and_takes_the_message(messages, size, source):
    array, text = np.ones(size), 'x' * size
    if WORLD.rank == 0:
        messages.send_obj(text, 1, 1)
        messages.send_obj(text, 1, 1)
        messages.send(array, 1, 1)
        messages.send_obj(text, 1, 1)
    elif WORLD.rank == 1:
        with pytest.raises(TypeError, match=r'its message with tag 1 using send_obj\(\); receive '
                                            r'it with recv_obj\(\)'):
            messages.recv(source, 1)
        with pytest.raises(TypeError, match=r'receive it with recv_obj\(\)'):
            messages.irecv(source, 1).wait()
        with pytest.raises(TypeError, match=r'receive it with recv\(\)'):
            messages.recv_obj(source, 1, None)
        status = MPI.Status()
        assert messages.recv_obj(source, MPI.ANY_TAG, status) == text
        assert (status.source, status.tag) == (0, 1)
    WORLD.Barrier()


@pytest.mark.mpi(min_size=2)
def test_an_object_that_receives_while_it_is_unpickled(messages):
    """Its message is still being read, so another one must not overwrite it."""
    if WORLD.rank == 0:
        messages.send_obj([_Receives(), 'y' * 100], 1, 1)
        messages.send_obj('x' * 1000, 1, 2)
    elif WORLD.rank == 1:
        global _messages
        _messages = messages
        assert messages.recv_obj(0, 1, None) == ['x' * 1000, 'y' * 100]
    WORLD.Barrier()


class _Receives:
    def __reduce__(self):
        return _receive, ()


def _receive():
    return _messages.recv_obj(0, 2, None)


def test_long_error_texts_are_truncated(messages):
    class Broken:
        def __reduce__(self):
            raise ValueError('because ' * 10000)

    if WORLD.size > 1 and WORLD.rank in (0, WORLD.size - 1):
        with pytest.raises(TypeError, match='because because') as caught:
            if WORLD.rank == 0:
                messages.send_obj(Broken(), WORLD.size - 1, 1)
            else:
                messages.recv_obj(0, 1, None)
        assert len(str(caught.value)) < point_to_point.INLINE


def no_memory(*args):
    raise MemoryError('no memory here')


@pytest.mark.parametrize('name, size, failing', [
    ('send', 10 * point_to_point.INLINE, 'to_buffer'), ('isend', 10, 'to_buffer'),
    ('isend', 10 * point_to_point.INLINE, 'copied')])
def test_sender_without_memory(messages, monkeypatch, name, size, failing):
    """The receiver also raises the error, and later messages arrive."""
    if WORLD.size == 1:
        return
    x = np.arange(size).astype(np.uint8)
    data = (x, x) if size == 10 else x
    if WORLD.rank == 0:
        with monkeypatch.context() as patch:
            patch.setattr(point_to_point.array_buffers, failing, no_memory)
            with pytest.raises(MemoryError, match='no memory here') as error:
                getattr(messages, name)(x[:, None] if name == 'send' else data, 1, 7)
        assert f'{name} from rank 0 to rank 1 with tag 7 failed' in str(error.value)
        messages.send(x, 1, 7)
    if WORLD.rank == 1:
        with pytest.raises(MemoryError, match='no memory here'):
            messages.recv(0, 7)
        np.testing.assert_array_equal(messages.recv(0, 7), x)


def test_status_is_checked_before_a_receive_begins(messages):
    with pytest.raises(TypeError, match='tag=4'):
        messages.recv_obj(0, -1, 4)
    assert messages.record.count == len(messages.record.ring) or messages.record.count > 64
    messages.send_obj('first', WORLD.rank, 2)
    assert messages.recv_obj(WORLD.rank, 2, None) == 'first'

