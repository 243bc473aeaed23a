"""Every example with --gpu, for a few steps."""

import pathlib
import subprocess
import sys

import pytest
from time_limits import seconds

pytestmark = [pytest.mark.gpu, pytest.mark.mpi_skip, pytest.mark.limit(400)]

EXAMPLES = pathlib.Path(__file__).parents[2] / 'examples'
SCRIPTS = [path for path in sorted(EXAMPLES.glob('*/*.py')) if "'--gpu'" in path.read_text()]

#: For each script: its options, and the number of ranks.
RUNS = {
    'train_cifar.py': (['--iteration', '2', '--width', '2', '--mnbn'], 2),
    'train_dcgan.py': (['--iteration', '2', '--width', '4'], 2),
    'train_imagenet.py': (['--iteration', '2', '--mean', 'mean.npy', '--insize', '32',
                           '--batchsize', '4', '--dtype', 'mixed16'], 2),
    'train_mnist.py': (['--epoch', '2'], 2),
    'train_mnist_custom_loop.py': (['--iteration', '2'], 2),
    'train_mnist_dual_parallel.py': (['--iteration', '2'], 4),
    'train_mnist_model_parallel.py': (['--iteration', '2'], 2),
    'train_parallel_conv.py': (['--iteration', '2'], 2),
    'train_uneven.py': (['--epoch', '1', '--iteration', '2'], 2),
    'seq2seq.py': (['--iteration', '2', '--unit', '8'], 2),
    'seq2seq_mp1.py': (['--iteration', '2'], 2),
}
#: Commands that run before, in one process.
PREPARE = {'train_imagenet.py': [['make_images.py', '--train', '6', '--val', '2'],
                                 ['compute_mean.py']]}

assert RUNS.keys() == {path.name for path in SCRIPTS}


@pytest.mark.parametrize('script', SCRIPTS, ids=lambda path: path.name)
def test_a_few_steps(script, start, tmp_path):
    pytest.importorskip('sklearn', reason='the examples take their data from scikit-learn')
    options, ranks = RUNS[script.name]
    first, env = start(ranks)
    commands = [[sys.executable, script.parent / name, *args]
                for name, *args in PREPARE.get(script.name, [])]
    commands.append([*first, sys.executable, script, *options, '--gpu'])
    for command in commands:
        done = subprocess.run(command, cwd=tmp_path, timeout=seconds(380), text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env)
        assert done.returncode == 0, done.stdout
