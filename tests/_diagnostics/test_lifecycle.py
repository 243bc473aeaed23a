"""A rank that ends while others are inside a collective does not leave them waiting."""


import pytest
from jobs import run_job

pytestmark = pytest.mark.mpi_skip

START = '''
import atexit, sys, time
import numpy as np
import chainermn
comm = chainermn.create_communicator('naive')
'''
LOOPS = 'for i in range(2 + comm.rank): comm.allreduce(np.ones(3))'
EXITS_FROM_CREATION = """
from chainermn._transport import lifetime
if comm.rank == 1:
    lifetime.duplicates = lambda _: sys.exit(0)
chainermn.create_communicator('flat').barrier()
"""
AT_THE_END = ['end of the script', 'loops of different lengths (chainermn.join supports them']
STATUS_3 = ['rank 0 of 2', 'sys.exit with status 3']
#: Programs, and what is printed.
ENDS_EARLY = {
    'call inside an if': ('if comm.rank == 0: comm.bcast_obj({})', AT_THE_END),
    'loops of different lengths': (LOOPS, AT_THE_END),
    'sys.exit(0)': ('if comm.rank == 0: sys.exit(0)\ncomm.barrier()', AT_THE_END),
    'second communicator': ('sub = comm.split(0, comm.rank)\nif comm.rank: comm.barrier()',
                            AT_THE_END),
    'invalid argument': ('if comm.rank == 0: comm.allreduce("text")',
                         ['TypeError: allreduce failed on rank 0']),
    'exit of the builtins': ('if comm.rank == 0: exit(3)\ncomm.barrier()', STATUS_3),
    'exit from create_communicator': (EXITS_FROM_CREATION, [
        'rank 1 of 2', 'create_communicator was interrupted on this rank, which then reached the']),
    'raise SystemExit': ('if comm.rank == 0: raise SystemExit(3)\ncomm.barrier()', STATUS_3),
    'without hooks': (LOOPS, AT_THE_END),
}


def run(tmp_path, body, ranks=2, **env):
    return run_job(tmp_path, START + body, ranks=ranks, **env)


@pytest.mark.sample(3)
@pytest.mark.parametrize('name', ENDS_EARLY)
def test_the_other_ranks_raise_an_error(tmp_path, name):
    body, texts = ENDS_EARLY[name]
    env = {'CHAINERMN_FORCE_ABORT_ON_EXCEPTIONS': '0'} if name == 'without hooks' else {}
    done = run(tmp_path, body, **env)
    assert done.returncode != 0 and 'atexit' not in done.stdout
    for text in texts:
        assert text in done.stdout


# Rank 0 waits in the shutdown of the first communicator, so it takes no part in the error.
LAST_CALLS = {
    'KVStore.push': """
kv = chainermn.kvstore.create('dist_sync')
kv.init('key', np.zeros(3))
def update(key, gradient, weight):
    raise ZeroDivisionError('of the updater')
kv.set_updater(update)
kv.push('key', np.ones(3))
""",
    'raise_on_all_ranks': """
second = chainermn.create_communicator('naive')
if comm.rank == 1: second.refuse('loading', ZeroDivisionError('of the updater'))
"""}


@pytest.mark.slow
@pytest.mark.parametrize('name', LAST_CALLS)
def test_an_error_in_the_last_call_of_another_communicator_is_named(tmp_path, name):
    done = run(tmp_path, LAST_CALLS[name])
    assert done.returncode != 0
    first = next(line for line in done.stdout.splitlines() if 'aborts the job' in line)
    operation = 'loading' if name == 'raise_on_all_ranks' else name
    assert f'waits in {operation} #' in first
    assert 'failed on this rank (ZeroDivisionError: of the updater)' in first
    assert 'script.py:' in first


UNMATCHED = """
x = np.ones(3)
large = np.ones(100_000)
if comm.rank == 0:
    comm.isend(x, 1, 1)  # first
    comm.isend(large, 1, 2)  # second
    comm.isend(x, 1, 3)
    comm.isend(large, 1, 4)
    comm.isend(x, 0, 5)  # to itself
if comm.rank == 1:
    comm.irecv(0, 6)  # nothing
    comm.recv(0, 3)
    comm.irecv(0, 4).wait()
part = comm.split(0, -comm.rank)
if comm.rank == 1:
    part.irecv(1, 7)  # in a group
"""


def test_unmatched_sends_and_receives_are_reported(tmp_path):
    done = run(tmp_path, UNMATCHED)
    lines = (START + UNMATCHED).splitlines()
    called = {text: f', called at script.py:{n}' for n, line in enumerate(lines, 1)
              if (text := line.partition('  # ')[2])}
    assert done.returncode == 0
    blocks = {
        'chainermn: communicator of ranks 0-1, rank 0: unmatched sends and receives:',
        f'  isend to rank 1 with tag 1{called["first"]}: never received',
        f'  isend to rank 1 with tag 2{called["second"]}: never received',
        f'  isend to rank 0 with tag 5{called["to itself"]}: never received',
        'chainermn: communicator of ranks 0-1, rank 1: unmatched sends and receives:',
        f'  irecv from rank 0 with tag 6{called["nothing"]}: no message was sent',
        'chainermn: communicator of ranks 1, 0, rank 0: unmatched sends and receives:',
        f'  irecv from rank 1 with tag 7{called["in a group"]}: no message was sent'}
    assert set(done.stdout.splitlines()) == blocks


MATCHED = """
left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
sent = [comm.isend(np.ones(size), right, 1) for size in (1, 100_000, 0) * 5]
comm.send_obj('x', comm.rank)
received = [comm.irecv(left, 1) for _ in sent]
assert comm.recv_obj(comm.rank) == 'x'
comm.split(comm.rank % 2, 0).barrier()
try:
    chainermn.create_communicator('unknown')
except ValueError:
    pass
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize('end', [
    'comm.waitall(received); comm.split(0, 0).finalize(); comm.finalize()',
    'time.sleep(.3 * comm.rank); comm.waitall(received); comm.barrier(); sys.exit(0)',
    'comm.waitall(received); from mpi4py import MPI; MPI.Finalize()',
    'atexit.register(comm.waitall, received)'])
def test_a_normal_exit_prints_nothing(tmp_path, end):
    """Messages that were received are not reported."""
    done = run(tmp_path, MATCHED + end)
    assert (done.returncode, done.stdout) == (0, '')
