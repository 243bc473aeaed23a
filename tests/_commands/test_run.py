"""chainermn run: a failed job is restarted, and no process is left behind."""

import itertools
import os
import pathlib
import re
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from jobs import processes
from mpi4py import MPI
from time_limits import seconds, wait_until

from chainermn._commands import run as run_command

pytestmark = pytest.mark.mpi_skip

COMMAND = [sys.executable, '-m', 'chainermn', 'run']
HOST = os.uname().nodename


@pytest.fixture
def env(tmp_path, monkeypatch):
    """Environment of the command; its temporary folder must be empty after the test."""
    folder = tmp_path / 'temporary'
    folder.mkdir()
    yield os.environ | {'TMPDIR': str(folder)}
    assert list(folder.iterdir()) == []


def write(tmp_path, code):
    (tmp_path / 'script.py').write_text(textwrap.dedent(code))


def run(tmp_path, env, *args, timeout=50):
    return subprocess.run([*COMMAND, *args], cwd=tmp_path, env=env, text=True, capture_output=True,
                          timeout=seconds(timeout))


def left(tmp_path):
    """Processes whose working directory is the folder."""
    return processes(lambda folder: (folder / 'cwd').readlink() == tmp_path)


def table(err):
    """Parse the final report; returns its lines without times."""
    *_, lines = err.rpartition('chainermn run: ')
    first, head, *rest = lines.splitlines()
    assert head.split() == ['attempt', 'started', 'duration', 'result']
    rest = [re.sub(r' \d{4}-\d\d-\d\d \d\d:\d\d:\d\d  \d:\d\d:\d\d ', '', line) for line in rest]
    return first, [re.sub(r'process \d+', 'process P', line).split(maxsplit=1) for line in rest]


def test_successful_job_runs_once_without_extra_output(tmp_path, env):
    write(tmp_path, '''
        import os, sys, chainermn
        comm = chainermn.create_communicator('naive')
        words = [str(comm.size), os.environ['OMP_NUM_THREADS'], *sys.argv[1:]]
        sys.stdout.write(' '.join(words) + '\\n')
        sys.stderr.write('warns\\n')
        ''')
    args = '-n', '2', '--max-restarts', '1', '--', 'script.py', '-n', '5', '--help', '--', 'a b'
    env.pop('OMP_NUM_THREADS', None)
    done = run(tmp_path, env, *args)
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert done.stdout == f'2 {threads} -n 5 --help -- a b\n' * 2
    assert (done.stderr, done.returncode) == ('warns\n' * 2, 0)


TRAIN = '''
    import sys, chainer, chainermn, numpy as np
    comm = chainermn.create_communicator('flat')
    np.random.seed(comm.rank)
    model = chainer.links.Linear(3, 2, initialW=1)
    optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.Adam(), comm).setup(model)
    data = chainer.iterators.SerialIterator([np.full(3, i, 'f') for i in range(10)], 2)
    updater = chainer.training.updaters.StandardUpdater(
        data, optimizer, loss_func=lambda x: chainer.functions.sum(model(x) ** 2))
    trainer = chainer.training.Trainer(updater, (12, 'iteration'), out=sys.argv[1])
    checkpointer = chainermn.create_multi_node_checkpointer('run', comm)
    trainer.extend(checkpointer, trigger=(2, 'iteration'))
    checkpointer.maybe_load(trainer, optimizer)
    if comm.rank == 0:
        print('from', updater.iteration, flush=True)
    began = updater.iteration

    def fail(trainer):
        if sys.argv[2:] and comm.rank == 1 and updater.iteration == began + 5:
            raise OSError('the disk is on fire')

    trainer.extend(fail, trigger=(1, 'iteration'), priority=-1000)
    trainer.run()
    if comm.rank == 0:
        np.save(f'{sys.argv[1]}.npy', model.W.array)
    '''


@pytest.mark.slow
def test_failed_job_resumes_from_last_checkpoint(tmp_path, env):
    write(tmp_path, TRAIN)
    assert run(tmp_path, env, '-n', '2', 'script.py', 'whole').stdout == 'from 0\n'
    done = run(tmp_path, env, '-n', '2', '--startup', '0', 'script.py', 'pieces', 'fail')
    assert done.returncode == 0, done.stderr
    starts = [int(line.split()[1]) for line in done.stdout.splitlines()]
    # A checkpoint in flight at the time of the failure may or may not be complete.
    assert starts[0] == 0 and all(n + 2 <= m <= n + 4 for n, m in itertools.pairwise(starts))
    first, rows = table(done.stderr)
    assert first == f'job succeeded after {len(starts) - 1} restarts'
    assert rows[0] == ['1', 'exit status 1'] and rows[-1] == [str(len(starts)), 'succeeded']
    assert re.search(rf'\(host {HOST}, process P\) aborts the job: uncaught OSError: the disk is '
                     r'on fire, at \w+\.py:\d+ \(traceback above\)$', ' '.join(rows[1]))
    assert (tmp_path / 'whole.npy').read_bytes() == (tmp_path / 'pieces.npy').read_bytes()


FAIL = '''
    import os, signal, sys, chainermn
    comm = chainermn.create_communicator('naive')
    print('began', flush=True) if comm.rank == 0 else None
    if comm.rank == 1:
        sys.exit(3)
    comm.barrier()
    '''


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize('options, attempts, why', [
    (['--max-restarts', '2', '--startup', '0'], 3,
     'job failed after 2 restarts: the limit is --max-restarts 2'),
    (['--max-restarts', '0'], 1, 'job failed: the limit is --max-restarts 0'),
    (['--startup', '500'], 2, 'job failed: two consecutive attempts failed within 500 seconds '
                              '(--startup)'),
], ids=['always', 'never', 'twice'])
def test_job_that_always_fails(tmp_path, env, options, attempts, why):
    write(tmp_path, FAIL)
    done = run(tmp_path, env, '-n', '2', *options, 'script.py')
    assert done.returncode == 3
    assert done.stdout == 'began\n' * attempts
    first, rows = table(done.stderr)
    assert first == why
    assert [row[0] for row in rows if row[0].isdigit()] == [str(i + 1) for i in range(attempts)]
    rank = (f'rank 1 of 2 (host {HOST}, process P) aborts the job: sys.exit with status 3, '
            'called at script.py:6')
    assert [' '.join(row) for row in rows].count(rank) == attempts
    assert done.stderr.count('; restarting') == attempts - 1


@pytest.mark.slow
def test_orphans_of_a_killed_rank_are_killed_before_the_restart(tmp_path, env):
    write(tmp_path, '''
        import os, pathlib, subprocess, sys, chainermn
        comm = chainermn.create_communicator('naive')
        pid = pathlib.Path('pid')
        if comm.rank == 1 and not pid.exists():
            loader = subprocess.Popen(['sleep', '1000'], start_new_session=True,
                                      stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            pid.write_text(str(loader.pid))
            os.kill(os.getpid(), 9)
        comm.barrier()
        sys.stdout.write(f'{os.path.exists("/proc/" + pid.read_text())}\\n')
        ''')
    done = run(tmp_path, env, '-n', '2', 'script.py')
    assert (done.stdout.splitlines()[-2:], done.returncode) == (['False'] * 2, 0)
    assert 'failed: killed by SIGKILL' in ' '.join(table(done.stderr)[1][1])
    assert left(tmp_path) == []


WAIT = '''
    import os, signal, sys, time, chainermn
    comm = chainermn.create_communicator('naive')
    if sys.argv[1:]:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
    comm.barrier()
    if comm.rank == 0:
        print('all wait', flush=True)
    time.sleep(1000)
    '''


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize('sent, args', [
    (signal.SIGINT, []), (signal.SIGTERM, []), (signal.SIGHUP, []), (signal.SIGKILL, []),
    (signal.SIGINT, ['ignore']), (signal.SIGKILL, ['ignore'])])
@pytest.mark.usefixtures('default_signals')
def test_the_job_ends_with_the_command(tmp_path, env, sent, args):
    write(tmp_path, WAIT)
    grace = ['--grace', '1'] if args else []
    with subprocess.Popen([*COMMAND, '-n', '2', *grace, 'script.py', *args], cwd=tmp_path, env=env,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == 'all wait\n'
        assert len(left(tmp_path)) >= 4  # this command, mpiexec, and the ranks
        process.send_signal(sent)
        out, err = process.communicate(timeout=seconds(30))
    assert process.returncode == -sent
    if sent != signal.SIGKILL:
        assert left(tmp_path) == []
        killed = 'chainermn run: the job did not exit within 1 seconds (--grace) and was killed\n'
        assert (out, err) == (
            '', killed * bool(args) + f'chainermn run: job terminated by {sent.name}\n')
    wait_until(lambda: left(tmp_path) == [])
    wait_until(lambda: list(pathlib.Path(env['TMPDIR']).iterdir()) == [])


@pytest.mark.slow
@pytest.mark.usefixtures('default_signals')
def test_sigusr1_is_forwarded_and_a_second_interrupt_kills(tmp_path, env):
    write(tmp_path, """
        import signal, sys, time, chainermn
        signal.signal(signal.SIGUSR1, lambda *_: sys.stdout.write('saves\\n'))
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: sys.stdout.write('goes on\\n'))
        comm = chainermn.create_communicator('naive')
        sys.stdout.write('ready\\n')
        while True:
            time.sleep(.1)
            sys.stdout.flush()
        """)
    with subprocess.Popen([*COMMAND, '-n', '2', '--grace', 'inf', 'script.py'], cwd=tmp_path,
                          env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          ) as process:

        def both_say(word):
            lines = (line for line in process.stdout if not line.startswith('[mpiexec@'))
            assert [next(lines), next(lines)] == [f'{word}\n'] * 2

        both_say('ready')
        process.send_signal(signal.SIGUSR1)
        both_say('saves')
        process.send_signal(signal.SIGUSR2)
        message = process.stderr.readline()
        if 'Open MPI' not in MPI.Get_library_version():
            assert message == ('chainermn run: SIGUSR2 was ignored, because this mpiexec does '
                               'not forward it to the ranks; use SIGUSR1 instead\n')
        process.send_signal(signal.SIGINT)
        both_say('goes on')
        while process.poll() is None:  # the first ones may belong to the same Ctrl-C
            process.send_signal(signal.SIGINT)
            time.sleep(.05)
        assert process.stderr.read() == 'chainermn run: job terminated by SIGINT\n'
    assert process.returncode == -signal.SIGINT
    wait_until(lambda: left(tmp_path) == [])


def terminated(tmp_path, env, code, *options):
    """Send SIGTERM to a job of two ranks that has printed a line; return its other output."""
    write(tmp_path, code)
    with subprocess.Popen([*COMMAND, '-n', '2', *options, 'script.py'], cwd=tmp_path, env=env,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        return process.communicate(timeout=seconds(30))


SAVES = """
    import signal, sys, time, chainermn
    comm = chainermn.create_communicator('naive')
    received = []
    signal.signal(signal.SIGTERM, lambda *_: received.append(1))
    print('began\\n' * (comm.rank == 0), end='', flush=True)
    while not comm.allreduce_obj(len(received), 'max'):
        time.sleep(.01)
    if comm.rank == 0:
        print('saving\\n\\n===\\n  saved', flush=True)
"""


@pytest.mark.usefixtures('default_signals')
@pytest.mark.parametrize('options', [(), ('--label',)])
def test_an_orderly_end_is_one_line(tmp_path, env, options):
    """The output of the script is complete, and its status does not matter."""
    out, err = terminated(tmp_path, env, SAVES + '    sys.exit(143)', *options)
    label = '[0] ' if options else ''
    assert out == f'{label}saving\n{label}\n{label}===\n{label}  saved\n'
    assert err == 'chainermn run: job terminated by SIGTERM\n'


@pytest.mark.usefixtures('default_signals')
def test_a_failure_after_the_signal_is_reported(tmp_path, env):
    _, err = terminated(tmp_path, env, SAVES + "    open('missing') if comm.rank == 1 else "
                                               'comm.barrier()')
    assert 'aborts the job: uncaught FileNotFoundError' in err and "open('missing')" in err
    first, rows = table(err)
    assert first == 'job terminated by SIGTERM' and rows[0] == ['1', 'terminated by SIGTERM']
    assert 'FileNotFoundError' in ' '.join(rows[1])


def test_a_rank_that_is_terminated_has_failed(tmp_path, env):
    """The signal was not sent to the command."""
    write(tmp_path, """
        import os, signal, chainermn
        comm = chainermn.create_communicator('naive')
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        comm.barrier()
        """)
    done = run(tmp_path, env, '-n', '2', '--max-restarts', '0', 'script.py')
    assert 'failed: killed by SIGTERM' in done.stderr and 'Stack (most' in done.stderr
    assert 'failed: killed by SIGTERM' in ' '.join(table(done.stderr)[1][1])


@pytest.mark.usefixtures('default_signals')
def test_a_stopped_terminal_does_not_delay_the_signal(tmp_path, env):
    write(tmp_path, """
        import chainermn
        comm = chainermn.create_communicator('naive')
        while True:
            print('x' * 1000, flush=True)
        """)
    with subprocess.Popen([*COMMAND, '-n', '2', '--grace', '1', 'script.py'], cwd=tmp_path, env=env,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.read(1)
        time.sleep(.5)  # nobody reads
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: left(tmp_path) == [])


PRINTS = """
    import os, subprocess, sys, time, chainermn
    comm = chainermn.create_communicator('naive')
    print('out', comm.rank)
    print('err', comm.rank, file=sys.stderr)
    for text in 'not complete', ' yet\\n', '50%\\r', '100%\\n':
        sys.stdout.write(text)
        sys.stdout.flush()
        time.sleep(.01)
    subprocess.run(['echo', 'child'])
    os.write(1, b'\\xff\\nno end')
    comm.barrier()
    if comm.rank == 1 and not os.path.exists('again'):
        open('again', 'w').close()
        sys.exit(3)
    """

#: What a rank prints.
PRINTED = 'out {0}\nnot complete yet\n50%\r100%\nchild\n\udcff\nno end\n'


def test_labels(tmp_path, env):
    (tmp_path / 'again').touch()
    write(tmp_path, PRINTS)
    done = subprocess.run([*COMMAND, '-n', '3', '--label', 'script.py'], cwd=tmp_path, env=env,
                          capture_output=True, timeout=seconds(50), check=True)
    out, err = (text.decode(errors='surrogateescape') for text in (done.stdout, done.stderr))
    for rank in range(3):
        label = f'[{rank}] '
        pieces = re.split('(?<=[\n\r])', out)
        assert ''.join(each.removeprefix(label) for each in pieces if each.startswith(label)) == (
            PRINTED.format(rank))
    assert sorted(err.splitlines()) == [f'[{rank}] err {rank}' for rank in range(3)]


def test_a_log_file_of_each_rank(tmp_path, env):
    """It has the output of all attempts, which is also printed."""
    write(tmp_path, PRINTS)
    done = subprocess.run(
        [*COMMAND, '-n', '2', '--log-dir', 'logs/new', '--startup', '0', 'script.py', '--log-dir'],
        cwd=tmp_path, env=env, capture_output=True, timeout=seconds(50), check=True)
    assert done.stdout.count(b'child') == 4 and b'] out' not in done.stdout
    assert sorted(path.name for path in (tmp_path / 'logs/new').iterdir()) == [
        'rank0.log', 'rank1.log']
    for rank in range(2):
        text = (tmp_path / f'logs/new/rank{rank}.log').read_bytes().decode(
            errors='surrogateescape')
        heads = re.findall(r'^--- attempt (\d), \d{4}-\d\d-\d\d [\d:]{8}, host (.+), process '
                           r'\d+ ---$', text, re.M)
        assert heads == [('1', HOST), ('2', HOST)]
        for part in text.split('--- attempt')[1:]:
            lines = re.sub('^chainermn: .*\n', '', part.partition('\n')[2], flags=re.M)
            assert lines.count(f'err {rank}\n') == 1
            assert lines.replace(f'err {rank}\n', '') == PRINTED.format(rank)
        assert text.endswith('no end\n')
    assert done.stderr.count(b'aborts the job: sys.exit with status 3') == 2  # and in the table
    assert text.count('aborts the job: sys.exit with status 3') == 1  # of rank 1
    assert b'cannot write' not in done.stderr


def test_a_log_file_that_cannot_be_written(tmp_path, env):
    """The job continues; one line per file says why."""
    write(tmp_path, """
        import os, time
        for _ in range(3):
            print('a' * 999, os.environ['PMI_RANK'], flush=True)
            time.sleep(.1)
        """)
    (tmp_path / 'logs').mkdir()
    (tmp_path / 'logs/rank0.log').symlink_to('/dev/full')
    done = subprocess.run(  # rank 1: up to 1024 bytes
        ['sh', '-c', 'ulimit -f 2; exec "$0" "$@"', *COMMAND, '-n', '2', '--log-dir', 'logs',
         'script.py'], cwd=tmp_path, env=env, text=True, capture_output=True, timeout=seconds(50))
    assert (done.returncode, done.stdout.count('a 0'), done.stdout.count('a 1')) == (0, 3, 3)
    assert sorted(done.stderr.splitlines()) == [
        f'chainermn run: cannot write {tmp_path}/logs/rank{rank}.log: {why}; its output continues '
        'on the terminal only'
        for rank, why in enumerate(['No space left on device', 'File too large'])]


def test_a_program_waits_for_its_own_children_only(tmp_path, env):
    write(tmp_path, """
        import os
        try:
            print(os.wait())
        except ChildProcessError:
            print('none', os.listdir('/proc/self/fd'))
        """)
    plain = run(tmp_path, env, '-n', '1', 'script.py').stdout
    done = run(tmp_path, env, '-n', '1', '--log-dir', 'logs', 'script.py')
    assert plain.startswith('none') and done.stdout == plain


def test_a_folder_of_logs_that_cannot_be_made(tmp_path, monkeypatch, usage_error):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, 'print("started")')
    assert 'Not a directory' in usage_error('run', '-n', 1, '--log-dir', 'script.py/logs',
                                            'script.py')


def test_a_killed_supervisor(tmp_path, env):
    write(tmp_path, """
        import os, pathlib, signal, time
        pid, words = os.getpid(), ''
        while 'supervisor.py' not in words:
            pid = int(pathlib.Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[1])
            words = pathlib.Path(f'/proc/{pid}/cmdline').read_text()
        os.kill(pid, signal.SIGKILL)
        time.sleep(1000)
        """)
    done = run(tmp_path, env, '-n', '1', '--max-restarts', '0', 'script.py')
    assert done.returncode == 137
    assert table(done.stderr)[1] == [['1', 'exit status 137']]
    wait_until(lambda: left(tmp_path) == [])


def test_options(tmp_path, env):
    (tmp_path / 'package').mkdir()
    (tmp_path / 'package' / 'module.py').write_text(
        'import os, sys\nprint(*sys.argv[1:], os.environ["COLOR"])\n')
    args = '-n', '1', '--mpiexec-args', '-env COLOR "dark red"', '-m', 'package.module', '-m', 'x'
    assert run(tmp_path, env, *args).stdout == '-m x dark red\n'


@pytest.mark.parametrize('name', ['package.module', 'calendar', 'zipimport'])
def test_modules_exist(tmp_path, monkeypatch, name):
    """A package is found without importing it; built-in modules also exist."""
    (tmp_path / 'package').mkdir()
    (tmp_path / 'package' / '__init__.py').write_text('1 / 0')
    monkeypatch.chdir(tmp_path)
    assert run_command._has_package(name)


@pytest.mark.parametrize('args, is_shown', [
    (['--label', '5'], True), (['--grace=5'], True), (['-n', '5'], False), (['--other'], False)])
def test_options_after_the_script(tmp_path, env, args, is_shown):
    write(tmp_path, 'import sys\nsys.exit(3)')
    done = run(tmp_path, env, '-n', '1', '--max-restarts', '0', 'script.py', *args)
    hint = (f'chainermn run: {args[0]} after script.py was passed to the script. Put options of '
            'chainermn run before script.py.\n')
    assert done.returncode == 3
    assert done.stderr.endswith(hint) if is_shown else 'Put options' not in done.stderr


@pytest.mark.parametrize('args, message', [
    (['script.py'], 'the following arguments are required: -n\n'),
    (['script.py', '-n', '2'], 'required: -n. Put it before SCRIPT: -n N script.py\n'),
    (['-n', '1', '--log-dir', 'script.py', 'script.py'],
     'argument --log-dir: cannot create the folder '),
    (['-n', '2'], 'the following arguments are required: SCRIPT\n'),
    (['-n', '0', 'script.py'], 'argument -n/-np: must be a positive integer, not 0'),
    (['-np', '1', 'none.py'], 'no such script: none.py'),
    (['-n', '1', '-m', 'nosuch'], 'no such module: nosuch\n'),
    (['-n', '1', '-m', 'nosuch.module'], 'no such module: nosuch.module\n'),
    (['-n', '1', '-m', 'script.py'], '-m takes a module name, not the file script.py. Omit -m'),
    *[(['-n', '1', f'{option}={value}', 'script.py'],
       f'argument {option}: must be a non-negative {kind}, not {value}')
      for option, value, kind in [
          ('--max-restarts', '-1', 'integer'), ('--max-restarts', '1.5', 'integer'),
          ('--host-timeout', 'nan', 'number of seconds'),
          ('--host-timeout', '-5', 'number of seconds'),
          ('--startup', '-1e9', 'number of seconds'),
          ('--grow-after', 'soon', 'number of seconds'),
          ('--grace', '-inf', 'number of seconds')]],
    (['-n', '1', 'none.py'], 'no such script: none.py'),
    (['-n', '1', 'python', 'a.py', '--b'], 'no such script: python. chainermn run starts Python '
                                           'itself; use -n 1 a.py --b'),
    (['-n', '1', '--mpiexec-args', '"', 'script.py'], 'No closing quotation'),
    (['-n', '1', '--metrics', 'x', 'script.py'], 'must be PORT'),
])
def test_wrong_options(tmp_path, monkeypatch, usage_error, args, message):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, 'print("started")')
    err = usage_error('run', *args)
    assert message in err
    assert err.startswith('usage: python -m chainermn run -n N [options] SCRIPT')


def test_without_mpiexec(tmp_path, monkeypatch, usage_error):
    write(tmp_path, 'print("started")')
    monkeypatch.setattr(sys, 'executable', 'elsewhere/python')
    monkeypatch.setenv('PATH', '')
    assert 'mpiexec not found in elsewhere or on PATH. Install MPI with' in usage_error(
        'run', '-n', 1, tmp_path / 'script.py')


def test_metrics(tmp_path, env):
    write(tmp_path, '''
        import os, re, sys, time
        if not os.path.exists('again'):
            open('again', 'w').close()
            sys.exit(3)
        text = ''
        while not re.search('attempts_total{.*} 2', text):
            time.sleep(.02)
            text = open('run.prom').read() if os.path.exists('run.prom') else ''
        print(text)
        ''')
    done = run(tmp_path, env, '-n', '1', '--metrics', 'run.prom', 'script.py')
    assert done.returncode == 0, done.stderr
    values = {name + more: float(value) for name, more, value in re.findall(
        f'^chainermn_run_(\\w+){{job="script.py",host="{HOST}"(.*)}} (\\S+)$', done.stdout, re.M)}
    assert 0 < values.pop('failed_attempt_seconds_total') < seconds(20)
    assert 0 <= values.pop('idle_seconds_total') < seconds(20)
    assert values == {'attempts_total': 2, 'restarts_total,reason="failure"': 1,
                      'restarts_total,reason="more_hosts"': 0, 'attempt_running': 1}
    wait_until(lambda: not (tmp_path / 'run.prom').exists())
