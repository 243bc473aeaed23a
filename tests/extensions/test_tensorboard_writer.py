"""Rank 0 writes means over all ranks, which TensorBoard can read."""
import os
import pathlib
import struct
import subprocess
import sys

import chainer
import pytest
from shared_fixtures import raises_on_all
from small_trainer import make_trainer
from time_limits import seconds

import chainermn
from chainermn.extensions import TensorBoardWriter

pytest.importorskip('tensorboardX', exc_type=ImportError)


def read(folder):
    """The values in the files of a folder: (iteration, value), by key."""
    from tensorboardX.proto.event_pb2 import Event

    values, purged = {}, []
    for name in sorted(os.listdir(folder)):
        with open(os.path.join(folder, name), 'rb') as file:
            while header := file.read(12):  # the size and its checksum
                event = Event.FromString(file.read(struct.unpack('<Q', header[:8])[0]))
                file.read(4)
                if event.session_log.status == event.session_log.START:
                    purged.append(event.step)
                for value in event.summary.value:
                    values.setdefault(value.tag, []).append((event.step, value.simple_value))
    return values, purged


def train(comm, folder, writer, stop, checkpointer=None):
    trainer = make_trainer(comm, folder, (stop, 'epoch'))
    updater = trainer.updater

    def observe(trainer):
        chainer.report({'mine': 10 * comm.rank + updater.iteration, 'other': 1})

    trainer.extend(observe, trigger=(1, 'iteration'), priority=1000)
    trainer.extend(writer)
    if checkpointer is not None:
        checkpointer.maybe_load(trainer, updater.get_optimizer('main'))
    trainer.run()
    if checkpointer is not None:
        checkpointer.save(trainer, updater.iteration)
    comm.barrier()


def test_rank_0_writes_means_of_all_ranks(comm, folder):
    train(comm, folder, TensorBoardWriter(comm), 3)
    assert len(os.listdir(os.path.join(folder, 'tensorboard'))) == 1
    values, purged = read(os.path.join(folder, 'tensorboard'))
    mean = 5 * (comm.size - 1)  # of 10 * rank
    assert values['mine'] == [(2, mean + 1.5), (4, mean + 3.5), (6, mean + 5.5)]
    assert values['epoch'] == [(2, 1), (4, 2), (6, 3)]
    assert {'main/loss', 'main/accuracy', 'other', 'elapsed_time'} <= set(values)
    assert 'iteration' not in values and purged == [1]  # values of earlier runs
    assert not os.path.exists(os.path.join(folder, 'log'))  # of LogReport


def test_options(comm, folder):
    log_dir = os.path.join(folder, 'elsewhere')
    train(comm, folder, TensorBoardWriter(
        comm, log_dir, keys=['mine'], trigger=(1, 'iteration')), 1)
    values, _ = read(log_dir)
    assert [iteration for iteration, _ in values['mine']] == [1, 2]
    assert set(values) == {'mine', 'epoch', 'elapsed_time'}


def test_a_resumed_run_hides_later_values(comm, folder):
    for stop in 1, 2:
        train(comm, folder, TensorBoardWriter(comm), stop,
              chainermn.create_multi_node_checkpointer('run', comm, path=folder))
    values, purged = read(os.path.join(folder, 'tensorboard'))
    assert [iteration for iteration, _ in values['mine']] == [2, 4]
    assert purged == [1, 3]


def test_a_folder_that_cannot_be_written(comm, folder, same_error):
    if comm.rank == 0:
        open(os.path.join(folder, 'file'), 'w').close()
    comm.barrier()
    error = same_error(lambda: train(
        comm, folder, TensorBoardWriter(comm, os.path.join(folder, 'file')), 1), failed=0)
    assert isinstance(error, OSError) and os.path.join(folder, 'file') in str(error)


@pytest.mark.slow
@pytest.mark.mpi_skip
def test_a_killed_process_loses_no_points(tmp_path):
    """A checkpoint may follow at once, and the resumed run does not write these points again."""
    script = tmp_path / 'script.py'
    script.write_text(f'''
import os, signal, sys
sys.path[:0] = {[*map(str, pathlib.Path(__file__).parents[:2])]}
import chainermn
from test_tensorboard_writer import train

class Killed(chainermn.extensions.TensorBoardWriter):
    def __call__(self, trainer):
        super().__call__(trainer)
        if trainer.updater.iteration == 3:
            os.kill(os.getpid(), signal.SIGKILL)

comm = chainermn.create_communicator('naive')
train(comm, 'out', Killed(comm, trigger=(1, 'iteration')), 3)
''')
    subprocess.run([sys.executable, script], cwd=tmp_path, timeout=seconds(40))
    values, _ = read(tmp_path / 'out' / 'tensorboard')
    assert all([iteration for iteration, _ in points] == [1, 2, 3] for points in values.values())
    assert {'mine', 'other', 'main/loss', 'epoch', 'elapsed_time'} <= set(values)


def test_without_tensorboardx(comm, monkeypatch):
    if comm.rank == 0:
        monkeypatch.setitem(sys.modules, 'tensorboardX', None)  # as if it were not installed
    with raises_on_all(ImportError, 'TensorBoardWriter failed on rank 0' * (comm.size > 1),
                       'Install it on rank 0 with "pip install tensorboardX"'):
        TensorBoardWriter(comm)
        comm.barrier()
