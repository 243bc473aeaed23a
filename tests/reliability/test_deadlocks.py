"""Some deadlocks of deadlocks.py; ``tox -e full`` runs all of them."""

import sys

import pytest
from reliability import deadlocks

pytestmark = [pytest.mark.mpi_skip,
              pytest.mark.limit(120)]

#: One of each kind: a message, objects, any source, communicators, functions, an optimizer.
SAMPLE = [
    ('another tag', 'naive', 2), ('cycle of 4 with messages and objects', 'flat', 4),
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


def report(waits):
    return (f'chainermn: rank 1 of 2 (host h, process 5) aborts the job: deadlock: {waits}\n'
            'Stacks of rank 0:\n')


RIGHT = [
    'rank 0 waits in send #1 to rank 1 tag 5 float32 (3,) (deadlock_messages.py:{}) for rank 1',
    'rank 1 waits in recv #1 from rank 0 tag 6 (deadlock_messages.py:{} in another_tag()) '
    'for rank 0']


@pytest.mark.parametrize(('change', 'problem'), [
    (lambda waits: waits, ''),
    (lambda waits: waits[::-1], ''),
    (lambda waits: waits[:1], 'ranks [1] are not named'),
    (lambda waits: [waits[0].replace('in send', 'in isend'), waits[1]],
     'rank 0 is in send, not isend'),
    (lambda waits: [waits[0].replace('messages', 'models'), waits[1]], 'rank 0 is at'),
    (lambda waits: [waits[0], waits[1].replace('for rank 0', 'for ranks 0-1')],
     'rank 1 waits for [0], not [0, 1]'),
    (lambda waits: [*waits, waits[0].replace('rank 0', 'rank 2', 1)], 'rank 2 is named'),
    (lambda waits: ['something else'], 'other message'),
])
def test_reports_are_checked(change, problem):
    case = deadlocks.CASES['another tag']
    lines = [case.waits()[rank][0].line.partition(':')[2] for rank in range(2)]
    waits = [text.format(line) for text, line in zip(RIGHT, lines, strict=True)]
    found = deadlocks.problem_of_report(case, report('; '.join(change(waits))))
    assert found.startswith(problem) and bool(found) == bool(problem)


def test_other_messages_are_problems():
    case = deadlocks.CASES['another tag']
    assert deadlocks.problem_of_report(case, '') == '0 messages'
    text = 'chainermn: rank 0 of 2 (host h, process 5) aborts the job: no progress for 60 s\n'
    assert deadlocks.problem_of_report(case, text) == 'other message'
    assert deadlocks.problem_of_report(case, 2 * text) == '2 messages'


def test_the_table():
    job, result = deadlocks.Job, deadlocks.Result
    text = deadlocks.table({
        job('any tag', 'naive', 2, 'MPICH 5'): result('', 2., ''),
        job('any tag', 'flat', 2, 'MPICH 5'): result('hangs', 20., ''),
        job('any tag', 'flat', 2, 'Open MPI 5'): result('', 3., '')})
    assert '| deadlock | ranks | MPICH 5 | Open MPI 5 |' in text
    assert '| any tag | 2 | 1/2, 20.0 s | 1/1, 3.0 s |' in text
    assert ('deadlocks in 3 jobs: 2 ended correctly, 1 hung; without a timeout, the '
            'longest took 20.0 s.') in text
    assert '- any tag / flat / 2 / MPICH 5: hangs' in text
