"""A forked child of a rank ends as a child of any Python program does, and the job continues."""

import pytest
from jobs import run_job

pytestmark = pytest.mark.mpi_skip

# "script.py chainermn" in a job; "script.py" in one process that knows nothing of MPI. Each child
# continues to the end of the script.
SCRIPT = '''
import atexit, os, signal, sys, threading

@atexit.register
def early():
    if os.getpid() != RANK:
        with open(f'atexit-{RANK}', 'w') as file:
            file.write('was called')

RANK = os.getpid()
comm = None
if sys.argv[1:] == ['chainermn']:
    import chainermn
    comm = chainermn.create_communicator('flat')
    comm.allreduce_obj(1)
elif sys.argv[1:] == ['mpi4py']:
    import chainermn
    from mpi4py import MPI

for child in %r:
    pid = os.fork()
    if pid == 0:
        exec(child)
        break
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    files = sorted(name for name in os.listdir() if name.endswith(f'-{RANK}'))
    left = {name.partition('-')[0]: open(name).read() for name in files}
    for name in files:
        os.unlink(name)
    sys.stdout.write(f'rank saw {status} {left} of {child!r}\\n')
    sys.stdout.flush()
    if comm is not None:
        assert comm.allreduce_obj(1) == comm.size
'''

CHILDREN = {
    'finishes': "print('child')",
    'sys.exit': "print('child'); sys.exit()",
    'sys.exit(3)': 'sys.exit(3)',
    'sys.exit(256)': 'sys.exit(256)',
    'sys.exit(text)': "sys.exit('why')",
    'raises': "raise ValueError('luck')",
    'is interrupted': 'raise KeyboardInterrupt',
    'replaces the hook': "sys.excepthook = lambda *args: print('mine'); raise ValueError('luck')",
    'os._exit(4)': 'os._exit(4)',
    'is killed': 'os.kill(os.getpid(), signal.SIGKILL)',
    'raises in atexit': 'atexit.register(lambda: [][0])',
    'leaves a file open': "file = open(f'open-{RANK}', 'w'); file.write('x' * 100)",
    'cannot write': "print('child'); os.close(1)",
    'has no streams': 'sys.stdout = sys.stderr = None; sys.exit(5)',
    'has a thread': "threading.Thread(target=lambda: print('thread')).start()",
    'has a child': 'os.fork() or sys.exit(6); os.wait(); sys.exit(5)',
}


def run(tmp_path, children, ranks, *args, **env):
    """Return what each rank saw, sorted, and the whole output."""
    done = run_job(tmp_path, SCRIPT % (children,), *args, ranks=ranks, limit=50,
                   options=('-W', 'ignore'), **env)
    assert done.returncode == 0, done.stdout
    return sorted(line for line in done.stdout.splitlines() if line.startswith('rank saw')), (
        done.stdout)


@pytest.mark.slow
def test_as_in_a_program_without_mpi(tmp_path):
    children = [*CHILDREN.values()]
    usual, printed = run(tmp_path, children, 0)
    seen, output = run(tmp_path, children, 2, 'chainermn')
    assert len(usual) == len(children)
    assert seen == sorted(2 * usual)
    for word in ('child', 'why', 'ValueError: luck', 'IndexError', 'mine', 'thread\n'):
        assert output.count(word) == 2 * printed.count(word)
    assert 'aborts the job' not in output and ' failed: ' not in output


@pytest.mark.sample(1)
@pytest.mark.parametrize('ranks, args, env', [
    (2, 'chainermn', {}), (0, 'chainermn', {}), (1, 'chainermn', {}), (2, 'mpi4py', {}),
    (2, 'chainermn', {'CHAINERMN_FORCE_ABORT_ON_EXCEPTIONS': '0'})],
    ids=['2 ranks', 'without mpiexec', '1 rank', 'without a communicator', 'switched off'])
def test_in_all_jobs(tmp_path, ranks, args, env):
    children = [CHILDREN['sys.exit(3)'], CHILDREN['raises']]
    usual, _ = run(tmp_path, children, 0)
    assert run(tmp_path, children, ranks, args, **env)[0] == sorted(max(1, ranks) * usual)


WORKERS = '''
import multiprocessing, os, sys
import chainermn

def square(x):
    return x * x

def work(how):
    if how == 'raises':
        raise ValueError('luck')
    if how == 'exits':
        sys.exit(3)
    if how == 'communicates':
        comm.barrier()

comm = chainermn.create_communicator('flat')
fork = multiprocessing.get_context('fork')
with fork.Pool(2) as pool:
    assert pool.map(square, range(5)) == [0, 1, 4, 9, 16]
for how, status in {'': 0, 'raises': 1, 'exits': 3, 'communicates': 1}.items():
    worker = fork.Process(target=work, args=[how])
    worker.start()
    worker.join()
    assert worker.exitcode == status
assert comm.allreduce_obj(1) == comm.size
print('went on', flush=True)
'''


@pytest.mark.slow
def test_workers_of_multiprocessing(tmp_path):
    done = run_job(tmp_path, WORKERS, limit=50, options=('-W', 'ignore'))
    assert done.returncode == 0, done.stdout
    assert done.stdout.count('went on') == 2
    assert done.stdout.count('ValueError: luck') == 2
    assert done.stdout.count('RuntimeError: barrier: this process was forked from the rank') == 2
    assert 'aborts the job' not in done.stdout
