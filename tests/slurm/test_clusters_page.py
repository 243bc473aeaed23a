"""The scripts of docs/clusters.md run on a Slurm cluster, as they are printed there."""

import functools
import importlib.util
import os
import pathlib
import sys

import pytest
import virtual_slurm

pytestmark = [pytest.mark.mpi_skip, pytest.mark.full, pytest.mark.limit(600)]

ROOT = pathlib.Path(__file__).resolve().parents[2]
LIMIT = 200
FAILS = """
import chainermn
comm = chainermn.create_communicator('flat')
if comm.rank == 3:
    raise ValueError('no such luck')
comm.barrier()
"""
FAILS_EARLY = """
import os, sys, time
if os.environ['SLURM_PROCID'] == '3':
    sys.exit(7)
time.sleep(3600)
"""


@functools.cache
def blocks():
    spec = importlib.util.spec_from_file_location('run_blocks', ROOT / 'docs/run_blocks.py')
    run_blocks = importlib.util.module_from_spec(spec)
    sys.modules['run_blocks'] = run_blocks  # for its dataclass
    spec.loader.exec_module(run_blocks)
    return run_blocks.find_blocks('docs/clusters.md')


def commands():
    return [block.code for block in blocks()
            if block.language == 'sh' and 'tox -e slurm' in block.not_run]


@pytest.fixture(scope='module')
def slurm(tmp_path_factory):
    if reason := virtual_slurm.why_not():
        pytest.skip(reason)
    home = tmp_path_factory.mktemp('home')
    activate = home / 'training/bin/activate'
    activate.parent.mkdir(parents=True)
    activate.write_text(f'export PATH={os.path.dirname(sys.executable)}:$PATH\n')
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv('HOME', str(home))
        patch.setenv('PATH', f'{os.path.dirname(sys.executable)}:{os.environ["PATH"]}')
        with virtual_slurm.Slurm() as slurm:
            yield slurm


@pytest.fixture
def folder(tmp_path):
    """A folder with the files of the page."""
    (tmp_path / 'examples').symlink_to(ROOT / 'examples')
    for block in blocks():
        if block.file:
            (tmp_path / block.file).write_text(block.code)
    return tmp_path


def log_of(folder, job):
    path = folder / f'job-{job}.log'
    return path.read_text() if path.exists() else ''


def test_the_commands_of_the_page():
    assert [code.split()[-1] for code in commands()] == ['2', '2', 'job.sh']
    assert [block.file for block in blocks() if block.file] == ['job.sh', 'train.py']


@pytest.mark.parametrize('program', ['srun', 'salloc'])
def test_mnist(slurm, folder, program):
    command, = (code for code in commands() if f'{program} --nodes' in code)
    done = slurm.run('bash', '-ec', command, cwd=folder, timeout=LIMIT)
    assert done.returncode == 0, done.stdout
    assert '4 processes, FlatCommunicator' in done.stdout, done.stdout
    assert 'Validation accuracy: ' in done.stdout


def test_a_job_resumes_after_requeue(slurm, folder):
    submit, = (code for code in commands() if code.startswith('sbatch'))
    job = slurm.sbatch(*submit.split()[1:], cwd=folder)
    virtual_slurm.wait_until(lambda: list(folder.glob('result/run.0.*')),
                             lambda: log_of(folder, job), LIMIT)
    assert slurm.run('scontrol', 'requeue', job).stdout == ''
    virtual_slurm.wait_until(lambda: slurm.state(job) == 'PENDING', lambda: log_of(folder, job))
    # Slurm starts a requeued job after a delay.
    slurm.run('scontrol', 'update', f'JobId={job}', 'StartTime=now')
    state = slurm.wait(job, LIMIT)
    log = log_of(folder, job)
    assert state == 'COMPLETED', log
    first, second = (int(line.split()[-1]) for line in log.splitlines()
                     if line.startswith('starting after iteration'))
    assert (first, second > 0, second % 100) == (0, True, 0), log
    assert log.count('finished 2000 iterations') == 1, log


@pytest.mark.parametrize('program, report', [
    (FAILS, 'chainermn: rank 3 of 4 (host node2, process '),
    (FAILS_EARLY, 'node2: task 3: Exited with exit code 7')], ids=['a report', 'before MPI'])
def test_a_rank_that_fails_ends_the_job(slurm, folder, program, report):
    (folder / 'train.py').write_text(program)
    job = slurm.sbatch('job.sh', cwd=folder)
    state = slurm.wait(job, LIMIT)
    log = log_of(folder, job)
    assert state == 'FAILED', log
    assert report in log
    assert ('ValueError: no such luck' in log) == (program == FAILS), log
