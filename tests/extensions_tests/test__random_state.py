"""The generators go on as if nothing had happened."""
import io
import random

import numpy as np

from chainermn.extensions import _random_state


def draw():
    return (np.random.permutation(10).tolist(), np.random.normal(), random.random(),
            random.gauss(0, 1))


def test_the_same_numbers_again():
    for burn in range(3):  # with and without a second gaussian number in store
        for _ in range(burn):
            np.random.normal()
            random.gauss(0, 1)
        file = io.BytesIO()
        np.savez(file, **_random_state.capture())
        expected = [draw() for _ in range(3)]
        file.seek(0)
        with np.load(file) as arrays:
            _random_state.restore(arrays)
        assert [draw() for _ in range(3)] == expected


def test_without_a_state_nothing_changes():
    np.random.seed(0)
    _random_state.restore({})
    value = np.random.random()
    np.random.seed(0)
    assert value == np.random.random()
