"""The files of a completed training stay until all ranks have ended without an error."""
import os
import pathlib
import re

import chainer
import pytest
from jobs import run_job
from mpi4py import MPI
from small_trainer import make_trainer
from time_limits import seconds

import chainermn


def train(comm, folder, stop=3):
    """Train; return the iterations of this run, and the checkpointer."""
    trainer = make_trainer(comm, folder, (stop, 'iteration'))
    checkpointer = chainermn.create_multi_node_checkpointer('run', comm)
    trainer.extend(checkpointer, trigger=(1, 'iteration'))
    start = checkpointer.maybe_load(trainer, trainer.updater.get_optimizer('main')) or 0
    trainer.run()
    return list(range(start + 1, trainer.updater.iteration + 1)), checkpointer


def saves(folder):
    return sorted(name for name in os.listdir(folder) if name.startswith('run.'))


def test_the_next_training_starts_from_scratch(comm, folder):
    """One process may train several times, such as to compare options; only a restart resumes."""
    for _ in range(2):
        iterations, _ = train(comm, folder)
        assert iterations == [1, 2, 3]
        assert f'run.{comm.rank}.3' in saves(folder)
        comm.barrier()


def test_finalize_removes_the_files_at_once(comm, folder):
    _, checkpointer = train(comm, folder)
    checkpointer.finalize()
    comm.barrier()
    assert os.listdir(folder) == []


def test_a_save_after_the_training_stays(comm, folder):
    _, checkpointer = train(comm, folder)
    checkpointer.save(chainer.links.Linear(2, 2), 9)
    comm.barrier()
    assert saves(folder) == [f'run.{rank}.9' for rank in range(comm.size)]


def test_a_folder_that_cannot_be_written(comm, folder, same_error):
    """It fails before training, not at the first checkpoint."""
    out = folder
    if comm.rank == comm.size - 1:
        open(os.path.join(folder, 'file'), 'w').close()
        out = os.path.join(folder, 'file', 'out')
    comm.barrier()
    checkpointer = chainermn.create_multi_node_checkpointer('run', comm)
    trainer = make_trainer(comm, folder, (1, 'iteration'))
    assert checkpointer.maybe_load(trainer, path=out) is None  # a folder may be read only
    trainer.extend(checkpointer, trigger=(1, 'iteration'))
    error = same_error(trainer.run, table=False)
    assert isinstance(error, OSError) and f'{folder}/file' in str(error)
    assert f'rank {comm.size - 1}: ' in str(error) and 'Pass a different folder' in str(error)
    assert trainer.updater.iteration == 0


SCRIPT = '''
import os, signal, sys
sys.path[:0] = {paths}
import chainermn
from test_removal import train

comm = chainermn.create_communicator('naive')
iterations, _ = train(comm, 'out')
if comm.rank == 0:
    print('trained', iterations, flush=True)
what, rank = sys.argv[1], int(sys.argv[2])
if comm.rank == rank and what == 'error':
    raise RuntimeError('the disk is full')
if comm.rank == rank and what == 'exit':
    sys.exit(3)
if comm.rank == rank and what == 'kill':
    os.kill(os.getpid(), signal.SIGKILL)
if what == 'finalized':
    comm.finalize()
if what == 'blocked' and comm.rank == 0:  # as if the folder were read only; root may write there
    from chainermn.extensions._checkpointing import save_names
    actual = save_names.remove

    def remove(path):
        if path.endswith('run.0.3'):
            raise PermissionError(13, 'Permission denied', path)
        actual(path)

    save_names.remove = remove
'''


LOCKED = SCRIPT + '''
import fcntl, time
if comm.rank == 1:  # rank 0 is ending
    time.sleep({seconds})
    with open('out/tmp-run.0.N.lock', 'a') as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            print('not locked')
        except BlockingIOError:
            print('locked')
    assert os.path.exists('out/run.0.3')
'''


@pytest.mark.skipif(MPI.COMM_WORLD.size > 1, reason='starts mpiexec itself')
def test_the_files_are_locked_until_they_are_removed(tmp_path):
    """Else another job that waits for the lock could load some of them."""
    script = LOCKED.format(
        paths=[*map(str, pathlib.Path(__file__).parents[:3])], seconds=seconds(1))
    done = run_job(tmp_path, script, 'end', '0', limit=60)
    assert done.returncode == 0 and '\nlocked\n' in done.stdout, done.stdout
    assert os.listdir(tmp_path / 'out') == []


@pytest.mark.slow
@pytest.mark.skipif(MPI.COMM_WORLD.size > 1, reason='starts mpiexec itself')
def test_a_failure_after_the_training_keeps_the_files(tmp_path):
    """A restart does not train again; after a clean end, nothing is left."""
    script = SCRIPT.format(paths=[*map(str, pathlib.Path(__file__).parents[:3])])

    def run(what, rank=0):
        done = run_job(tmp_path, script, what, str(rank), limit=60, PYTHONWARNINGS='default')
        trained = re.search(r'trained (.*)', done.stdout)
        assert trained, done.stdout
        return trained[1], done

    for i, (what, rank) in enumerate([('error', 1), ('exit', 0), ('kill', 1)]):
        trained, done = run(what, rank)
        assert trained == ('[]' if i else '[1, 2, 3]') and done.returncode != 0, done.stdout
        assert {'run.0.3', 'run.1.3'} <= set(saves(tmp_path / 'out')), what
    trained, done = run('nothing')
    assert trained == '[]' and done.returncode == 0, done.stdout
    assert os.listdir(tmp_path / 'out') == []
    trained, done = run('finalized')
    assert trained == '[1, 2, 3]' and done.returncode == 0, done.stdout
    assert os.listdir(tmp_path / 'out') == []
    _, done = run('blocked')  # rank 0 cannot remove it, and the other rank does not wait
    assert done.returncode == 0 and done.stdout.count('could not remove the') == 1, done.stdout
    assert 'rank 0: ' in done.stdout and os.listdir(tmp_path / 'out') == ['run.0.3']
