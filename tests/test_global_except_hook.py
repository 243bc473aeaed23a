"""A rank that fails reports itself and aborts the job, so that no rank hangs."""

import os
import re
import signal
import subprocess
import sys
import textwrap

import chainer
import pytest
from jobs import run_job
from time_limits import seconds

import chainer_compat
import chainermn

pytestmark = pytest.mark.mpi_skip

VARIABLES = ('CHAINERMN_FORCE_ABORT_ON_EXCEPTIONS', 'CHAINERMN_FORCE_ABORT_ON_EXCEPTION')

# The other ranks wait for the rank that fails, in MPI or before MPI has started.
START = '''
import os, sys, threading
import chainermn
RANK = int(os.environ.get('PMI_RANK') or os.environ.get('OMPI_COMM_WORLD_RANK', 0))
'''
WAIT = '''
chainermn.create_communicator('naive').barrier()
print('went on', flush=True)
'''


def run(tmp_path, body, ranks=2, before='', **env):
    """Run a program on all ranks; return its exit status and its output."""
    done = run_job(tmp_path, before + START + textwrap.dedent(body), ranks=ranks, limit=50, **env)
    return done.returncode, done.stdout


@pytest.fixture(params=["chainermn.create_communicator('naive')\n", ''],
                ids=['in MPI', 'before MPI'])
def begin(request):
    """The first lines of a program."""
    return request.param


FAILURES = {
    'exception': ("raise ValueError('no such luck')", 'uncaught ValueError', 'no such luck'),
    'thread': ('''
        thread = threading.Thread(target=lambda: {}['no such key'], name='loader')
        thread.start()
        thread.join()
        ''', 'uncaught KeyError in thread loader', 'no such key'),
    'sys.exit with status': ('sys.exit(3)', 'sys.exit with status 3, called at script.py:', ''),
    'raise SystemExit': ('raise SystemExit(3)', 'sys.exit with status 3', ''),
    'sys.exit in the standard library': (
        'import argparse; argparse.ArgumentParser().error("no")',
        'sys.exit with status 2, called at script.py:', ''),
    'sys.exit with message': ("sys.exit('out of paper')", 'sys.exit with status 1', 'out of paper'),
    'os._exit': ('os._exit(5)', 'os._exit with status 5', 'script.py", line '),
    'atexit': ('''
        import atexit
        atexit.register(lambda: [][0])
        sys.exit(0)
        ''', 'uncaught IndexError in an atexit function', 'list index'),
    'sys.exit at exit': ('''
        import atexit
        atexit.register(lambda: sys.exit('why'))
        sys.exit(0)
        ''', 'sys.exit with status 1 in an atexit function', 'why'),
    'interrupt': ('raise KeyboardInterrupt', 'interrupted by Ctrl-C or SIGINT', ''),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize('code, why, text', FAILURES.values(), ids=FAILURES.keys())
def test_a_failing_rank_aborts_the_job(tmp_path, code, why, text, begin):
    body = f'{begin}if RANK == 1:\n{textwrap.indent(textwrap.dedent(code), "    ")}\n' + WAIT
    status, output = run(tmp_path, body)
    assert status != 0
    assert f'chainermn: rank 1 of 2 (host {os.uname().nodename}, process ' in output
    assert f'aborts the job: {why}' in output
    assert text in output
    assert 'went on' not in output


@pytest.mark.parametrize('debug', ['0', pytest.param('1', marks=pytest.mark.slow)])
@pytest.mark.usefixtures('default_signals')
def test_ctrl_c_is_one_line(tmp_path, debug):
    script = tmp_path / 'script.py'
    script.write_text(START + '''
comm = chainermn.create_communicator('naive')
comm.barrier()
if RANK == 0:
    print('all wait', flush=True)
threading.Event().wait()
''')
    with subprocess.Popen(['mpiexec', '-n', '2', sys.executable, script], text=True,
                          env={**os.environ, 'CHAINERMN_DEBUG': debug}, start_new_session=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert process.stdout.readline() == 'all wait\n'
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        output, _ = process.communicate(timeout=seconds(30))
    assert process.returncode != 0
    assert output.count('aborts the job: ') == 1
    if debug == '1':
        assert 'uncaught KeyboardInterrupt\nTraceback' in output
    else:
        assert 'aborts the job: interrupted by Ctrl-C or SIGINT\n' in output
        assert 'Traceback' not in output and 'KeyboardInterrupt' not in output


@pytest.mark.sample(2)
@pytest.mark.parametrize('code, text, first, debug', [
    ('comm.bcast_obj(1, root=RANK)', 'roots differ between ranks', 0, '0'),
    ('comm.bcast_obj(1, root=2)', 'must be a rank from 0 to 1, not 2', 0, '1'),
    ('comm.bcast_obj(1, root=max(1, 2 * RANK))', 'must be a rank from 0 to 1, not 2', 1, '0'),
    ("chainermn.create_communicator('nope')", 'Unrecognized communicator', 0, '1'),
], ids=['mismatch', 'invalid on all ranks', 'invalid on the last rank', 'creation'])
def test_an_error_of_all_ranks_is_printed_once_without_internal_frames(
        tmp_path, code, text, first, debug):
    status, output = run(tmp_path, f'''
        comm = chainermn.create_communicator('naive')
        def mine():
            {code}
        mine()
        ''', CHAINERMN_DEBUG=debug)
    assert status != 0
    assert output.count(text) == output.count('aborts the job') == 1, output
    assert f'chainermn: rank {first} of 2' in output
    assert output.count('Traceback') == 1 and ', in mine\n' in output
    package = os.path.dirname(chainermn.__file__)
    assert (f'File "{package}' in output) == (debug == '1'), output


@pytest.mark.sample(2)
@pytest.mark.parametrize('code, text, is_internal', [
    ('comm.send(1, dest=7, tag=0)', 'dest must be a rank from 0 to 1, not 7', False),
    ("chainermn.create_multi_node_optimizer('Adam', comm)", 'needs a chainer.Optimizer', False),
    ('comm.__dict__.clear(); comm.size', "no attribute '_size'", True),
    ('chainer.functions.linear(np.ones((2, 3)), np.ones((2, 4)))', 'Actual: 3 != 4', False),
], ids=['value', 'type', 'not raised', "Chainer's"])
def test_an_error_that_explains_a_mistake_is_printed_without_internal_frames(
        tmp_path, code, text, is_internal):
    status, output = run(tmp_path, f'''
        import chainer, numpy as np
        comm = chainermn.create_communicator('naive')
        def mine():
            {code}
        if RANK == 1:
            mine()
        comm.barrier()
        ''')
    assert status != 0
    assert output.count(text) == 1 and ', in mine\n' in output, output
    assert has_internal_frames(output) == is_internal, output


def has_internal_frames(output):
    return any(f'File "{os.path.dirname(package.__file__)}' in output
               for package in (chainer, chainermn, chainer_compat))


@pytest.mark.slow
def test_an_error_of_all_ranks_that_rank_0_catches_is_printed_by_another(tmp_path):
    status, output = run(tmp_path, '''
        comm = chainermn.create_communicator('naive')
        try:
            comm.bcast_obj(1, root=RANK)
        except chainermn.CollectiveMismatchError:
            if RANK:
                raise
        threading.Event().wait()
        ''')
    assert status != 0
    assert 'chainermn: rank 1 of 2' in output and output.count('roots differ between') == 1


TRAINER = '''
import chainer, numpy as np
comm = chainermn.create_communicator('naive')
optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.SGD(), comm)
optimizer.setup(chainer.links.Classifier(chainer.links.Linear(3, 2)))
data = [(np.ones(3, 'f'), np.int32(0))] * 8
iterator = chainer.iterators.SerialIterator(data, 4)
trainer = chainer.training.Trainer(
    chainer.training.StandardUpdater(iterator, optimizer), (4, 'iteration'))
def fail(trainer):
    {}
trainer.extend(fail, trigger=(2, 'iteration'))
trainer.run(show_loop_exception_msg={})
'''


@pytest.mark.sample(2)
@pytest.mark.parametrize('code, text, is_common', [
    ('assert RANK != 1, "my own"', 'AssertionError: my own', False),
    ('comm.bcast_obj(1, root=RANK)', 'CollectiveMismatchError: Collective mismatch in', True),
    ('assert False, "my own"', 'AssertionError: my own', False)])
@pytest.mark.parametrize('show', [True, False])
def test_the_trainer_and_the_job_print_an_error_once(tmp_path, code, text, is_common, show):
    status, output = run(tmp_path, TRAINER.format(code, show))
    assert status != 0
    assert output.count('Exception in main training loop') == (show and not is_common)
    assert output.count(text) == output.count('aborts the job') == 1
    assert output.count('Traceback') == 1 and output.count('in fail\n') == 1, output


@pytest.mark.parametrize('code', [
    'RANK == 1 and comm.send(1, dest=7, tag=0)',
    pytest.param('RANK == 1 and optimizer.target.predictor(np.ones((2, 5)))',
                 marks=pytest.mark.slow)])
@pytest.mark.parametrize('debug', ['0', pytest.param('1', marks=pytest.mark.slow)])
def test_the_trainer_prints_a_mistake_without_internal_frames(tmp_path, code, debug):
    status, output = run(tmp_path, TRAINER.format(code, True), CHAINERMN_DEBUG=debug)
    assert status != 0
    assert output.count('Exception in main training loop') == 1
    assert output.count('(traceback above)') == output.count('Will finalize trainer') == 1
    assert output.count('Traceback') == output.count('in fail\n') == 1, output
    assert has_internal_frames(output) == (debug == '1'), output


# The operating system only keeps 8 bits of these statuses, which are 0.
ZEROS = ['sys.exit(256)', 'raise SystemExit(-512)', 'os._exit(256)', 'exit(2 ** 40)']


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize('code', ZEROS)
@pytest.mark.parametrize('ranks, condition', [
    (0, 'True'), (1, 'True'), (2, 'RANK == 1'), (2, 'True')],
    ids=['without mpiexec', 'one rank', 'one of two', 'both'])
def test_a_nonzero_status_stays_nonzero_in_8_bits(tmp_path, code, ranks, condition):
    status, output = run(tmp_path, f'''
        comm = chainermn.create_communicator('naive')
        if {condition}:
            {code}
        comm.barrier()
        print('went on', flush=True)
        ''', ranks)
    assert status == 1
    assert 'went on' not in output
    said = re.findall(
        r'aborts the job: (?:sys.exit|os._exit) with status (.*?)(?:, called.*)?\n', output)
    assert len(said) == (ranks > 1) and set(said) <= {'256', '-512', str(2 ** 40)}


# Hooks that are installed after chainermn, and the output they print.
HOOKS = {
    'replaced': ("sys.excepthook = lambda *args: print('mine:', args[1])", ['mine: luck']),
    'calls the one before': ('''
        before = sys.excepthook
        def hook(*args):
            print('mine:', args[1], flush=True)
            before(*args)
        sys.excepthook = hook
        ''', ['mine: luck', 'ValueError: luck']),
    'rich': ('''
        import rich.traceback
        rich.traceback.install()
        ''', ['╭', 'ValueError: luck']),
    'fails': ('sys.excepthook = lambda: None', ['ValueError: luck']),
    'removed': ('del sys.excepthook', ['ValueError: luck']),
}


@pytest.mark.slow
@pytest.mark.sample(3)
@pytest.mark.parametrize('install, shown', HOOKS.values(), ids=HOOKS.keys())
def test_an_excepthook_installed_later_is_called_too(tmp_path, install, shown, begin):
    if 'rich' in install:
        pytest.importorskip('rich')
    body = begin + textwrap.dedent(install) + '''
if RANK == 1:
    raise ValueError('luck')
threading.Event().wait()
'''
    status, output = run(tmp_path, body)
    assert status != 0
    assert output.count('chainermn: rank 1 of 2 (') == output.count('aborts the job') == 1
    assert 'aborts the job: uncaught ValueError' in output
    for text in shown:
        assert text in output
    assert ('Error in the exception hook of the script' in output) == (install == HOOKS['fails'][0])


THREAD_HOOK = "threading.excepthook = lambda args: print('mine:', args.exc_value, flush=True)"


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize('when', ['before it is made', 'while it runs'])
def test_a_threading_excepthook_installed_later_is_called_too(tmp_path, when):
    first, second = ('', THREAD_HOOK) if when == 'while it runs' else (THREAD_HOOK, '')
    status, output = run(tmp_path, f'''
chainermn.create_communicator('naive')
go = threading.Event()
def load():
    go.wait()
    raise ValueError('luck')
{first}
if RANK == 1:
    threading.Thread(target=load, name='loader').start()
{second}
go.set()
threading.Event().wait()
''')
    assert status != 0
    assert output.count('chainermn: rank 1 of 2 (') == output.count('aborts the job') == 1
    assert 'aborts the job: uncaught ValueError in thread loader' in output
    assert 'mine: luck' in output
    assert 'Exception in thread loader' not in output


@pytest.mark.slow
def test_an_error_in_a_thread_started_before_the_import_aborts_the_job(tmp_path):
    status, output = run(tmp_path, '''
        chainermn.create_communicator('naive')
        if RANK == 1:
            go.set()
        threading.Event().wait()
        ''', before='''
import threading
go = threading.Event()
def load():
    go.wait()
    raise ValueError('luck')
threading.Thread(target=load, name='loader').start()
''')
    assert status != 0
    assert 'aborts the job: uncaught ValueError in thread loader' in output


NO_STDERR = {
    **{name: FAILURES[name]
       for name in ('exception', 'thread', 'sys.exit with status', 'os._exit', 'atexit')},
    'hook': ('''
        sys.excepthook = lambda *args: sys.stderr.write('mine')
        raise ValueError('no such luck')
        ''', 'uncaught ValueError', 'ValueError: no such luck'),
    'hang': ('threading.Event().wait()', 'no progress for', 'in barrier'),
}


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize('remove', ['sys.stderr = None', 'sys.stderr.close()'])
@pytest.mark.parametrize('code, why, text', NO_STDERR.values(), ids=NO_STDERR.keys())
def test_failures_are_reported_without_sys_stderr(tmp_path, remove, code, why, text):
    status, output = run(tmp_path, f'''
comm = chainermn.create_communicator('naive')
{remove}
if RANK == 1:
{textwrap.indent(textwrap.dedent(code), "    ")}
comm.barrier()
''', CHAINERMN_TIMEOUT='2' if why == 'no progress for' else '0')
    assert status != 0
    assert output.count('aborts the job') == 1
    assert re.search(rf'chainermn: rank \d of 2 \(.*\) aborts the job: {re.escape(why)}', output)
    assert text in output


HARMLESS = '''
import subprocess
if RANK == 1:
    sys.excepthook(ValueError, ValueError('was caught and is shown'), None)

    assert SystemExit(256).code == 256 and SystemExit(1, 2).code == (1, 2)
    error = SystemExit()
    assert error.code is None
    error.code = 256
    assert error.code == 256
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


@pytest.mark.slow
def test_other_exits_do_not_abort_the_job(tmp_path, begin):
    status, output = run(tmp_path, begin + HARMLESS + WAIT + 'sys.exit(0)\n')
    assert 'aborts the job' not in output
    assert 'ValueError: in a worker' in output
    assert 'ValueError: was caught and is shown' in output
    assert output.count('went on') == 2
    assert status == 0


@pytest.mark.sample(1)
@pytest.mark.parametrize('ranks', [1, 0], ids=['one rank', 'without mpiexec'])
def test_a_single_process_fails_like_any_program(tmp_path, ranks):
    status, output = run(tmp_path, '''
        chainermn.create_communicator('naive')
        raise ValueError('no such luck')
        ''', ranks)
    assert status == 1
    assert 'chainermn:' not in output and 'Abort' not in output
    assert output.rstrip().endswith('ValueError: no such luck')


@pytest.mark.slow
def test_a_single_process_keeps_its_exit_status(tmp_path):
    assert run(tmp_path, 'sys.exit(7)', 0) == (7, '')
    assert run(tmp_path, "sys.exit('why')", 0) == (1, 'why\n')
    assert run(tmp_path, 'sys.exit()', 0) == (0, '')
    assert run(tmp_path, 'sys.exit((1, 2))', 0) == (1, '(1, 2)\n')


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize('how', ['call', *VARIABLES])
def test_a_single_process_aborts_if_forced(tmp_path, how):
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
    assert output.endswith('ValueError: no such luck\n')  # not by a message of MPI


@pytest.mark.slow
@pytest.mark.parametrize('variable', VARIABLES)
def test_an_environment_variable_disables_it(tmp_path, variable):
    status, output = run(tmp_path, '''
        assert sys.excepthook is sys.__excepthook__
        assert threading.excepthook is threading.__excepthook__
        assert type(sys.exit).__name__ == 'builtin_function_or_method'
        ''', 0, **{variable: '0'})
    assert (status, output) == (0, '')


@pytest.mark.slow
def test_a_second_add_hook_only_warns(tmp_path):
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
