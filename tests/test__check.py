"""python -m chainermn check: the report is correct for any number of ranks, and never hangs."""

import dataclasses
import json
import math
import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from mpi4py import MPI
from time_limits import seconds

import chainermn
from chainermn._check import _smoke_tests, _system_info
from chainermn._check._report import Report, print_report
from chainermn._check._time_limit import TimeLimit

alone = pytest.mark.skipif(MPI.COMM_WORLD.size > 1, reason='starts processes of its own')
comm_world = MPI.COMM_WORLD


def test_every_communicator_is_tested():
    with TimeLimit(50) as limit:
        results = {result.name: result for result in _smoke_tests.run_all(limit)}
    assert list(results) == ['naive', 'flat', 'pure_nccl', 'non_cuda_aware', 'dummy']
    for name in ('naive', 'flat', 'dummy'):
        assert results[name].passed, results[name].error
        assert (results[name].latency is None) == (comm_world.size == 1)
        assert (results[name].bandwidth is None) == (comm_world.size == 1 or name == 'dummy')
    assert len({comm_world.bcast(repr(results)), repr(results)}) == 1
    if not results['pure_nccl'].passed:
        error = results['pure_nccl'].error
        assert error.startswith('NCCL is not available: ') and 'on all ranks' not in error


def test_system_info():
    info = _system_info.collect()
    software = {name: line.value for name, line in info.software.items()}
    assert software['Python'] == f'{sys.version.split()[0]} in {sys.executable}'
    assert software['ChainerMN'] == (
        f'{chainermn.__version__} in {os.path.dirname(os.path.abspath(chainermn.__file__))}')
    assert software['Chainer'] == '7.8.1, patched'
    assert software['NumPy'] == np.__version__
    assert software['MPI'].endswith(_system_info.library())
    assert os.path.basename(_system_info.library()).startswith('libmpi')
    assert info.host == os.uname().nodename
    assert info.cores == len(os.sched_getaffinity(0))
    assert [line.problem for line in info.software.values() if line.problem] == []


def test_report_shows_ranks_that_differ(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, 'rich', None)
    monkeypatch.setitem(sys.modules, 'rich.console', None)
    info = _system_info.collect()
    software = info.software | {'NumPy': _system_info.Info('0.1')}
    other = info._replace(software=software, host='elsewhere', devices=['A', 'A', 'B'])
    report = Report.from_ranks([info, info, other, info])
    assert report.software['NumPy'] == {'0-1, 3': np.__version__, '2': '0.1'}
    assert [(host['host'], host['ranks']) for host in report.hosts] == [
        (os.uname().nodename, '0-1, 3'), ('elsewhere', '2')]
    assert report.hints == ['NumPy differs between ranks; install the same version on every node']
    report.problems.append('something else')
    print_report(report)
    lines = capsys.readouterr().out.splitlines()
    assert f'  NumPy           {np.__version__}  (ranks 0-1, 3)' in lines
    assert f'{" " * 18}0.1  (ranks 2)' in lines
    assert next(line for line in lines if 'elsewhere' in line).endswith('2 x A, 1 x B')
    assert lines[-3:] == ['Problems', '  something else', '']
    assert all(line == line.rstrip() for line in lines)


def test_output_with_rich(capsys):
    pytest.importorskip('rich', reason='needs rich')
    report = Report.from_ranks([_system_info.collect()])
    print_report(report)
    out = capsys.readouterr().out
    for name in report.software:
        assert f'\n  {name} ' in out
    assert 'All required checks passed' in out


def test_svg_output(tmp_path, capsys, monkeypatch):
    pytest.importorskip('rich', reason='needs rich')
    report = Report.from_ranks([_system_info.collect()])
    print_report(report, str(tmp_path / 'check.svg'))
    assert 'Software' in (tmp_path / 'check.svg').read_text()
    monkeypatch.setitem(sys.modules, 'rich.console', None)
    print_report(report, 'other.svg')
    assert 'other.svg was not written, as --svg needs rich' in capsys.readouterr().err


def check(*args, ranks=0, code=None, timeout=50, **env):
    """Run the command after ``code``; return exit status, stdout and stderr."""
    command = [sys.executable, '-m', 'chainermn', 'check', *args]
    if code is not None:
        main = ('import sys\nfrom chainermn.__main__ import main\n'
                f'sys.exit(main(["check", *{args}]))')
        command[1:] = ['-c', textwrap.dedent(code) + main]
    if ranks:
        command = ['mpiexec', '-n', str(ranks), *command]
    clean = {name: value for name, value in os.environ.items()
             if not name.startswith(('PMI', 'MPI_'))}
    done = subprocess.run(command, env=clean | env, timeout=seconds(timeout), text=True,
                          capture_output=True)
    return done.returncode, done.stdout, done.stderr


@alone
@pytest.mark.parametrize('ranks', [0, 1, 2, 3, pytest.param(4, marks=pytest.mark.full)])
def test_json_output(ranks):
    status, out, err = check('--json', ranks=ranks)
    assert (status, err) == (0, '')
    report = json.loads(out)
    assert set(report) == {field.name for field in dataclasses.fields(Report)}
    (host,) = report['hosts']
    assert host['ranks'] == ('0' if ranks < 2 else f'0-{ranks - 1}')
    assert report['problems'] == []
    assert any('mpiexec -n 4 python -m chainermn check' in hint
               for hint in report['hints']) == (ranks < 2)


@alone
def test_text_output():
    status, out, err = check(ranks=2)
    assert (status, err) == (0, '')
    assert out.startswith('Software\n') and out.count('Software') == 1
    assert out.rstrip().endswith('All required checks passed')


@alone
def test_communicator_that_fails_on_one_rank():
    status, out, err = check(ranks=3, code='''
        import chainermn
        from chainermn.communicators.flat_communicator import FlatCommunicator

        @classmethod
        def check_requirements(cls):
            from mpi4py import MPI
            if MPI.COMM_WORLD.rank == 1:
                raise RuntimeError('no memory to share')

        FlatCommunicator.check_requirements = check_requirements
        ''')
    assert status != 0
    assert 'aborts the job' not in err and 'Traceback' not in err
    problems = out.partition('Problems')[2]
    assert "the communicator 'flat' failed" in ' '.join(problems.split())
    assert 'RuntimeError: no memory to share' in ' '.join(problems.split())
    assert 'All required checks passed' not in out


@alone
def test_wrong_result():
    status, out, _ = check('--json', code='''
        from chainermn.communicators.naive_communicator import NaiveCommunicator

        NaiveCommunicator.multi_node_mean_grad = lambda self, model: model.w.grad.fill(7)
        ''', ranks=2)
    assert status != 0
    assert json.loads(out)['problems'] == [
        "the communicator 'naive' failed: rank 0: wrong mean of gradients; "
        'rank 1: wrong mean of gradients']


@alone
def test_hang_is_reported():
    limit = math.ceil(seconds(3))
    status, out, err = check('--limit', str(limit), ranks=2, code='''
        import time
        from chainermn.communicators.flat_communicator import FlatCommunicator

        before = FlatCommunicator.allreduce

        def allreduce(self, x):
            while self.rank == 1:
                time.sleep(1)
            return before(self, x)

        FlatCommunicator.allreduce = allreduce
        ''')
    assert status != 0 and 'Software' not in out
    assert f"timed out after {limit} s while testing the communicator 'flat'" in err
    assert 'in allreduce' in err  # the stack


@alone
def test_mpiexec_of_another_library():
    status, out, _ = check('--json', OMPI_COMM_WORLD_SIZE='2', OMPI_COMM_WORLD_RANK='0')
    assert status == 1
    (problem,) = json.loads(out)['problems']
    assert 'mpiexec started 2 processes, but each one is rank 0 of 1' in problem
    status, out, _ = check('--json', OMPI_COMM_WORLD_SIZE='2', OMPI_COMM_WORLD_RANK='1')
    assert (status, out) == (1, '')


@alone
def test_without_an_mpi_library(tmp_path):
    status, out, _ = check(code='''
        import sys
        sys.modules['mpi4py.MPI'] = None
        ''')
    assert status == 1
    assert 'mpi4py cannot load an MPI library. Install one: ' in ' '.join(out.split())
    assert '-m pip install mpich' in out


@alone
def test_another_chainermn_elsewhere(tmp_path):
    (tmp_path / 'chainermn').mkdir()
    (tmp_path / 'chainermn' / '__init__.py').write_text('')
    status, out, _ = check('--json', code=f'''
        import chainermn, sys
        sys.path.insert(0, {str(tmp_path)!r})
        ''')
    assert status == 1
    (problem,) = json.loads(out)['problems']
    assert f'other directories import a different chainermn ({tmp_path}/chainermn)' in problem


@alone
def test_same_chainermn_elsewhere(tmp_path):
    """As in a clone, after "pip install ."."""
    (tmp_path / 'chainermn').mkdir()
    for name in '__init__.py', '_version.py':
        (tmp_path / 'chainermn' / name).write_text(f'__version__ = {chainermn.__version__!r}')
    status, out, _ = check('--json', code=f'''
        import chainermn, sys
        sys.path.insert(0, {str(tmp_path)!r})
        ''')
    assert status == 0
    assert any(f'elsewhere import the installed one, {tmp_path}/chainermn' in hint
               for hint in json.loads(out)['hints'])
