"""The table of operations."""

import pytest

from chainermn._collectives.operation import operation
from chainermn._operations import table
from chainermn._operations.table import BY_NAME, OPERATIONS, SHAPE, Payload, Waits

pytestmark = pytest.mark.mpi_skip


def test_names_are_unique():
    assert len(BY_NAME) == len(OPERATIONS)


def test_a_digest_has_advice():
    """An error that lists what differs says what to do about it."""
    for each in OPERATIONS:
        assert bool(each.digest_of) == bool(each.advice), each.name
        assert not each.digest_of or each.equal == SHAPE, each.name


def test_messages_wait_for_one_rank():
    for each in OPERATIONS:
        if each.name.startswith(('send', 'recv')):
            waits_for = Waits.RECEIVER if each.name.startswith('send') else Waits.SENDER
            assert each.waits_for is waits_for, each.name
            assert each.payload is not Payload.NOTHING, each.name


def test_an_operation_must_be_declared():
    def undeclared(self):
        pass

    with pytest.raises(AssertionError, match='undeclared is not declared'):
        operation(undeclared)


def test_waiting_for():
    assert 'allreduce' in table.waiting_for(Waits.RANKS)
    assert table.waiting_for(Waits.MESSAGES, Waits.BACKGROUND) == {
        'waitall', 'ask', 'wait for means'}
