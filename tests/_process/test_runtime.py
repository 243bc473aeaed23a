"""State of a process, which a forked child has to itself."""
import os

import pytest

import chainermn
from chainermn._process import runtime

pytestmark = pytest.mark.mpi_skip


class New(runtime.ProcessState):
    def __init__(self):
        self.value = 0


class Kept(New):
    def in_child(self):
        self.value += 1
        return True


def in_child(function):
    """Return the exit status of a forked child that exits with the result of a function."""
    process = os.fork()
    if not process:
        status = 99
        try:
            status = function()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def test_a_process_has_one_part_of_each_class():
    assert runtime.get(New) is runtime.get(New)
    assert type(runtime.get(Kept)) is Kept
    assert runtime.get(Kept) is not runtime.get(New)


def test_a_child_gets_new_parts_except_those_that_are_kept():
    with runtime.replaced():
        runtime.get(New).value = 10
        runtime.get(Kept).value = 20
        assert in_child(lambda: 10 * runtime.get(New).value + runtime.get(Kept).value) == 21
        assert (runtime.get(New).value, runtime.get(Kept).value) == (10, 20)


def test_parts_are_prepared_in_order_of_creation():
    order = []
    with runtime.replaced() as second:
        for name in 'abc':
            second.get(type(name, (runtime.ProcessState,), {
                'in_child': lambda self: order.append(type(self).__name__)}))
        second.in_child()
    assert order == ['a', 'b', 'c']


def test_a_part_of_the_parent_is_not_deleted_in_a_child():
    class Deleted(runtime.ProcessState):
        def __del__(self):
            deleted.append(self)

    deleted = []
    with runtime.replaced() as second:
        second.get(Deleted)
        second.in_child()
        assert not deleted


def test_a_second_runtime_is_independent():
    before = runtime.get(New)
    with runtime.replaced():
        assert runtime.get(New) is not before
        assert chainermn.create_communicator('dummy').size == 1
    assert runtime.get(New) is before
