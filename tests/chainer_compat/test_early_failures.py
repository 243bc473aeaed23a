"""Under chainermn run, a rank that fails before it imports chainermn ends the job."""

import os
import re
import subprocess
import sys
import textwrap

import pytest
from mpi4py import MPI
from time_limits import seconds

pytestmark = [pytest.mark.mpi_skip, pytest.mark.skipif(
    'MPICH' not in MPI.Get_library_version(),
    reason="Open MPI's mpiexec reports failures before MPI_Init itself")]

RANK = """
import os
rank = int(os.environ['PMI_RANK'])
"""
CREATE = """
import chainermn
comm = chainermn.create_communicator('naive')
for number in range(comm.size):
    comm.barrier()
    if comm.rank == number:
        print('size', comm.size, flush=True)
"""


def run(folder, program, *args, **env):
    (folder / 'script.py').write_text(program)
    return subprocess.run(
        [sys.executable, '-m', 'chainermn', 'run', '-n', '2', '--max-restarts', '0', *args],
        cwd=folder, text=True, capture_output=True, timeout=seconds(30), check=False,
        env={**os.environ, **env})


@pytest.mark.parametrize('code, error, message', [
    ('import missing_module', 'ModuleNotFoundError', "No module named 'missing_module'"),
    ("exec('x = = 1')", 'SyntaxError', 'invalid syntax'),
    ("os.environ['CHAINER_TYPE_CHECK'] = 'x'", 'ValueError', "CHAINER_TYPE_CHECK is 'x'"),
    ("import sys; sys.modules['numpy'] = None", 'ModuleNotFoundError', 'import of numpy halted')],
    ids=['module', 'syntax', 'variable', 'numpy'])
def test_an_exception_of_one_rank(tmp_path, code, error, message):
    done = run(tmp_path, f'{RANK}if rank == 1:\n    {code}\n{CREATE}', 'script.py')
    assert done.returncode == 1
    assert re.search(
        'Traceback .*'
        rf'\n{error}: {message}.*\n'
        r'chainermn: rank 1 of 2 \(.*\) aborts the job: '
        rf'uncaught {error} before import chainermn \(traceback above\)\n', done.stderr, re.DOTALL)
    result = done.stderr.rpartition('result\n')[2]
    assert f'uncaught {error} before import chainermn (traceback above): {message}' in result


def test_a_syntax_error_of_a_module_on_all_ranks(tmp_path):
    done = run(tmp_path, 'x = = 1\n', '-m', 'script')
    assert done.returncode == 1
    assert done.stderr.count('uncaught SyntaxError before import chainermn') == 2  # and the table


CHILDREN = """
import multiprocessing
import subprocess
import sys

def fail():
    raise ValueError('of a child')

if __name__ == '__main__':
    subprocess.run([sys.executable, '-c', 'raise ValueError'], close_fds=False)
    for method in ('fork', 'spawn'):
        child = multiprocessing.get_context(method).Process(target=fail)
        child.start()
        child.join()
    if os.fork() == 0:
        fail()
    os.wait()
    try:
        import missing_module
    except ImportError:
        pass
"""


def test_children_and_caught_exceptions(tmp_path):
    done = run(tmp_path, RANK + CHILDREN + textwrap.indent(CREATE, '    '), 'script.py')
    assert (done.returncode, sorted(done.stdout.split())) == (0, ['2', '2', 'size', 'size'])
    assert 'chainermn' not in done.stderr


def test_a_program_without_mpi(tmp_path):
    """No rank waits for another one that ends first, with any status."""
    done = run(tmp_path, f'{RANK}import time, sys\ntime.sleep(rank)\nprint(rank)\nsys.exit(rank)',
               'script.py')
    assert done.returncode == 1
    assert sorted(done.stdout.split()) == ['0', '1']


def test_the_hook_can_be_disabled(tmp_path):
    """Both ranks end by themselves."""
    done = run(tmp_path, f'{RANK}if rank == 0:\n    raise ValueError\nimport time\ntime.sleep(1)\n'
               'print(rank)', 'script.py', CHAINERMN_FORCE_ABORT_ON_EXCEPTIONS='0')
    assert done.stdout == '1\n'
