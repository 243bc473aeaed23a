"""A program whose ranks write the same log is warned once; programs with other logs are not."""
import subprocess
import sys

import pytest

pytestmark = pytest.mark.mpi_skip

PROGRAM = '''
import chainer, chainermn, numpy as np
from chainer.training import extensions

comm = chainermn.create_communicator('naive')

def train(folder, *reports):
    model = chainer.links.Linear(2, 1)
    optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.SGD(), comm).setup(model)
    data = chainer.iterators.SerialIterator(np.ones((4, 2), 'f'), 2)
    updater = chainer.training.StandardUpdater(
        data, optimizer, loss_func=lambda x: chainer.functions.sum(model(x)))
    trainer = chainer.training.Trainer(updater, (2, 'epoch'), out=folder)
    for report in reports:
        trainer.extend(report)
    trainer.run()

log = extensions.LogReport
train('a', chainermn.extensions.create_multi_node_report(log(), comm))
train('b', *[log()] * (comm.rank == 0))
train('b', *[log()] * (comm.rank == 0))
train(f'c{comm.rank}', log())
comm.barrier()
if comm.rank == 0:
    print('the next one is wrong', flush=True)
comm.barrier()
train('d', log())
'''


def test_ranks_that_write_the_same_log(tmp_path):
    (tmp_path / 'train.py').write_text(PROGRAM)
    done = subprocess.run(['mpiexec', '-n', '3', sys.executable, 'train.py'], text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=tmp_path)
    assert done.returncode == 0
    before, _, after = done.stdout.partition('the next one is wrong\n')
    assert before == ''
    assert after.count('UserWarning: LogReport writes') == 1
    assert f"train.py:16: UserWarning: LogReport writes {tmp_path / 'd' / 'log'} on sev" in after
