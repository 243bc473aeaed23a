"""The script of docs/elastic.md takes the same steps with fewer ranks, by accumulation."""

import importlib.util
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from time_limits import seconds

pytestmark = [pytest.mark.mpi_skip, pytest.mark.limit(180)]

ROOT = pathlib.Path(__file__).resolve().parents[2]
START = '''
import sys

import numpy

numpy.random.seed(0)  # initial parameters
'''
STOP = '''
def stop(trainer):
    if updater.iteration == int(sys.argv[1]):
        raise RuntimeError('stop')

trainer.extend(stop, trigger=(1, 'iteration'), priority=-1)
if comm.rank == 0:
    print('from', updater.iteration, 'accumulates', n_accumulations, 'rate', lr, flush=True)
trainer.run()
if comm.rank == 0:
    np.save(sys.argv[2], model.predictor.W.array)
'''


@pytest.fixture(scope='module')
def script():
    spec = importlib.util.spec_from_file_location('run_blocks', ROOT / 'docs/run_blocks.py')
    run_blocks = importlib.util.module_from_spec(spec)
    sys.modules['run_blocks'] = run_blocks  # for its dataclass
    spec.loader.exec_module(run_blocks)
    code, = [block.code for block in run_blocks.find_blocks('docs/elastic.md')
             if block.file == 'train.py']
    assert code.endswith('\ntrainer.run()\n')
    return START + code.removesuffix('trainer.run()\n') + STOP


def train(folder, ranks, stop='0', name=''):
    return subprocess.run(
        ['mpiexec', '-n', str(ranks), sys.executable, '-W', 'ignore', 'train.py', stop, name],
        cwd=folder, env={**os.environ, 'CHAINERMN_RUN_RANKS': '4', 'OMP_NUM_THREADS': '1'},
        text=True, capture_output=True, timeout=seconds(60))


@pytest.mark.slow
@pytest.mark.parametrize('ranks, accumulates, rate', [
    (2, 2, .1), pytest.param(3, 1, .1 * 3 / 4, marks=pytest.mark.full)])
def test_the_rules_for_another_number_of_ranks(tmp_path, script, ranks, accumulates, rate):
    (tmp_path / 'train.py').write_text(script)
    stopped = train(tmp_path, 4, '49')  # after the checkpoint of iteration 40
    assert stopped.returncode != 0
    done = train(tmp_path, ranks, name='rest.npy')
    assert done.returncode == 0, done.stderr
    *_, line = [line for line in done.stdout.splitlines() if line.startswith('from ')]
    assert line.split()[:4] == ['from', '40', 'accumulates', str(accumulates)]
    assert float(line.split()[-1]) == pytest.approx(rate)
    if rate == .1:  # the same samples in each step
        assert train(tmp_path, 4, name='whole.npy').returncode == 0
        np.testing.assert_allclose(np.load(tmp_path / 'rest.npy'), np.load(tmp_path / 'whole.npy'),
                                   rtol=1e-4, atol=1e-6)
