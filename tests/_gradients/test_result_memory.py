"""Memory for means is reused, but never while an array refers to it."""

import numpy as np
import pytest

from chainermn._gradients.result_memory import ResultMemory

pytestmark = pytest.mark.mpi_skip

F4 = np.dtype('f4')


def address(x):
    return x.__array_interface__['data'][0]


def test_reuse():
    memory = ResultMemory()
    first = address(memory.new('a', F4, 100))
    for _ in range(5):
        assert address(memory.new('a', F4, 100)) == first
        memory.end_round()
    assert memory.nbytes == [400]


@pytest.mark.parametrize('view', [
    lambda x: x, lambda x: x[3:5], lambda x: x[2:8].reshape(2, 3).T, lambda x: x.view('u1')[4:],
    lambda x: memoryview(x)])
def test_no_reuse_while_referenced(view):
    memory = ResultMemory()
    x = memory.new('a', F4, 10)
    first = address(x)
    kept = view(x)
    del x
    second = memory.new('a', F4, 10)
    assert address(second) != first
    del second, kept
    assert address(memory.new('a', F4, 10)) != first  # that one is the user's alone now


def test_no_reuse_for_other_keys():
    memory = ResultMemory()
    arrays = [memory.new(*key) for key in (
        ('a', F4, 10), ('b', F4, 10), ('a', np.dtype('f8'), 10), ('a', F4, 11))]
    assert len({*map(address, arrays)}) == 4


def test_unused_memory_is_freed():
    memory = ResultMemory()
    memory.new('a', F4, 10)
    for _ in range(10):
        memory.new('b', F4, 5)
        memory.end_round()
    assert memory.nbytes == [20]
