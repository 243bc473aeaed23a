"""The table of operations."""

import pytest

from chainermn import _operations
from chainermn._collectives.operation import collective, traced
from chainermn._operations import BY_NAME, OPERATIONS, SHAPE, Payload, Waits

pytestmark = pytest.mark.mpi_skip


def test_names_are_unique():
    assert len(BY_NAME) == len(OPERATIONS)


def test_a_digest_has_advice():
    """An error that lists what differs says what to do about it."""
    for operation in OPERATIONS:
        assert bool(operation.digest_of) == bool(operation.advice), operation.name
        assert not operation.digest_of or operation.equal == SHAPE, operation.name


def test_messages_wait_for_one_rank():
    for operation in OPERATIONS:
        if operation.name.startswith(('send', 'recv')):
            waits_for = Waits.RECEIVER if operation.name.startswith('send') else Waits.SENDER
            assert operation.waits_for is waits_for, operation.name
            assert operation.payload is not Payload.NOTHING, operation.name


@pytest.mark.parametrize('decorator', [collective, traced])
def test_an_operation_must_be_declared(decorator):
    def undeclared(self):
        pass

    with pytest.raises(AssertionError, match=r'undeclared is not declared in _operations\.py'):
        decorator(undeclared)


def test_waiting_for():
    assert 'allreduce' in _operations.waiting_for(Waits.RANKS)
    assert _operations.waiting_for(Waits.MESSAGES, Waits.BACKGROUND) == {
        'waitall', 'ask', 'wait for means'}
