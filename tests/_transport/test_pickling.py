"""Pickled objects: round trip, messages and errors."""

import pickle

import numpy as np
import pytest
from mpi4py import MPI

from chainermn._transport import pickling
from chainermn._transport.pickling import Pickled, load


def test_messages(monkeypatch):
    """The number of parts, their lengths, and the parts in chunks."""
    monkeypatch.setattr(pickling, 'CHUNK', 300_000)
    pickled = Pickled([np.arange(100_000.), np.arange(50_000.)])
    count, lengths, *parts = pickled.messages()
    assert count.tolist() == [3]
    assert lengths.tolist() == [len(pickled.stream), 800_000, 400_000]
    assert [part.size for part in parts] == [
        len(pickled.stream), 300_000, 300_000, 200_000, 300_000, 100_000]
    assert b''.join(parts[1:4]) == np.arange(100_000.).tobytes()


@pytest.mark.parametrize('obj, error', [
    ('1 / 0', ZeroDivisionError), ('__import__("no_such_module")', ModuleNotFoundError),
    ('b"\\xff".decode()', ValueError), ('{}["key"]', KeyError),
    ('__import__("pickle").loads(b"")', EOFError),
    ('__import__("pickle").loads(b"?")', pickle.UnpicklingError)])
def test_unpickling_error_names_the_sender(obj, error):
    class Bad:
        def __reduce__(self):
            return eval, (obj,)

    with pytest.raises(error) as caught:
        load(Pickled(Bad()).stream, (), 3, 5)
    cause = caught.value.__cause__
    assert str(caught.value) == (f'rank 5 cannot unpickle the object of rank 3: '
                                 f'{type(cause).__name__}: {cause}')


def test_large_buffers_are_not_copied():
    x = np.arange(100000.)
    (buffer,) = Pickled([x]).buffers
    assert np.shares_memory(np.frombuffer(buffer), x)
    assert len(Pickled([x]).stream) < 1000
    assert not Pickled([x[:10]]).buffers


@pytest.mark.parametrize('obj', [
    None, True, 2**70, -1.5, 1j, 'text', b'bytes', 'long ' * 10**5, {'loss': 1.5}, [np.arange(3)]])
def test_one_stream_without_buffers(obj):
    stream, buffers = pickling.dump(obj)
    assert (stream, [*buffers]) == (pickle.dumps(obj, 5), [])
    assert pickle.dumps(load(stream, (), 0, 0), 5) == stream


@pytest.mark.parametrize('obj', [1.5, {'loss': 1.5}])
def test_the_pickle_of_the_program(monkeypatch, obj):
    """It may have replaced that of mpi4py."""
    class Other:
        def dumps(self, obj, protocol=5, buffer_callback=None):
            return pickle.dumps(('other', obj), protocol)

    monkeypatch.setattr(pickling.MPI, 'pickle', MPI.Pickle(Other().dumps, pickle.loads))
    assert pickle.loads(pickling.dump(obj)[0]) == ('other', obj)


class Broken:
    def __init__(self, error):
        self.error = error

    def __reduce__(self):
        raise self.error


@pytest.mark.parametrize('error', [OSError('why'), TypeError('why'), RecursionError('why')])
def test_unpicklable_objects(error):
    with pytest.raises(TypeError, match=r'Broken.* cannot be pickled: why') as caught:
        Pickled(Broken(error))
    assert caught.value.__cause__ is error


def test_keyboard_interrupt_is_not_converted():
    with pytest.raises(KeyboardInterrupt):
        Pickled(Broken(KeyboardInterrupt()))


def test_the_error_of_an_object_that_cannot_be_pickled_has_no_address():
    """Else the ranks would raise different errors."""
    with pytest.raises(TypeError, match="an object of <class 'function'> cannot be pick") as error:
        Pickled(lambda: 1)
    assert '0x' not in str(error.value)
