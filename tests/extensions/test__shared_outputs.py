"""A program whose ranks write the same outputs is warned once; others are not."""
import re

import pytest
from jobs import run_job

pytestmark = [pytest.mark.mpi_skip, pytest.mark.slow]

PROGRAM = '''
import chainer, chainermn, io, numpy as np, os, sys
from chainer.training import extensions
from chainermn.extensions import create_multi_node_report, multi_node_snapshot
import matplotlib; matplotlib.use('Agg')

comm = chainermn.create_communicator('naive')
model = chainer.links.Linear(2, 1)
NEVER = 9, 'epoch'

def train(folder, *added):
    optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.SGD(), comm).setup(model)
    data = chainer.iterators.SerialIterator(np.ones((4, 2), 'f'), 2)
    def loss(x):
        value = chainer.functions.sum(model(x))
        chainer.report({'loss': value}, model)
        return value
    updater = chainer.training.StandardUpdater(data, optimizer, loss_func=loss)
    trainer = chainer.training.Trainer(updater, (1, 'epoch'), out=folder)
    for each in added:
        trainer.extend(each)
    trainer.run()

def snapshot(**options):
    return extensions.snapshot(writer=extensions.snapshot_writers.SimpleWriter(), **options)

def files(suffix=''):
    """Extensions that write files."""
    return [extensions.LogReport(filename=f'log{suffix}'),
            extensions.PlotReport(['main/loss'], trigger=NEVER, filename=f'plot{suffix}.png'),
            extensions.VariableStatisticsPlot(model, trigger=NEVER, filename=f'plot2{suffix}.png'),
            extensions.DumpGraph('main/loss', filename=f'graph{suffix}.dot'),
            snapshot(filename='all_{.updater.iteration}' + suffix),
            extensions.snapshot_object(model, f'model{suffix}')]

def prints():
    return [extensions.PrintReport(['main/loss'], extensions.LogReport(log_name=None)),
            extensions.ProgressBar(update_interval=1)]

def of_all(*reports):
    return [create_multi_node_report(each, comm) for each in reports]

train('a', *of_all(extensions.LogReport(), extensions.PlotReport(['main/loss'], trigger=NEVER)),
      *of_all(*prints()),
      multi_node_snapshot(comm, extensions.snapshot()),
      chainermn.create_multi_node_checkpointer('run', comm),
      extensions.ExponentialShift('lr', .9), extensions.FailOnNonNumber(), extensions.observe_lr())
for _ in range(2):
    train('b', *[*files(), *prints()] * (comm.rank == 0))
train(f'c{comm.rank}', *files())
train('d', *files(str(comm.rank)))
train('e', snapshot(condition=lambda: comm.rank == 0), extensions.LogReport(log_name=None),
      extensions.PrintReport(['main/loss'], extensions.LogReport(log_name=None),
                             out=io.StringIO() if comm.rank else sys.stdout))
with open(f'own{comm.rank}', 'w') as file, open(os.devnull, 'w') as nothing:
    train('f', *(extensions.PrintReport(
        ['main/loss'], extensions.LogReport(log_name=None), out=out) for out in (file, nothing)))
comm.barrier()
if comm.rank == 0:
    print('the next ones are wrong', flush=True)
comm.barrier()
for _ in range(2):
    train('g', *files(), *prints())
train('h', extensions.PrintReport(['main/loss'], extensions.LogReport()))
'''


def test_ranks_that_write_the_same_outputs(tmp_path):
    pytest.importorskip('matplotlib')
    done = run_job(tmp_path, PROGRAM, ranks=2, limit=50)
    assert done.returncode == 0, done.stdout
    before, _, after = done.stdout.partition('the next ones are wrong\n')
    assert 'Warning' not in before
    # Two ranks that start at the same moment may name some outputs each.
    assert 'script.py:22: UserWarning: several ranks write to the same place' in after
    places = re.findall(r'^  (\w+: .*)$', after, re.MULTILINE)
    for place in (f'LogReport: {tmp_path}/g/log', f'PlotReport: {tmp_path}/g/plot.png',
                  f'VariableStatisticsPlot: {tmp_path}/g/plot2.png',
                  f'DumpGraph: {tmp_path}/g/graph.dot',
                  f'snapshot: {tmp_path}/g/all_{{.updater.iteration}}',
                  f'snapshot: {tmp_path}/g/model', 'PrintReport: the screen',
                  'ProgressBar: the screen', f'LogReport: {tmp_path}/h/log'):
        assert places.count(place) == 1, place
    for advice in ('create_multi_node_report(LogReport(...), comm)',
                   'multi_node_snapshot(comm, snapshot(...))', 'Add DumpGraph on rank 0 only'):
        assert advice in after
