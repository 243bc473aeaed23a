"""A deadlock is only reported if no state has changed in a confirmation round."""

from chainermn._diagnostics.deadlocks.detector import DeadlockDetector
from chainermn._diagnostics.deadlocks.rank_state import (
    Progress,
    RankState,
    ThreadState,
    Wait,
    WaitKind,
)

KEY = ('MessageRecord', (0, 1, 2, 3), 1)


def receiving(peer, received=None):
    """The state of a rank that waits for a message."""
    wait = Wait(WaitKind.RECEIVE, KEY, 0, peer, 0)
    return RankState(Progress({}, {}, {KEY: {}}, {KEY: received or {}}, {}),
                     (ThreadState('receive', '', '', 'a.py:1', '', (wait,)),), False, False)


CYCLE = ('rank 0 waits in receive (a.py:1) for rank 1; '
         'rank 1 waits in receive (a.py:1) for rank 0\n'
         'Each of ranks 0-1 receives first. Let one of them send first.')
STATES = [receiving(1), receiving(0)]


def detector_of(*states):
    detector = DeadlockDetector()
    for rank, state in enumerate(states):
        detector.set_state(rank, state)
    return detector


def test_a_deadlock_has_to_be_confirmed():
    detector = detector_of(*STATES)
    number, suspects = detector.new_suspects()
    assert suspects == {0, 1}
    assert detector.new_suspects() == (number, set())  # once
    assert detector.confirm(0, number, STATES[0]) == ''
    assert detector.confirm(1, number, STATES[1]) == CYCLE


def test_a_rank_that_has_made_progress_ends_the_suspicion():
    for later in (None, receiving(0, received={(0, 0): 1})):
        detector = detector_of(*STATES)
        number, _ = detector.new_suspects()
        assert detector.confirm(0, number, later) == ''
        assert detector.confirm(1, number, STATES[1]) == ''


def test_the_same_wait_later_has_to_be_confirmed_again():
    detector = detector_of(*STATES)
    first, _ = detector.new_suspects()
    detector.set_state(0, None)
    detector.set_state(0, STATES[0])
    second, suspects = detector.new_suspects()
    assert second != first and suspects == {0, 1}
    assert detector.confirm(0, first, STATES[0]) == ''  # late answers
    assert detector.confirm(1, first, STATES[1]) == ''
    assert detector.confirm(0, second, STATES[0]) == ''
    assert detector.confirm(1, second, STATES[1]) == CYCLE


def test_a_rank_that_does_not_answer_is_not_deadlocked():
    detector = detector_of(*STATES)
    number, _ = detector.new_suspects()
    for _ in range(3):
        assert detector.confirm(0, number, STATES[0]) == ''


def test_other_ranks_that_come_and_go_do_not_delay_it():
    detector = detector_of(*STATES)
    number, _ = detector.new_suspects()
    detector.confirm(0, number, STATES[0])
    detector.set_state(2, receiving(3))
    assert detector.new_suspects() == (number, set())
    assert detector.confirm(1, number, STATES[1]) == CYCLE


def test_ranks_that_wait_for_a_running_rank_are_not_suspected():
    assert detector_of(receiving(2), receiving(0)).new_suspects()[1] == set()
