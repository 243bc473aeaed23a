"""Every example with --gpu, for a few steps; and the tutorial's script."""

import pathlib
import re
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
    'train_sharded.py': (['--epoch', '1'], 2),
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


def test_the_tutorial(start, tmp_path, is_virtual):
    """Its section on GPUs has the changes to its script, one per paragraph."""
    import cupy

    pytest.importorskip('sklearn', reason='the tutorial takes its data from scikit-learn')
    if not is_virtual and cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip('needs two GPUs')
    page = (EXAMPLES.with_name('docs') / 'tutorial.md').read_text(encoding='utf-8')
    to_many, to_gpus = re.findall(r'```diff\n(.*?)```', page, re.DOTALL)
    script = re.sub(r'^(?:-.*\n|[+ ])', '', to_many, flags=re.MULTILINE)
    for change in to_gpus.split('\n\n'):
        lines = change.splitlines()
        old, new = ('\n'.join(line[1:] for line in lines if line[0] in signs)
                    for signs in (' -', ' +'))
        assert script.count(old) == 1
        script = script.replace(old, new)
    (tmp_path / 'many.py').write_text(script.replace("(10, 'epoch')", "(3, 'epoch')"))
    first, env = start(2)
    done = subprocess.run([*first, sys.executable, 'many.py'], cwd=tmp_path, timeout=seconds(380),
                          capture_output=True, text=True, env=env | {'VGPU_DEVICES': '2'})
    assert done.stdout.startswith('2 ranks, accuracy '), done.stdout + done.stderr
    assert float(done.stdout.split()[-1]) > .8
