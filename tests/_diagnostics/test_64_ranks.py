"""64 real ranks: a timeout and a deadlock end the job with a short report."""

import re

import pytest
from jobs import run_job

PROGRAM = '''
import sys, time
import chainermn

comm = chainermn.create_communicator('naive')
comm.barrier()
if sys.argv[1] == 'ring':
    comm.recv_obj((comm.rank + 1) % comm.size)
if comm.rank == 40:
    time.sleep(600)
comm.barrier()
'''
EXPECTED = {
    'one missing': [
        r'aborts the job: no progress for \d+ s; the timeout is 15 s',
        r'\n  rank 40 is not in an operation: it is at script.py:10; .*\n  ranks 0-39, 41-63 are '
        r'in barrier #2, called at script.py:11 \(',
        r'\nStacks of rank 40 \(most recent call last\):\n'],
    'ring': [
        r'aborts the job: deadlock: rank \d+ waits in recv_obj .*; and so on; 64 ranks are dead',
        r'\n  ranks 0-63 are in recv_obj, called at script.py:8 \('],
}


@pytest.mark.full
@pytest.mark.mpi_skip
@pytest.mark.limit(200)
@pytest.mark.parametrize('case', EXPECTED)
def test_a_report_of_64_ranks(tmp_path, case):
    done = run_job(tmp_path, PROGRAM, case, ranks=64, limit=150,
                   CHAINERMN_TIMEOUT='15' if case == 'one missing' else '0')
    assert done.returncode != 0
    assert done.stdout.count('aborts the job') == 1, done.stdout
    for text in EXPECTED[case]:
        assert re.search(text, done.stdout), done.stdout
    assert len(done.stdout.splitlines()) <= 40, done.stdout
