"""Memory for means is reused, but never while an array refers to it."""

import numpy as np
import pytest

from chainermn._gradients.result_memory import ResultMemory

pytestmark = pytest.mark.mpi_skip

F4 = np.dtype('f4')


def address(x):
    return x.__array_interface__['data'][0]


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
