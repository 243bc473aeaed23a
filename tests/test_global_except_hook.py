"""One process that fails ends the job, says which one it is, and nobody hangs."""

import os
import subprocess
import sys
import textwrap

import pytest
from mpi4py import MPI
from time_limits import seconds

pytestmark = pytest.mark.skipif(MPI.COMM_WORLD.size > 1, reason='starts processes of its own')

VARIABLES = ('CHAINERMN_FORCE_ABORT_ON_EXCEPTIONS', 'CHAINERMN_FORCE_ABORT_ON_EXCEPTION')

# The others wait in MPI, or before MPI has started, for the rank that fails.
START = '''
import os, sys, threading
import chainermn
RANK = int(os.environ.get('PMI_RANK') or os.environ.get('OMPI_COMM_WORLD_RANK', 0))
'''
WAIT = '''
chainermn.create_communicator('naive').barrier()
print('went on', flush=True)
'''


def run(tmp_path, body, ranks=2, timeout=20, **env):
    """Runs the body on all ranks; gives exit status and what was printed."""
    script = tmp_path / 'script.py'
    script.write_text(START + textwrap.dedent(body))
    command = [sys.executable, script]
    if ranks:
        command = ['mpiexec', '-n', str(ranks), *command]
    clean = {name: value for name, value in os.environ.items()
             if name not in VARIABLES and not name.startswith(('PMI', 'MPI_'))}
    done = subprocess.run(command, env=clean | env, cwd=tmp_path, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          timeout=seconds(timeout))
    return done.returncode, done.stdout


FAILURES = {
    'exception': ("raise ValueError('no such luck')", 'uncaught ValueError', 'no such luck'),
    'thread': ('''
        thread = threading.Thread(target=lambda: {}['no such key'], name='loader')
        thread.start()
        thread.join()
        ''', 'uncaught KeyError in thread loader', 'no such key'),
    'sys.exit with status': ('sys.exit(3)', 'sys.exit with status 3', ''),
    'sys.exit with message': ("sys.exit('out of paper')", 'sys.exit with status 1', 'out of paper'),
    'os._exit': ('os._exit(5)', 'os._exit with status 5', 'script.py", line '),
    'atexit': ('''
        import atexit
        atexit.register(lambda: [][0])
        sys.exit(0)
        ''', 'uncaught IndexError in a function of atexit', 'list index'),
    'sys.exit at exit': ('''
        import atexit
        atexit.register(lambda: sys.exit('why'))
        sys.exit(0)
        ''', 'sys.exit with status 1 in a function of atexit', 'why'),
    'interrupt': ('raise KeyboardInterrupt', 'uncaught KeyboardInterrupt', 'raise Keyboard'),
}


@pytest.mark.parametrize('started', [True, False], ids=['in MPI', 'before MPI'])
@pytest.mark.parametrize('code, why, text', FAILURES.values(), ids=FAILURES.keys())
def test_a_failing_rank_ends_the_job(tmp_path, code, why, text, started):
    body = "chainermn.create_communicator('naive')\n" if started else ''
    body += f'if RANK == 1:\n{textwrap.indent(textwrap.dedent(code), "    ")}\n' + WAIT
    status, output = run(tmp_path, body)
    assert status != 0
    assert f'chainermn: rank 1 of 2 (host {os.uname().nodename}, process ' in output
    assert f'ends the job: {why}' in output
    assert text in output
    assert 'went on' not in output


def test_the_status_of_sys_exit_is_that_of_the_job(tmp_path):
    status, _ = run(tmp_path, "chainermn.create_communicator('naive')\nsys.exit(3 * RANK)\n")
    assert status == 3


HARMLESS = '''
import subprocess
if RANK == 1:
    try:
        sys.exit(3)
    except SystemExit as exit:
        assert exit.code == 3

    thread = threading.Thread(target=lambda: sys.exit(3))
    thread.start()
    thread.join()

    program = 'import chainermn, sys; sys.exit(3)'
    assert subprocess.run([sys.executable, '-c', program]).returncode == 3

    pid = os.fork()
    if pid == 0:
        try:
            sys.excepthook(ValueError, ValueError('in a worker'), None)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)

    class Late:
        def __del__(self):
            raise KeyError('ignored')

    Late()
    import atexit
    atexit.register(sys.exit, 0)
'''


@pytest.mark.parametrize('started', [True, False], ids=['in MPI', 'before MPI'])
def test_what_is_no_failure_of_a_rank_does_not_end_the_job(tmp_path, started):
    body = "chainermn.create_communicator('naive')\n" if started else ''
    status, output = run(tmp_path, body + HARMLESS + WAIT + 'sys.exit(0)\n')
    assert 'ends the job' not in output
    assert 'ValueError: in a worker' in output
    assert output.count('went on') == 2
    assert status == 0


@pytest.mark.parametrize('ranks', [0, 1], ids=['without mpiexec', 'one rank'])
def test_a_lone_process_fails_as_usual(tmp_path, ranks):
    status, output = run(tmp_path, '''
        assert sys.exit.__module__ == 'chainermn.global_except_hook'
        chainermn.create_communicator('naive')
        raise ValueError('no such luck')
        ''', ranks)
    assert status == 1
    assert 'chainermn:' not in output and 'Abort' not in output
    assert output.rstrip().endswith('ValueError: no such luck')


def test_a_lone_process_keeps_its_exit_status(tmp_path):
    assert run(tmp_path, 'sys.exit(7)', 0) == (7, '')
    assert run(tmp_path, "sys.exit('why')", 0) == (1, 'why\n')
    assert run(tmp_path, 'sys.exit()', 0) == (0, '')
    assert run(tmp_path, 'sys.exit((1, 2))', 0) == (1, '(1, 2)\n')


@pytest.mark.parametrize('how', ['call', *VARIABLES])
def test_when_forced_a_lone_process_aborts_too(tmp_path, how):
    code = '''
        chainermn.create_communicator('naive')
        raise ValueError('no such luck')
        '''
    if how == 'call':
        status, output = run(tmp_path, f'''
        chainermn.global_except_hook.add_hook()
        {code}''', 1)
    else:
        status, output = run(tmp_path, code, 1, **{how: '1'})
    assert status != 0
    assert 'chainermn: rank 0 of 1 (' in output
    assert 'ValueError: no such luck' in output
    assert 'Abort' in output


@pytest.mark.parametrize('variable', VARIABLES)
def test_can_be_switched_off(tmp_path, variable):
    status, output = run(tmp_path, '''
        assert sys.excepthook is sys.__excepthook__
        assert threading.excepthook is threading.__excepthook__
        assert type(sys.exit).__name__ == 'builtin_function_or_method'
        ''', 0, **{variable: '0'})
    assert (status, output) == (0, '')


def test_a_second_call_warns_and_changes_nothing(tmp_path):
    status, output = run(tmp_path, '''
        import warnings
        chainermn.global_except_hook.add_hook()
        hook = sys.excepthook
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter('always')
            chainermn.global_except_hook.add_hook()
        assert 'no effect' in str(caught[0].message)
        assert caught[0].filename == __file__
        assert sys.excepthook is hook
        ''', 0)
    assert (status, output) == (0, '')


def test_the_hook_that_was_there_before_is_called(tmp_path):
    script = tmp_path / 'before.py'
    script.write_text('import sys\nsys.excepthook = lambda *args: print("mine:", args[1])\n'
                      'import script\n')
    (tmp_path / 'script.py').write_text(
        START + "comm = chainermn.create_communicator('naive')\n"
        "if RANK: raise ValueError('luck')\n" + WAIT)
    done = subprocess.run(['mpiexec', '-n', '2', sys.executable, script], cwd=tmp_path, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=seconds(20))
    assert done.returncode != 0
    assert done.stdout == 'mine: luck\n'
