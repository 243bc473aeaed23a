"""``chainermn compare`` of the records of real jobs."""

import importlib.util
import json
import pathlib
import re
import shutil

import pytest
from jobs import WRITE_PROCESS, RunningJob, run_job
from time_limits import wait_until

import chainermn._records.run_record
from chainermn.__main__ import main

pytestmark = pytest.mark.mpi_skip

PROGRAM = '''
import os, sys
import chainer, chainermn, numpy as np
import chainer.functions as F, chainer.links as L

comm = chainermn.create_communicator('naive')
np.random.seed(0)
model = L.Classifier(chainer.Sequential(L.Linear(6, 16), F.relu, L.Linear(16, 3)))
optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.Adam(), comm).setup(model)
draw = np.random.RandomState(comm.rank)
data = chainer.datasets.TupleDataset(draw.randn(40, 6).astype('f'), draw.randint(0, 3, 40))
if '--loop' in sys.argv:
    for i in range(20):
        x, t = chainer.dataset.concat_examples(data[i * 2:i * 2 + 2])
        if '--late' in sys.argv and i == 7 and comm.rank == 1:
            x = x * 2
        optimizer.update(model, x, t)
else:
    from run_record import RunRecord
    iterator = chainer.iterators.SerialIterator(data, 4)
    trainer = chainer.training.Trainer(chainer.training.updaters.StandardUpdater(
        iterator, optimizer), (20, 'iteration'), sys.argv[1])
    trainer.extend(RunRecord(details=5))
    trainer.run()
'''


@pytest.fixture
def command_output(capsys):
    """Run a command; return its exit status, and what it prints."""
    def command_output(*args):
        status = main([*map(str, args)])
        return status, capsys.readouterr().out
    return command_output


def test_two_runs_and_their_ranks(tmp_path, command_output):
    for name, options in (('a', []), ('c', ['--late'])):
        job = run_job(tmp_path, PROGRAM, '--loop', *options, CHAINERMN_RECORD=name)
        assert job.returncode == 0, job.stdout
    status, text = command_output('compare', tmp_path / 'a')
    assert (status, 'All ranks have the same parameters after each update.' in text) == (0, True)

    status, text = command_output('compare', tmp_path / 'a', tmp_path / 'c')
    assert status == 1
    assert 'First difference: the batch, update 7, rank1 only\n' in text
    assert len(text.splitlines()) <= 30
    status, text = command_output('compare', tmp_path / 'a', tmp_path / 'c', '--json')
    found = json.loads(text)
    assert found['differences'][0]['rank'] == 'rank1'
    assert found['A']['updates'] == 19
    if importlib.util.find_spec('matplotlib'):
        command_output('compare', tmp_path / 'a', tmp_path / 'c', '--plot', tmp_path / 'x.png')
        assert (tmp_path / 'x.png').read_bytes().startswith(b'\x89PNG')


def copy_package(folder, version, old='', new=''):
    """Copy this package as another version, in which a text is replaced."""
    source = pathlib.Path(chainermn.__file__).parent
    shutil.copytree(source, folder / 'chainermn', ignore=shutil.ignore_patterns('__pycache__'))
    (folder / 'chainermn/_version.py').write_text(f'__version__ = {version!r}\n')
    path = folder / 'chainermn/optimizers/_multi_node_optimizer.py'
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.slow
def test_two_versions(tmp_path, command_output):
    copy_package(tmp_path / 'same', '8.0.1')
    copy_package(tmp_path / 'other', '8.0.2', '        if has_means:\n', '''
        for param in target.params():
            param.grad *= 1.01
        if has_means:
''')
    for name, path in (('a', ''), ('b', 'same'), ('c', 'other')):
        job = run_job(tmp_path, PROGRAM, '--loop', CHAINERMN_RECORD=name, PYTHONPATH=path)
        assert job.returncode == 0, job.stdout
    status, text = command_output('compare', tmp_path / 'a', tmp_path / 'b')
    assert (status, 'All updates that both runs recorded are identical' in text) == (0, True)
    assert f'  version of chainermn: {chainermn.__version__} | 8.0.1\n' in text
    status, text = command_output('compare', tmp_path / 'a', tmp_path / 'c')
    assert status == 1
    assert 'First difference: the mean gradients, update 1, all ranks\n' in text
    assert '  the mean gradient of /predictor/0/W (of LinearFunction, called at script.py:' in text


RUNNING = f'''
import os, pathlib, time
import chainer, chainermn, numpy as np
import chainer.functions as F, chainer.links as L

comm = chainermn.create_communicator('naive')
{WRITE_PROCESS}
model = chainer.Sequential(L.Linear(6, 16), F.relu, L.Linear(16, 3))
optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.SGD(), comm).setup(model)
i = 0
while not comm.bcast_obj(pathlib.Path('end').exists()):
    if pathlib.Path('plant').exists() and comm.rank == 1:
        model[2].b.array[0] += 1
        pathlib.Path('plant').rename('planted')
    optimizer.update(lambda x: F.sum(model(x) ** 2), np.full((2, 6), comm.rank, 'f'))
    pathlib.Path(f'rank{{comm.rank}}.{{i}}').touch()
    i += 1
    time.sleep(.01)
'''


@pytest.mark.slow
def test_a_running_job(tmp_path, command_output):
    env = {'CHAINERMN_RECORD': 'a', 'CHAINERMN_RECORD_DETAILS': '1'}
    with RunningJob(tmp_path, RUNNING, **env) as job:
        job.text('rank1.5')
        status, text = command_output('compare', tmp_path / 'a')
        assert (status, 'All ranks have the same parameters after each update' in text
                ) == (0, True), text
        (tmp_path / 'plant').touch()
        job.text('planted')
        wait_until(lambda: command_output('compare', tmp_path / 'a')[0], 30)
        _, text = command_output('compare', tmp_path / 'a')
        assert re.search('First difference: the parameters before the update, update [0-9]+, rank0 '
                         r'and rank1\n  the parameter /1/b \(of .*\) before the update', text), text


def test_wrong_arguments(tmp_path, usage_error):
    assert f'{tmp_path} has no record of a run: no file rank0.txt' in usage_error(
        'compare', tmp_path)
    assert f'no such folder: {tmp_path / "none"}' in usage_error('compare', tmp_path / 'none')
    (tmp_path / 'rank0.txt').touch()
    assert f'rank0.txt is a file. Pass its folder: {tmp_path}' in usage_error(
        'compare', tmp_path / 'rank0.txt')
    assert '--plot requires two records' in usage_error('compare', tmp_path, '--plot', 'x.png')


@pytest.mark.slow
@pytest.mark.parametrize('size', [1, 2])
def test_a_copy_of_the_file_records_chainermn_7(tmp_path, size, command_output):
    shutil.copy(pathlib.Path(chainermn._records.run_record.__file__), tmp_path)
    for name, overlay in (('new', '1'), ('old', '0')):
        job = run_job(tmp_path, PROGRAM, name, ranks=size, CHAINERMN_OVERLAY=overlay,
                      CHAINER_USE_TORCH='never')
        assert job.returncode == 0, job.stdout
    _, text = command_output('compare', tmp_path / 'new/record', tmp_path / 'old/record', '--json')
    found = json.loads(text)
    assert found['A']['updates'] == found['B']['updates'] == 19
    assert found['settings']['multi-node optimizer'] == ['MultiNodeOptimizer',
                                                         '_MultiNodeOptimizer']
    assert all(each['is_rounding'] for each in found['differences'])
