"""The progress bar of all ranks: printed by rank 0 alone, also after a resume."""

import functools
import importlib.util
import io
import re
import sys
import types

import chainer
import pytest
from small_trainer import make_trainer

import chainermn
from chainermn.extensions import ProgressBar
from chainermn.extensions import progress_bar as module

STYLES = ['chainer', *['tqdm'] * bool(importlib.util.find_spec('tqdm'))]


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(params=STYLES)
def style(request, monkeypatch):
    if request.param == 'chainer':
        monkeypatch.setitem(sys.modules, 'tqdm', None)  # not installed


@pytest.fixture
def clock(monkeypatch):
    """One second per call."""
    times = iter(range(1, 10**6))
    monkeypatch.setattr(module, 'time', types.SimpleNamespace(
        monotonic=lambda: float(next(times))))


@pytest.mark.parametrize('split', ['scattered', 'sampler'])
def test_rank_0_prints_the_speed_of_all_ranks(comm, tmp_path, clock, style, split):
    out, options = Terminal(), {'length': 12}
    if split == 'sampler':
        n = 12 * comm.size
        options = {'length': n, 'iterator': functools.partial(
            chainer.iterators.SerialIterator,
            order_sampler=chainermn.iterators.MultiNodeOrderSampler(n, comm))}
    trainer = make_trainer(comm, tmp_path, (4, 'epoch'), **options)
    trainer.extend(ProgressBar(comm, out=out))
    trainer.run()
    if comm.rank:
        assert out.getvalue() == ''
        return
    s = 's' * (comm.size > 1)
    # One iteration per second, of 2 samples on each rank; 24 iterations.
    for left in (22, 1, 0):
        assert f'{2 * comm.size} samples/s on {comm.size} rank{s}, 0:00:{left:02} left' in (
            out.getvalue())
    assert '100%' in out.getvalue() and '4/4 epochs' in out.getvalue()


@pytest.mark.sample(1)
def test_it_continues_after_a_resume(comm, tmp_path, clock, style):
    folder = comm.bcast_obj(str(tmp_path))
    for epochs in (2, 4):
        out = Terminal()
        trainer = make_trainer(comm, folder, (epochs, 'epoch'), length=12)
        checkpointer = chainermn.create_multi_node_checkpointer('run', comm, path=folder)
        checkpointer.finalize = lambda each=checkpointer: (
            each._saver.flush(), each._saver.lock.release())  # as if the job is killed
        trainer.extend(checkpointer, trigger=(1, 'epoch'))
        trainer.extend(ProgressBar(comm, out=out))
        checkpointer.maybe_load(trainer, trainer.updater.get_optimizer('main'))
        trainer.run()
    if comm.rank == 0:
        shown = [int(text) for text in re.findall(r'(\d+)%', out.getvalue())]
        assert shown[0] == 54 and shown[-1] == 100, shown  # 13 of 24 iterations
        assert '0:00:10 left' in out.getvalue()
        assert f' {2 * comm.size} samples/s' in out.getvalue()


def test_iterations_and_the_interval(comm, tmp_path, clock, monkeypatch):
    monkeypatch.setitem(sys.modules, 'tqdm', None)
    out = Terminal()
    trainer = make_trainer(comm, tmp_path, (4, 'epoch'), length=12)
    trainer.extend(ProgressBar(comm, out=out, interval=12,
                               training_length=(24, 'iteration')))
    trainer.run()
    if comm.rank == 0:
        assert re.findall(r'\S+/24 iterations', out.getvalue()) == [
            '1/24 iterations', '13/24 iterations', '24/24 iterations', '24/24 iterations']


def test_updaters_without_a_data_set_show_no_samples(comm, tmp_path, clock):
    trainer = make_trainer(comm, tmp_path, (4, 'epoch'), length=12)
    bar = ProgressBar(comm, out=(out := Terminal()))
    trainer.extend(bar)
    trainer.updater.get_iterator = lambda name: None
    trainer.run()
    if comm.rank == 0:
        assert 'samples/s' not in out.getvalue() and '0:00:03 left' in out.getvalue()
