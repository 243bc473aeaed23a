"""python -m chainermn check: what it finds is true, on each number of ranks, and it never hangs."""

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
from chainermn._check import _facts, _trials
from chainermn._check._limit import Limit
from chainermn._check._report import Report, print_report

alone = pytest.mark.skipif(MPI.COMM_WORLD.size > 1, reason='starts processes of its own')
comm_world = MPI.COMM_WORLD


def test_each_communicator_is_tried():
    with Limit(50) as limit:
        trials = {trial.name: trial for trial in _trials.all_communicators(limit)}
    assert list(trials) == ['naive', 'flat', 'pure_nccl', 'non_cuda_aware', 'dummy']
    for name in ('naive', 'flat', 'dummy'):
        assert trials[name].works, trials[name].said
        assert (trials[name].latency is None) == (comm_world.size == 1)
        assert (trials[name].bandwidth is None) == (comm_world.size == 1 or name == 'dummy')
    assert len({comm_world.bcast(repr(trials)), repr(trials)}) == 1
    if not trials['pure_nccl'].works:
        assert trials['pure_nccl'].said.startswith('NCCL is not available: ')


def test_what_is_found():
    found = _facts.find()
    facts = {name: fact.value for name, fact in found.facts.items()}
    assert facts['Python'] == f'{sys.version.split()[0]} in {sys.executable}'
    assert facts['ChainerMN'] == (
        f'{chainermn.__version__} in {os.path.dirname(os.path.abspath(chainermn.__file__))}')
    assert facts['Chainer'] == "7.8.1, mended for today's Python"
    assert facts['NumPy'] == np.__version__
    assert facts['MPI'].endswith(_facts.library())
    assert os.path.basename(_facts.library()).startswith('libmpi')
    assert found.host == os.uname().nodename
    assert found.cores == len(os.sched_getaffinity(0))
    assert [fact.problem for fact in found.facts.values() if fact.problem] == []


def test_a_report_says_which_ranks_differ(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, 'rich', None)
    monkeypatch.setitem(sys.modules, 'rich.console', None)
    found = _facts.find()
    facts = found.facts | {'NumPy': _facts.Fact('0.1')}
    other = found._replace(facts=facts, host='elsewhere', devices=['A', 'A', 'B'])
    report = Report.of([found, found, other, found])
    assert report.software['NumPy'] == {'0-1, 3': np.__version__, '2': '0.1'}
    assert [(host['host'], host['ranks']) for host in report.hosts] == [
        (os.uname().nodename, '0-1, 3'), ('elsewhere', '2')]
    assert report.hints == ['NumPy is not the same on all ranks; install the same everywhere']
    report.problems.append('something else')
    print_report(report)
    lines = capsys.readouterr().out.splitlines()
    assert f'  NumPy           {np.__version__}  (ranks 0-1, 3)' in lines
    assert f'{" " * 18}0.1  (ranks 2)' in lines
    assert next(line for line in lines if 'elsewhere' in line).endswith('2 x A, 1 x B')
    assert lines[-3:] == ['To be mended', '  something else', '']
    assert all(line == line.rstrip() for line in lines)


def test_with_rich_it_says_the_same(capsys):
    pytest.importorskip('rich', reason='needs rich')
    report = Report.of([_facts.find()])
    print_report(report)
    out = capsys.readouterr().out
    for name in report.software:
        assert f'\n  {name} ' in out
    assert 'All that is needed works.' in out


def test_it_can_be_drawn(tmp_path, capsys, monkeypatch):
    pytest.importorskip('rich', reason='needs rich')
    report = Report.of([_facts.find()])
    print_report(report, str(tmp_path / 'check.svg'))
    assert 'Software' in (tmp_path / 'check.svg').read_text()
    monkeypatch.setitem(sys.modules, 'rich.console', None)
    print_report(report, 'other.svg')
    assert 'other.svg is not there: that needs rich' in capsys.readouterr().err


def check(*args, ranks=0, code=None, timeout=50, **env):
    """Runs the command on some ranks, after some code; gives exit status, stdout and stderr."""
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
def test_json_on_some_ranks(ranks):
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
def test_for_people():
    status, out, err = check(ranks=2)
    assert (status, err) == (0, '')
    assert out.startswith('Software\n') and out.count('Software') == 1
    assert out.rstrip().endswith('All that is needed works.')


@alone
def test_a_communicator_that_fails_on_one_rank_is_shown_and_the_exit_status_says_so():
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
    assert 'ends the job' not in err and 'Traceback' not in err
    mended = out.partition('To be mended')[2]
    assert "the communicator 'flat' does not work" in ' '.join(mended.split())
    assert 'RuntimeError: no memory to share' in ' '.join(mended.split())
    assert 'All that is needed works.' not in out


@alone
def test_a_wrong_value_is_found():
    status, out, _ = check('--json', code='''
        from chainermn.communicators.naive_communicator import NaiveCommunicator

        NaiveCommunicator.multi_node_mean_grad = lambda self, model: model.w.grad.fill(7)
        ''', ranks=2)
    assert status != 0
    assert json.loads(out)['problems'] == [
        "the communicator 'naive' does not work: rank 0: the mean of gradients is wrong; "
        'rank 1: the mean of gradients is wrong']


@alone
def test_what_hangs_is_named():
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
    assert f"has not got on for {limit} s while trying the communicator 'flat'" in err
    assert 'in allreduce' in err  # the stack


@alone
def test_an_mpiexec_of_another_library_is_found():
    status, out, _ = check('--json', OMPI_COMM_WORLD_SIZE='2', OMPI_COMM_WORLD_RANK='0')
    assert status == 1
    assert 'mpiexec has started 2 processes, but each is alone' in json.loads(out)['problems'][0]
    status, out, _ = check('--json', OMPI_COMM_WORLD_SIZE='2', OMPI_COMM_WORLD_RANK='1')
    assert (status, out) == (1, '')


@alone
def test_without_an_mpi_library(tmp_path):
    status, out, _ = check(code='''
        import sys
        sys.modules['mpi4py.MPI'] = None
        ''')
    assert status == 1
    assert 'there is no MPI library that mpi4py can use. Install one: ' in ' '.join(out.split())
    assert '-m pip install mpich' in out


@alone
def test_another_chainermn_elsewhere_is_found(tmp_path):
    (tmp_path / 'chainermn').mkdir()
    (tmp_path / 'chainermn' / '__init__.py').write_text('')
    status, out, _ = check('--json', code=f'''
        import chainermn, sys
        sys.path.insert(0, {str(tmp_path)!r})
        ''')
    assert status == 1
    (problem,) = json.loads(out)['problems']
    assert f'scripts in other folders import another chainermn ({tmp_path}/chainermn)' in problem


@alone
def test_the_same_chainermn_elsewhere_is_no_problem(tmp_path):
    """As in a clone, after "pip install ."."""
    (tmp_path / 'chainermn').mkdir()
    for name in '__init__.py', '_version.py':
        (tmp_path / 'chainermn' / name).write_text(f'__version__ = {chainermn.__version__!r}')
    status, out, _ = check('--json', code=f'''
        import chainermn, sys
        sys.path.insert(0, {str(tmp_path)!r})
        ''')
    assert status == 0
    assert any(f'elsewhere import the one that is installed, {tmp_path}/chainermn' in hint
               for hint in json.loads(out)['hints'])
