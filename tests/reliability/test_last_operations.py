"""The watchdog does not end jobs in which a rank is slow to finish its last operation.

These are some of the programs of last_operations.py, which runs hundreds.
"""

import json

import pytest
from jobs import run_job
from reliability import last_operations

pytestmark = [pytest.mark.mpi_skip,
              pytest.mark.limit(180)]

#: The watchdog of an earlier version ended most of these jobs.
SEEDS = [10, 11, 12, 13, 16, 23, 24, 27, 31, 32, 33, 34, 35, 36]

#: Rank 0 collects the results of all ranks, and writes a file that the others do not wait for.
PROGRAM = '''
import json, sys, time
import chainermn

class Predictions:
    """Builds an index when it is unpickled."""

    def __init__(self, n):
        self.n = n

    def __setstate__(self, state):
        self.__dict__.update(state)
        time.sleep(4)
        self.index = {k: k * k for k in range(self.n)}

comm = chainermn.create_communicator('naive')
gathered = comm.gather_obj(Predictions(10 + comm.rank))
if comm.rank == 0:
    with open(sys.argv[1], 'w') as file:
        json.dump([len(each.index) for each in gathered], file)
'''

#: Each rank waits for the other, which would be a deadlock if rank 0 did not unpickle.
UNPICKLES = '''
import time
import chainermn

class Index:
    def __setstate__(self, state):
        time.sleep(6)

    def __getstate__(self):
        return 1

comm = chainermn.create_communicator('naive')
if comm.rank == 0:
    comm.recv_obj(1)
    comm.send_obj(3, 1)
else:
    comm.send_obj(Index(), 0)
    assert comm.recv_obj(0) == 3
'''


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize('seed', SEEDS)
def test_ranks_that_end_seconds_apart(seed):
    job, status, output = last_operations.run(seed)
    assert (status, output) == (0, ''), f'{job}\n{output}'


def test_all_operations_are_covered():
    jobs = [last_operations.Job.of(seed) for seed in range(len(last_operations.OPERATIONS))]
    assert {job.operation for job in jobs} == set(last_operations.OPERATIONS)


@pytest.mark.slow
def test_program_that_collects_results(tmp_path):
    written = tmp_path / 'results.json'
    done = run_job(tmp_path, PROGRAM, str(written), ranks=3, limit=100)
    assert (done.returncode, done.stdout) == (0, '')
    assert json.loads(written.read_text()) == [10, 11, 12]


@pytest.mark.slow
def test_receiver_that_unpickles(tmp_path):
    done = run_job(tmp_path, UNPICKLES, limit=100)
    assert (done.returncode, done.stdout) == (0, '')
