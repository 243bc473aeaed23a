"""Two threads call collectives of one communicator: all ranks raise an error with both calls."""

import threading
import time

import numpy as np
import pytest
from jobs import run_job
from mpi4py import MPI

import chainermn

pytestmark = pytest.mark.every_size

WORLD = MPI.COMM_WORLD


def in_thread(function, name='worker'):
    """Start a thread; return it, and a list for its result or error."""
    results = []

    def run():
        try:
            results.append(function())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=run, name=name)
    thread.start()
    return thread, results


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize('odd', [0, 1])
def test_second_thread(odd, same_error, check_usable):
    comm = chainermn.create_communicator('naive')
    x = np.arange(3.) + comm.rank
    if comm.rank == odd:
        thread, results = in_thread(lambda: comm.allreduce(x))  # waits for the other ranks
        while comm._context.check.record.inside is None:
            time.sleep(1e-3)
        for _ in range(2):
            with pytest.raises(RuntimeError) as error:
                comm.barrier()
            text = str(error.value)
            assert 'two threads of this rank called collectives of one communicator' in text
            assert 'first: in allreduce' in text and 'in thread worker' in text
            assert 'second: in barrier (test_one_thread.py:' in text
            assert 'comm.split(0, comm.rank)' in text
        WORLD.Barrier()
        thread.join()
        total, = results
    else:
        WORLD.Barrier()
        total = comm.allreduce(x)
    np.testing.assert_array_equal(total, sum(np.arange(3.) + rank for rank in range(comm.size)))
    # The other ranks hear of it, since they might wait for the call of the second thread.
    error = same_error(lambda: comm.allgather_obj(comm.rank), failed=odd)
    assert isinstance(error, RuntimeError)
    assert 'first: in allreduce' in str(error)
    check_usable(comm)
    comm.finalize()


def test_threads_that_take_turns():
    """Each thread calls while no other does, in the same order on all ranks."""
    comm = chainermn.create_communicator('naive')
    turns = [threading.Event() for _ in range(9)]

    def work(first):
        totals = []
        for turn in range(first, len(turns) - 1, 2):
            turns[turn].wait()
            totals.append(comm.allreduce_obj(turn))
            turns[turn + 1].set()
        return totals

    threads = [in_thread(lambda first=first: work(first)) for first in range(2)]
    turns[0].set()
    for thread, _ in threads:
        thread.join()
    assert [results for _, results in threads] == [
        [[turn * comm.size for turn in range(first, 8, 2)]] for first in range(2)]
    comm.finalize()


def test_a_communicator_for_each_thread():
    comms = [chainermn.create_communicator('naive') for _ in range(3)]
    threads = [in_thread(lambda comm=comm: [comm.allreduce_obj(n) for n in range(50)])
               for comm in comms]
    for thread, results in threads:
        thread.join()
        assert results == [[n * comms[0].size for n in range(50)]]
    for comm in comms:
        comm.finalize()


@pytest.mark.parametrize('failing', ['argument', 'mismatch'])
def test_a_thread_after_an_error_in_another(failing):
    comm = chainermn.create_communicator('naive')

    def fail():
        if failing == 'argument':
            comm.allreduce('text')
        else:
            comm.bcast_obj(1, root=comm.rank)

    thread, results = in_thread(fail)
    thread.join()
    if failing == 'argument' or comm.size > 1:
        assert isinstance(results[0], (TypeError, ValueError))
    assert comm.allreduce_obj(1) == comm.size
    comm.finalize()


PROGRAM = '''
import concurrent.futures, sys
import numpy as np, chainermn
comm = chainermn.create_communicator('naive')

def work(n):
    for i in range(300):
        comm.allreduce(np.ones(3000) * n)
    return n

if sys.argv[1] == 'threads':
    import threading
    threads = [threading.Thread(target=work, args=(n,)) for n in range(2)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
else:  # it keeps the errors
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(work, range(2)))
'''


@pytest.mark.slow
@pytest.mark.mpi_skip
@pytest.mark.parametrize('kind', ['threads', 'pool'])
def test_the_job_ends_with_a_report(tmp_path, kind):
    done = run_job(tmp_path, PROGRAM, kind)
    assert done.returncode != 0
    assert 'two threads of this rank called collectives of one communicator' in done.stdout
    assert 'script.py:' in done.stdout
