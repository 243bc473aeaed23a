"""A copy of the state shares nothing with the object, and the generators continue."""
import io
import pickle
import random

import chainer
import numpy as np
import pytest

from chainermn.extensions._checkpointing import state
from chainermn.extensions._checkpointing.parts import SavedParts

try:
    import torch
except ImportError:
    torch = None


def draw():
    return (np.random.permutation(10).tolist(), np.random.normal(), random.random(),
            random.gauss(0, 1), torch and torch.rand(3).tolist())


def test_the_same_numbers_again():
    for burn in range(3):  # with and without a second gaussian number in store
        for _ in range(burn):
            np.random.normal()
            random.gauss(0, 1)
        file = io.BytesIO()
        np.savez(file, **state.capture_random())
        expected = [draw() for _ in range(3)]
        file.seek(0)
        with np.load(file) as arrays:
            state.restore_random(arrays)
        assert [draw() for _ in range(3)] == expected


def test_without_a_state_nothing_changes():
    np.random.seed(0)
    state.restore_random({})
    value = np.random.random()
    np.random.seed(0)
    assert value == np.random.random()


class State:
    """Serializes an array of every kind, and a state below it."""

    def __init__(self):
        self.arrays = {'c': np.arange(6.0).reshape(2, 3), 'f': np.asfortranarray(np.eye(3)),
                       'scalar': 3, 'none': None, 'objects': np.array([[1], 'x'], dtype=object),
                       'empty': np.empty((0, 2), np.float16), 'memory': memoryview(np.ones(3))}
        self.link = chainer.links.Linear(2, 2)

    def serialize(self, serializer):
        for name, array in self.arrays.items():
            serializer(name, array)
        self.link.serialize(serializer['below']['/link/'])


def test_a_copy_is_what_chainer_serializes_and_shares_nothing():
    target = State()
    serializer = chainer.serializers.DictionarySerializer()
    serializer.save(target)
    expected = {name: pickle.dumps(array) for name, array in serializer.target.items()}
    copied = state.copy_state(target)
    target.arrays['objects'][0].append('more')
    for array in serializer.target.values():
        array[...] = 0
    assert {name: pickle.dumps(array) for name, array in copied.items()} == expected


def test_an_order_that_is_drawn_during_the_copy_and_the_generator_after_it():
    class DrawsMeanwhile(chainer.iterators.SerialIterator):
        _prefetch_loop = orders = None

        def serialize(self, serializer):
            if self.orders is not None:
                serializer('next_orders', self.orders)
            else:  # as a thread would
                self.orders = np.random.permutation(4)

    copied = state.CopiedState.of(SavedParts({'data': DrawsMeanwhile([1, 2], 1)}), False).arrays
    expected = np.random.random()
    assert 'data/next_orders' in copied
    np.random.seed(0)
    state.restore_random(copied)
    assert np.random.random() == expected


def test_objects_are_refused_before_they_are_saved():
    arrays = {'x': np.arange(1000.0), 'y/z': np.asarray(None)}
    state.check_objects(arrays)
    for bad in (np.array([None], dtype=object), np.array({}, dtype=object)):
        with pytest.raises(TypeError, match='bad is an array of Python objects'):
            state.check_objects({**arrays, 'bad': bad})
