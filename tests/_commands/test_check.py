"""chainermn check: the report is correct for any number of ranks, and never hangs."""

import json
import math
import os
import subprocess
import sys
import textwrap

import chainer
import numpy as np
import pytest
from mpi4py import MPI
from time_limits import seconds

import chainermn
from chainermn._commands.check import shards, smoke_tests, system_info
from chainermn._commands.check.printing import print_report
from chainermn._commands.check.results import Finding, Report
from chainermn._commands.check.time_limit import TimeLimit

alone = pytest.mark.mpi_skip
comm_world = MPI.COMM_WORLD


def test_every_communicator_is_tested():
    with TimeLimit(50) as limit:
        results = {result.name: result for result in smoke_tests.run_all(limit)}
    assert list(results) == ['naive', 'flat', 'pure_nccl', 'non_cuda_aware', 'dummy']
    for name in ('naive', 'flat', 'dummy'):
        assert results[name].passed, results[name].error
        assert (results[name].latency is None) == (comm_world.size == 1)
        assert (results[name].bandwidth is None) == (comm_world.size == 1 or name == 'dummy')
    assert len({comm_world.bcast(repr(results)), repr(results)}) == 1
    if not results['pure_nccl'].passed:
        error = results['pure_nccl'].error
        assert error.startswith('NCCL is not available: ') and 'on all ranks' not in error


@alone
def test_system_info():
    info = system_info.collect()
    software = {name: line.text for name, line in info.software.items()}
    assert software['Python'] == f'{sys.version.split()[0]} in {sys.executable}'
    assert software['ChainerMN'] == (
        f'{chainermn.__version__} in {os.path.dirname(os.path.abspath(chainermn.__file__))}')
    assert software['Chainer'] == '7.8.1, patched'
    assert software['NumPy'] == np.__version__
    assert software['MPI'].endswith(system_info.library())
    assert os.path.basename(system_info.library()).startswith('libmpi')
    assert info.host == os.uname().nodename
    assert info.cores == os.sched_getaffinity(0)
    assert [line.problem for line in info.software.values() if line.problem] == []


@alone
def test_report_shows_ranks_that_differ(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, 'rich', None)
    monkeypatch.setitem(sys.modules, 'rich.console', None)
    info = system_info.collect()
    software = info.software | {'NumPy': system_info.Info('0.1', {'version': '0.1'})}
    other = info._replace(software=software, host='elsewhere', devices=['A', 'A', 'B'])
    report = Report.from_ranks([info, info, other, info])
    assert report.data()['software']['NumPy'] == [
        {'version': np.__version__, 'ranks': [0, 1, 3]}, {'version': '0.1', 'ranks': [2]}]
    assert [(host.name, host.ranks) for host in report.hosts] == [
        (os.uname().nodename, [0, 1, 3]), ('elsewhere', [2])]
    assert report.hints == [('differs', 'NumPy', 'NumPy differs between ranks; install the same '
                             'version on every node')]
    report.problems.append(Finding('failed', 'flat', 'something else'))
    print_report(report)
    lines = capsys.readouterr().out.splitlines()
    assert f'  NumPy           {np.__version__}  (ranks 0-1, 3)' in lines
    assert f'{" " * 18}0.1  (ranks 2)' in lines
    assert next(line for line in lines if 'elsewhere' in line).endswith('2 x A, 1 x B')
    assert lines[-3:] == ['Problems', '  something else', '']
    assert all(line == line.rstrip() for line in lines)


@alone
def test_svg_output(tmp_path, capsys, monkeypatch):
    pytest.importorskip('rich', reason='needs rich')
    report = Report.from_ranks([system_info.collect()])
    print_report(report, str(tmp_path / 'check.svg'))
    assert 'Software' in (tmp_path / 'check.svg').read_text()
    monkeypatch.setitem(sys.modules, 'rich.console', None)
    print_report(report, 'other.svg')
    assert 'other.svg was not written, because --svg requires rich' in capsys.readouterr().err


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
@pytest.mark.parametrize('ranks', [0, pytest.param(3, marks=pytest.mark.slow)])
def test_json_output(ranks):
    status, out, err = check('--json', ranks=ranks)
    assert (status, err) == (0, '')
    report = json.loads(out)
    size = max(ranks, 1)
    assert (report['passed'], report['size'], report['problems']) == (True, size, [])
    (host,) = report['hosts']
    assert host['name'] == os.uname().nodename
    assert host['ranks'] == list(range(size))
    assert ({'code': 'one-rank', 'subject': 'ranks'} in report['hints']) == (size == 1)
    (numpy,) = report['software']['NumPy']
    assert numpy == {'version': np.__version__, 'ranks': list(range(size))}
    naive = report['communicators'][0]
    assert (naive['name'], naive['passed'], naive['error']) == ('naive', True, None)
    assert isinstance(naive['latency_us'], float) == (size > 1)


@alone
def test_json_has_no_sentences():
    info = system_info.collect()
    report = Report.from_ranks([info._replace(threads=10**6)] * 2)
    report.problems.append(Finding('failed', 'flat', 'the communicator failed'))
    text = json.dumps(report.data())
    for finding in *report.problems, *report.warnings, *report.hints:
        assert finding.text not in text
        assert json.dumps({'code': finding.code, 'subject': finding.subject}) in text
    assert report.warnings and not report.data()['passed']


def warnings_of(ranks):
    """The warnings about ranks on (host, cores, threads)."""
    info = system_info.collect()
    report = Report.from_ranks([info._replace(host=host, cores=frozenset(cores), threads=threads)
                                for host, cores, threads in ranks])
    return [(each.code, each.subject) for each in report.warnings], report


@alone
@pytest.mark.parametrize('ranks, codes', [
    ([('a', {0, 1}, 1)] * 2, []),
    ([('a', {0, 1}, 1)] * 3, [('more-ranks-than-cores', 'a')]),
    ([('a', {0, 1}, 2)] * 2, [('more-threads-than-cores', 'a')]),
    ([('a', {0, 1}, 2)] * 3, [('more-ranks-than-cores', 'a')]),  # threads are the smaller problem
    ([('a', {0, 1}, 3)], [('more-threads-than-cores', 'a')]),
    ([('a', {0, 1}, 2), ('b', {0, 1}, 2)], []),
    ([('a', {0, 1}, 2), ('b', {0, 1}, 4)], [('more-threads-than-cores', 'b')]),
    ([('a', {0, 1}, 2), ('a', {2, 3}, 2)], []),  # bound to cores
    ([('a', {0}, 1), ('a', {1}, 1), ('a', {1}, 1)], [('more-ranks-than-cores', 'a')]),
])
def test_more_ranks_or_threads_than_cores(ranks, codes):
    assert warnings_of(ranks)[0] == codes


@alone
def test_warnings_are_printed_and_do_not_fail(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, 'rich', None)
    monkeypatch.setitem(sys.modules, 'rich.console', None)
    report = warnings_of([('a', {0, 1, 2, 3}, 4)] * 2)[1]
    print_report(report)
    lines = capsys.readouterr().out.splitlines()
    assert lines[lines.index('Warnings') + 1] == (
        '  2 ranks with 8 threads in total share 4 cores on a. Set OMP_NUM_THREADS=2')
    assert lines[-1] == 'All required checks passed'
    assert report.data()['passed']


@alone
@pytest.mark.parametrize('variables, threads', [
    ({}, 8), ({'OMP_NUM_THREADS': '3'}, 3), ({'OMP_NUM_THREADS': '3,2'}, 3),
    ({'OMP_NUM_THREADS': '3', 'OPENBLAS_NUM_THREADS': '2'}, 2), ({'OMP_NUM_THREADS': 'x'}, 8)])
def test_threads(variables, threads, monkeypatch):
    for name in 'OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS', 'MKL_NUM_THREADS':
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert system_info._threads(8) == threads


@alone
@pytest.mark.parametrize('latencies, warned', [
    ([None, None], []), ([4e-6, 2e-3], []), ([2e-3, 1e-3], [('high-latency', 'b')])])
def test_high_latency(latencies, warned):
    report = warnings_of([('a', {0}, 1)])[1]
    report.add([smoke_tests.Result(name, True, '', False, latency)
                for name, latency in zip('ab', latencies, strict=True)])
    assert [(each.code, each.subject) for each in report.warnings] == warned
    assert all('an allreduce of one number takes 1000 us' in each.text
               for each in report.warnings)


@alone
def test_one_warning_if_more_ranks_than_cores_cause_high_latency():
    report = warnings_of([('a', {0}, 1)] * 2)[1]
    report.add([smoke_tests.Result('naive', True, '', False, 2e-3)])
    assert [each.code for each in report.warnings] == ['more-ranks-than-cores']


@alone
@pytest.mark.parametrize('version', ['7.8.1', '6.0.0'])
def test_another_version_of_chainer(version, monkeypatch):
    monkeypatch.setattr('importlib.metadata.version', lambda name: version)
    problem = system_info.collect().software['Chainer'].problem
    assert (problem is None) == (version == '7.8.1')
    assert problem is None or 'Chainer 6.0.0 is installed separately' in problem.text


@alone
@pytest.mark.parametrize(('use_torch', 'has_torch', 'has_instructions', 'devices', 'expected'), [
    ('auto', True, False, [], 'slow-dtype'),
    ('auto', True, False, ['GPU'], 'slow-dtype'),  # GPUs do not use PyTorch
    ('always', True, False, ['GPU'], ''),
    ('auto', True, True, [], ''),
    ('never', True, False, [], None),
    ('auto', False, False, [], None),
])
def test_bfloat16(use_torch, has_torch, has_instructions, devices, expected, monkeypatch):
    monkeypatch.setattr(system_info.compute_dtype, 'has_instructions', lambda: has_instructions)
    monkeypatch.setattr('importlib.util.find_spec', lambda name: object() if has_torch else None)
    with chainer.using_config('use_torch', use_torch):
        assert system_info._chainer(devices) == system_info.Info(
            '7.8.1, patched', {'version': '7.8.1', 'patched': True})
        with chainer.using_config('torch_compute_dtype', 'bfloat16'):
            info = system_info._chainer(devices)
    assert info.text == '7.8.1, patched' + ', computes in bfloat16' * (expected is not None)
    assert info.problem is None and (info.hint.code if info.hint else '') == (expected or '')
    if expected:
        assert info.hint.text == (
            'this processor has no bfloat16 instructions, so computing in bfloat16 is slower than '
            'in float32. Unset CHAINER_TORCH_COMPUTE_DTYPE')


@pytest.mark.slow
@alone
def test_communicator_that_fails_on_one_rank():
    status, out, err = check(ranks=2, code='''
        import chainermn
        from chainermn.communicators.flat_communicator import FlatCommunicator

        @classmethod
        def _check_requirements(cls):
            from mpi4py import MPI
            if MPI.COMM_WORLD.rank == 1:
                raise RuntimeError('no memory to share')

        FlatCommunicator._check_requirements = _check_requirements
        ''')
    assert status != 0
    assert 'aborts the job' not in err and 'Traceback' not in err
    problems = out.partition('Problems')[2]
    assert "the communicator 'flat' failed" in ' '.join(problems.split())
    assert 'RuntimeError: no memory to share' in ' '.join(problems.split())
    assert 'All required checks passed' not in out


@pytest.mark.slow
@alone
def test_wrong_result():
    status, out, _ = check('--json', code='''
        from chainermn.communicators.naive_communicator import NaiveCommunicator

        NaiveCommunicator.multi_node_mean_grad = lambda self, model: model.w.grad.fill(7)
        ''', ranks=2)
    assert status != 0
    report = json.loads(out)
    assert report['problems'] == [{'code': 'failed', 'subject': 'naive'}]
    assert not report['passed']
    assert report['communicators'][0]['error'] == (
        'rank 0: wrong mean of gradients; rank 1: wrong mean of gradients')


@pytest.mark.slow
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
@pytest.mark.parametrize('limit', ['0', '-1', 'nan', 'inf'])
def test_wrong_time_limit(limit, usage_error):
    assert '--timeout: must be a positive number of seconds' in usage_error(
        'check', '--timeout', limit)


@pytest.mark.slow
@alone
def test_mpiexec_of_another_library():
    status, out, _ = check(OMPI_COMM_WORLD_SIZE='2', OMPI_COMM_WORLD_RANK='0')
    assert status == 1
    assert ('mpiexec started 2 processes, but each one is rank 0 of 1'
            in ' '.join(out.partition('Problems')[2].split()))
    status, out, _ = check('--json', OMPI_COMM_WORLD_SIZE='2', OMPI_COMM_WORLD_RANK='1')
    assert (status, out) == (1, '')


@alone
def test_without_an_mpi_library():
    status, out, _ = check(code='''
        import sys
        sys.modules['mpi4py.MPI'] = None
        ''')
    assert status == 1
    assert 'mpi4py cannot load an MPI library. Install one (' in ' '.join(out.split())
    assert '-m pip install mpich' in out


@alone
@pytest.mark.parametrize('version, kind, code, text', [
    (None, 'problem', 'other-chainermn', 'other directories import a different chainermn ({})'),
    (chainermn.__version__, 'hint', 'not-installed', 'elsewhere import the installed one, {}')])
def test_another_chainermn_elsewhere(tmp_path, monkeypatch, version, kind, code, text):
    """A different version, or the same version as in a clone, after "pip install ."."""
    (tmp_path / 'chainermn').mkdir()
    (tmp_path / 'chainermn' / '__init__.py').write_text('')
    if version is not None:
        (tmp_path / 'chainermn' / '_version.py').write_text(f'__version__ = {version!r}')
    monkeypatch.syspath_prepend(tmp_path)
    info = system_info.collect().software['ChainerMN']
    advice = getattr(info, kind)
    assert advice.code == code and text.format(tmp_path / 'chainermn') in advice.text
    assert info.problem is None or info.hint is None


@alone
def test_shards(tmp_path):
    """Each rank reads some shards; a broken shard is a problem, and a slow rank is a warning."""
    for i in range(5):
        np.savez(tmp_path / f'train-{i}.npz', np.zeros((10, 8)))
    pattern = str(tmp_path / 'train-*.npz')
    readings = [shards.read(pattern, 'a', rank, 2) for rank in range(2)]
    assert sum(reading.samples for reading in readings) == 60  # rank 1 also reads the first one
    report = Report(2, {}, [], [], [], [], [])
    shards.add_to(report, pattern, readings)
    hint, = report.hints
    assert hint.code == 'reading-speed' and not report.warnings and not report.problems

    (tmp_path / 'train-3.npz').write_text('broken')
    report = Report(2, {}, [], [], [], [], [])
    readings = [shards.read(pattern, 'a', rank, 2) for rank in range(2)]
    shards.add_to(report, pattern, [*readings, readings[0]._replace(host='b', seconds=1e6)])
    assert [problem.code for problem in report.problems] == ['broken-shard']
    assert 'train-3.npz: BadZipFile' in report.problems[0].text
    assert [warning.subject for warning in report.warnings] == ['b']

    report = Report(1, {}, [], [], [], [], [])
    shards.add_to(report, 'x-*', [shards.read('x-*', 'a', 0, 1)])
    assert 'no file matches' in report.problems[0].text


@alone
def test_no_rank_is_slow_after_a_moment():
    """Small shards are read in milliseconds, so a single interruption can double the time."""
    report = Report(3, {}, [], [], [], [], [])
    readings = [shards.Reading('a', 10, 640, seconds, []) for seconds in (.001, .001, .9)]
    shards.add_to(report, 'train-*', readings)
    assert not report.warnings
    shards.add_to(report, 'train-*', [*readings[:2], readings[2]._replace(seconds=1.1)])
    assert [warning.code for warning in report.warnings] == ['slow-disk']
