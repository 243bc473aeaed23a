"""An object that is pickled already, and unpickles to the object itself."""

import pickle

import numpy as np
import pytest

from chainermn.communicators._pickled import Pickled, load


@pytest.mark.parametrize('obj', [
    None, 1, 'text', {'a': [1, (2,)]}, np.arange(6.).reshape(2, 3).T, [np.zeros(100000), 'x']],
    ids=['None', 'int', 'text', 'nested', 'array', 'large array'])
@pytest.mark.parametrize('out_of_band', [False, True])
def test_unpickling_gives_the_object(obj, out_of_band):
    buffers = []
    callback = buffers.append if out_of_band else None
    stream = pickle.dumps(Pickled(obj), protocol=5, buffer_callback=callback)
    result = pickle.loads(stream, buffers=buffers)
    np.testing.assert_equal(result, obj)
    assert type(result) is type(obj)


def test_load():
    pickled = Pickled({'x': np.arange(100000.)})
    result = load(pickled.stream, pickled.buffers)
    np.testing.assert_array_equal(result['x'], np.arange(100000.))


def test_large_buffers_are_not_copied():
    x = np.arange(100000.)
    (buffer,) = Pickled([x]).buffers
    assert np.shares_memory(np.frombuffer(buffer), x)
    assert len(Pickled([x]).stream) < 1000
    assert not Pickled([x[:10]]).buffers


class Broken:
    def __init__(self, error):
        self.error = error

    def __reduce__(self):
        raise self.error


@pytest.mark.parametrize('error', [OSError('why'), TypeError('why'), RecursionError('why')])
def test_what_cannot_be_pickled(error):
    with pytest.raises(TypeError, match=r'Broken.* cannot be pickled: why') as caught:
        Pickled(Broken(error))
    assert caught.value.__cause__ is error


def test_an_interrupt_is_no_refusal():
    with pytest.raises(KeyboardInterrupt):
        Pickled(Broken(KeyboardInterrupt()))
