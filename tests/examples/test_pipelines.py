"""The model-parallel examples with one changed line: the losses are the same."""

import json
import pathlib
import shutil
import subprocess
import sys

import numpy as np
import pytest
from time_limits import seconds

pytestmark = [pytest.mark.mpi_skip, pytest.mark.slow]

EXAMPLES = pathlib.Path(__file__).parents[2] / 'examples'


@pytest.mark.parametrize('script, ranks, old, new, tolerance', [
    ('mnist/train_mnist_model_parallel.py', 2, 'optimizer, device=device)',
     'optimizer, device=device, loss_func=chainermn.Pipeline(model))', 1e-4),
    ('mnist/train_mnist_dual_parallel.py', 4, 'optimizer, device=device)',
     'optimizer, device=device, loss_func=chainermn.Pipeline(model))', 1e-4),
    # The loss is a mean over words, so that of micro-batches of examples is not quite the same.
    ('seq2seq/seq2seq_mp1.py', 2, 'converter=data.convert, device=device)',
     'converter=data.convert, device=device,\n        loss_func=chainermn.Pipeline(model, '
     'n_micro_batches=4, communicator=comm))', .02),
])
def test_losses(tmp_path, script, ranks, old, new, tolerance):
    losses = []
    for n, replacement in enumerate((old, new)):
        folder = tmp_path / str(n)
        shutil.copytree((EXAMPLES / script).parent, folder)
        path = folder / pathlib.Path(script).name
        text = path.read_text(encoding='utf-8')
        assert text.count(old) == 1
        path.write_text(text.replace(old, replacement), encoding='utf-8')
        if (folder / 'net.py').exists():  # micro-batches draw other random numbers
            net = folder / 'net.py'
            net.write_text(net.read_text(encoding='utf-8').replace('dropout=0.1', 'dropout=0.0'),
                           encoding='utf-8')
        subprocess.run(
            ['mpiexec', '-n', str(ranks), sys.executable, '-W', 'ignore', path.name,
             '--iteration', '4', '--batchsize', '16'], cwd=folder, check=True,
            timeout=seconds(100), stdin=subprocess.DEVNULL)
        log = json.loads((folder / 'result' / 'log').read_text(encoding='utf-8'))
        losses.append(log[-1]['main/loss'])
    np.testing.assert_allclose(losses[1], losses[0], tolerance)
