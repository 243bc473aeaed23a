"""Reports are of all ranks, and rank 0 alone writes them."""

import io
import re

import chainer
import numpy as np
import pytest
from chainer.training import extensions
from mpi4py import MPI
from shared_fixtures import communicators

from chainermn import create_multi_node_optimizer
from chainermn.extensions import create_multi_node_report
from chainermn.iterators import MultiNodeOrderSampler

size = MPI.COMM_WORLD.size

comm = communicators('naive')


class Loss(chainer.Chain):
    """Its loss is the mean of a batch, whatever its parameter is."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.l = chainer.links.Linear(1, 1)

    def forward(self, x):
        loss = chainer.functions.mean(x) + 0 * chainer.functions.sum(self.l(x))
        chainer.report({'loss': loss}, self)
        if x[0, 0] >= 100:
            chainer.report({'large': x[0, 0]}, self)
        return loss


def train(comm, folder, reports, iterator=None, stop=(3, 'epoch')):
    """Trains with 6 examples on each rank, in batches of 2, and reports made for all ranks."""
    if iterator is None:
        iterator = batches(np.arange(6, dtype='f').reshape(6, 1) + 10 * comm.rank)
    optimizer = create_multi_node_optimizer(chainer.optimizers.SGD(0), comm).setup(Loss())
    trainer = chainer.training.Trainer(
        chainer.training.StandardUpdater(iterator, optimizer), stop, out=folder)
    for report in reports:
        trainer.extend(report)
    trainer.run()
    return trainer


def batches(data, size=2):
    return chainer.iterators.SerialIterator(data, size, shuffle=False)


@pytest.mark.mpi(min_size=2)
def test_a_plot_is_drawn_by_rank_0(comm, tmp_path):
    seen = []

    def keep(figure, axes, summary):
        seen.append(axes.lines[0].get_ydata().tolist())

    plot = create_multi_node_report(extensions.PlotReport(
        ['main/loss'], 'epoch', filename='loss.png', postprocess=keep), comm)
    trainer = train(comm, tmp_path, [plot])
    assert trainer.get_extension('PlotReport') is plot
    assert (tmp_path / 'loss.png').exists() == (comm.rank == 0)
    if comm.rank == 0:
        assert seen[-1] == pytest.approx([2.5 + 10 * (size - 1) / 2] * 3)
    else:
        assert seen == []


def test_rank_0_prints(comm, tmp_path):
    out = io.StringIO()
    reports = [extensions.LogReport(), extensions.PrintReport(['epoch', 'main/loss'], out=out),
               extensions.ProgressBar(update_interval=1, bar_length=7, out=out)]
    train(comm, tmp_path, [create_multi_node_report(report, comm) for report in reports])
    if comm.rank > 0:
        assert out.getvalue() == ''
        return
    text = out.getvalue()
    assert re.search(rf'\x1b\[J3 +{2.5 + 10 * (size - 1) / 2:g} ', text)
    assert '[######.]' in text  # in iteration 8 of 9
    ranks = f'{size} rank' if size == 1 else f'{size} ranks'
    assert f'examples/sec on {ranks}, ' in text and 'iters/sec. Estimated time' in text


@pytest.mark.parametrize('split', ['scattered', 'sampler'])
def test_examples_of_all_ranks_are_counted(comm, tmp_path, split):
    """Scattered, rank r has 6 (r + 1) examples, in batches of 2 (r + 1); otherwise, 6 and 2."""
    out = io.StringIO()
    bar = create_multi_node_report(extensions.ProgressBar(update_interval=1, out=out), comm)
    data = np.zeros((6 + 6 * comm.rank, 1), 'f')
    iterator, in_all = batches(data, 2 + 2 * comm.rank), sum(2 + 2 * rank for rank in range(size))
    if split == 'sampler':
        iterator, in_all = chainer.iterators.SerialIterator(
            np.zeros((6 * size, 1), 'f'), 2,
            order_sampler=MultiNodeOrderSampler(6 * size, comm)), 2 * size
    train(comm, tmp_path, [bar], iterator, (3, 'iteration'))
    if comm.rank == 0:
        examples, iterations = re.findall(
            r'([\d.e+]+) examples/sec on \d+ ranks?, ([\d.e+]+) iters/sec', out.getvalue())[-1]
        assert float(examples) / float(iterations) == pytest.approx(in_all, rel=1e-3)


@pytest.mark.parametrize('clock', [None, lambda: 1e9])
def test_a_bar_never_shows_an_infinite_speed(comm, tmp_path, monkeypatch, clock):
    if clock is not None:  # one with a low resolution
        monkeypatch.setattr('time.time', clock)
    out = io.StringIO()
    train(comm, tmp_path, [create_multi_node_report(
        extensions.ProgressBar(update_interval=1, out=out), comm)])
    assert 'inf' not in out.getvalue()
    speeds = out.getvalue().count('iters/sec')
    assert speeds == (out.getvalue().count('this epoch') if clock is None else 0)
    assert (speeds > 0) == (clock is None and comm.rank == 0)


def test_a_bar_without_a_data_set_to_count(comm, tmp_path):
    class Endless(chainer.dataset.Iterator):
        """An iterator that has no dataset."""

        epoch, epoch_detail, is_new_epoch = 0, 0., False

        def __next__(self):
            return [np.zeros(1, 'f')]

    out = io.StringIO()
    bar = create_multi_node_report(extensions.ProgressBar(update_interval=1, out=out), comm)
    train(comm, tmp_path, [bar], Endless(), (3, 'iteration'))
    assert 'examples' not in out.getvalue()
    assert ('iters/sec' in out.getvalue()) == (comm.rank == 0)


@pytest.mark.compares_calls
@pytest.mark.mpi(min_size=2)
def test_triggers_that_differ_are_an_error_on_all_ranks(comm, tmp_path, capfd):
    log = create_multi_node_report(
        extensions.LogReport(trigger=(1 + comm.rank, 'iteration')), comm)
    with pytest.raises(ValueError, match='allgather_obj'):
        train(comm, tmp_path, [log])


@pytest.mark.compares_calls
@pytest.mark.mpi(min_size=2)
def test_another_extension_on_one_rank_is_an_error_on_all(comm):
    def attempt():
        if comm.rank == 0:
            create_multi_node_report(extensions.ExponentialShift('lr', .1), comm)
        comm.barrier()

    with pytest.raises(TypeError, match='needs a LogReport, PlotReport, PrintReport or Progress'):
        attempt()
