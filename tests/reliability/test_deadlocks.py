"""Some deadlocks of deadlocks.py; ``tox -e full`` runs all of them."""

import sys

import pytest
from reliability import deadlocks

pytestmark = [pytest.mark.mpi_skip,
              pytest.mark.limit(120)]

#: One of each kind: a message, objects, any source, communicators, functions, an optimizer.
SAMPLE = [
    ('wrong tag', 'naive', 2), ('cycle of 4 with messages and objects', 'flat', 4),
    ('any source without a sender', 'naive', 3),
    ('three communicators in a circle', 'flat', 3),
    ('gradients around a ring', 'naive', 3), ('gradient queue and a message', 'flat', 2)]


@pytest.mark.parametrize('job', [
    pytest.param(job, id=str(job),
                 marks=() if job[:3] == SAMPLE[0] else
                 pytest.mark.slow if job[:3] in SAMPLE else pytest.mark.full)
    for job in deadlocks.jobs()])
def test_deadlock_is_reported(job):
    result = deadlocks.run(job, sys.executable)
    late = result.problem.endswith(' s')  # a busy machine may be
    assert not result.problem or late, f'{result.problem}\n{result.output}'


def test_the_catalogue():
    cases = deadlocks.CASES
    assert {*SAMPLE} <= {job[:3] for job in deadlocks.jobs()}
    assert {n for case in cases.values() for n in case.ranks} == {2, 3, 4}
    for name, case in cases.items():
        waits = case.waits()
        assert waits, name
        assert all(rank < case.n for rank in waits), name
        # Each rank waits for another one that waits, and one of them for the first.
        assert all(wait.ranks <= {*waits} - {rank} for rank, own in waits.items()
                   for wait in own), name

