"""Ranks that wait for a rank outside of operations print one warning, and continue."""

import re

import pytest
from jobs import run_job

starts = pytest.mark.mpi_skip
STALL = '''
import time
import chainermn
comm = chainermn.create_communicator('naive')
part = comm.split(comm.rank // 2, comm.rank)

def load():
    time.sleep({seconds})

if comm.rank == 1:
    load()
if comm.rank < 2:
    part.barrier()
if comm.rank == 0:
    comm.send_obj(1, 2, tag=3)
if comm.rank == 2:
    comm.recv_obj(0, tag=3)  # of a rank that waits itself
print('went on', flush=True)
'''


def run(folder, limit, pause):
    return run_job(folder, STALL.format(seconds=pause), ranks=3, limit=60,
                   CHAINERMN_STALL_WARNING=limit)


@pytest.mark.slow
@starts
def test_a_stall_is_reported_once_and_the_job_goes_on(tmp_path):
    done = run(tmp_path, '1', 10)
    assert (done.returncode, done.stdout.count('went on')) == (0, 3), done.stdout
    assert done.stdout.count('chainermn') == 1, done.stdout
    assert ('chainermn: warning: ranks have waited for 1 s; the job continues '
            '(CHAINERMN_STALL_WARNING sets the seconds, 0 disables this warning)\n'
            '  rank 0 waits in barrier #1 of the communicator of ranks 0-1 (script.py:13) for rank '
            '1\n  rank 2 waits in recv_obj #1 from rank 0 tag 3 (script.py:17) for rank 0\n'
            '  rank 1 is not in an operation: it is at script.py:8 in load()') in done.stdout


@pytest.mark.slow
@pytest.mark.sample(1)
@starts
@pytest.mark.parametrize(('limit', 'pause'), [('0', 6), ('60', 6), ('', 6)])
def test_shorter_waits_and_disabled_warnings_print_nothing(tmp_path, limit, pause):
    done = run(tmp_path, limit, pause)
    assert (done.returncode, done.stdout.count('went on')) == (0, 3)
    assert 'chainermn' not in done.stdout


@pytest.mark.slow
@starts
@pytest.mark.parametrize('limit, is_warned', [('1', True), ('0', False), ('', False)])
def test_one_rank_per_node_warns_of_a_rank_that_creates_no_communicator(tmp_path, limit,
                                                                        is_warned):
    done = run_job(tmp_path, '''
import time
from mpi4py import MPI

if MPI.COMM_WORLD.rank == 1:
    time.sleep(6)
import chainermn
chainermn.create_communicator('naive')
print('went on', flush=True)
''', ranks=3, limit=60, CHAINERMN_STALL_WARNING=limit)
    assert (done.returncode, done.stdout.count('went on')) == (0, 3), done.stdout
    assert done.stdout.count('chainermn: ') == is_warned, done.stdout
    if is_warned:
        assert re.search(
            r'chainermn: warning: rank [02] has waited for 1 s in create_communicator, called at '
            r'script.py:8; does every rank call create_communicator\? The job continues '
            r'\(CHAINERMN_STALL_WARNING sets the seconds, 0 disables this warning\)\n',
            done.stdout), done.stdout
