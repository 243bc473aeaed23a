"""One job at a time uses a name in a folder; the error is the same on all ranks."""
import contextlib
import errno
import fcntl
import os
import pathlib
import subprocess
import sys
import threading

import pytest
from shared_fixtures import raises_on_all

from chainermn.extensions._checkpointing import job_lock
from chainermn.extensions._checkpointing import lock as locking
from chainermn.extensions._checkpointing.job_lock import JobLock
from chainermn.extensions._checkpointing.save_names import SaveNames

PROGRAM = pathlib.Path(__file__).parents[1] / 'lock_alone.py'
HOLDER = '''
held = lock['acquire'](path, 50)
print('has it', flush=True)
sys.stdin.read()
'''


def names_in(folder, name='run'):
    return SaveNames(folder, lambda number, rank: f'{name}.{rank}.{number}')


@pytest.fixture(params=['shared', 'each its own'])
def names(request, comm, tmp_path):
    folder = str(tmp_path)
    return names_in(comm.bcast_obj(folder) if request.param == 'shared' else folder)


def lock_of(comm, is_alone=False):
    return JobLock(comm, 'the state', [0] if is_alone else range(comm.size), is_alone)


@contextlib.contextmanager
def other_job(comm, names, rank, on=None):
    """Another process, started by that rank or ``on`` another one, has the lock of a rank."""
    process = None
    if comm.rank == (rank if on is None else on):
        process = subprocess.Popen(
            [sys.executable, '-I', '-S', PROGRAM, locking.__file__, names.lock_path(rank), HOLDER],
            text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdout.readline() == 'has it\n'
    comm.barrier()
    try:
        yield process
    finally:
        if process is not None:
            process.kill()
            process.communicate()
        comm.barrier()


def held():
    return locking.runtime.get(locking._Locks).held


def has_lock(names, comm):
    return os.path.realpath(names.lock_path(comm.rank)) in held()


@pytest.fixture(autouse=True)
def nothing_is_left():
    before = set(held())  # of extensions that are not collected yet
    yield
    assert set(held()) <= before


def test_another_job_is_one_error_that_names_it(comm, names, monkeypatch):
    monkeypatch.setattr(job_lock, 'TIMEOUT', 0.2)
    for rank in {0, comm.size - 1}:
        lock = lock_of(comm)
        with other_job(comm, names, rank) as process:
            pid = comm.bcast_obj(process and process.pid, root=rank)
            with pytest.raises(RuntimeError, match='the state is in use by another job') as caught:
                lock.acquire(names)
            text = str(caught.value)
            assert f'rank {rank}: ' in text and f'tmp-run.{rank}.N.lock is locked by' in text
            assert f'process {pid} on {os.uname().nodename} since 2' in text
            assert comm.allgather_obj(text) == [text] * comm.size
            assert not lock.is_held and not has_lock(names, comm)  # the others can have theirs
        monkeypatch.setattr(job_lock, 'TIMEOUT', 50)
        lock.acquire(names)
        assert lock.is_held and os.path.exists(names.lock_path(comm.rank))
        lock.release()
        assert not lock.is_held and not os.path.exists(names.lock_path(comm.rank))
        monkeypatch.setattr(job_lock, 'TIMEOUT', 0.2)


@pytest.mark.slow
@pytest.mark.parametrize('rank', [0, -1])
def test_ranks_of_an_earlier_job_that_are_ending_are_waited_for(comm, names, monkeypatch, rank):
    monkeypatch.setattr(job_lock, 'TIMEOUT', 50)
    lock = lock_of(comm)
    with other_job(comm, names, rank % comm.size) as process:
        timer = threading.Timer(1, process.kill) if process is not None else None
        if timer:
            timer.start()
        lock.acquire(names)
        if timer:
            timer.join()
    lock.release()


def test_extensions_of_one_job_share_it(comm, names):
    locks = [lock_of(comm) for _ in range(2)]
    for lock in locks:
        lock.acquire(names)
    locks[0].release()
    comm.barrier()
    assert os.path.exists(names.lock_path(comm.rank))
    comm.barrier()
    del locks, lock  # as if the extension is dropped
    assert not os.path.exists(names.lock_path(comm.rank))


def test_another_folder_takes_the_place_of_the_first(comm, names):
    lock, other = lock_of(comm), names_in(f'{names.folder}/other')
    lock.acquire(names)
    lock.acquire(other)
    assert not os.path.exists(names.lock_path(comm.rank))
    assert os.path.exists(other.lock_path(comm.rank))
    lock.acquire(other)
    assert os.path.exists(other.lock_path(comm.rank))
    lock.release()


def test_only_files_of_its_own_that_a_killed_process_left_are_removed(comm, names):
    """And no temporary file of a process that is writing."""
    last = comm.size
    parts = [f'tmp-{name}.part' for name in (
        f'run.{comm.rank}.5', f'run.{comm.rank}.x', f'run2.{comm.rank}.5', f'run.{last}.5')]

    def left():
        there = [part for part in parts if os.path.exists(f'{names.folder}/{part}')]
        comm.barrier()  # in a shared folder some belong to all ranks
        return there

    for part in parts:
        open(f'{names.folder}/{part}', 'w').close()
    comm.barrier()
    lock, other = lock_of(comm), lock_of(comm)
    lock.acquire(names)
    assert left() == parts[1:]
    for part in parts:
        open(f'{names.folder}/{part}', 'w').close()
    other.acquire(names)  # a thread of this process may be writing
    assert left() == parts
    lock.release()
    other.release()


def test_what_a_killed_larger_job_left_is_removed(comm, names):
    """But nothing of a rank that still runs."""
    ended, runs = comm.size, comm.size + 1
    files = [names.lock_path(ended), *(
        f'{names.folder}/tmp-run.{rank}.5.part' for rank in (ended, runs))]
    if comm.rank == 0:
        for path in files:
            open(path, 'w').close()
    with other_job(comm, names, runs, on=0):
        lock = lock_of(comm)
        lock.acquire(names)
        if comm.rank == 0:
            assert [os.path.exists(path) for path in files] == [False, False, True]
            assert os.path.exists(names.lock_path(runs))
        lock.release()


def test_a_file_system_that_cannot_lock_is_a_warning(comm, names, monkeypatch):
    """Simulated; no temporary file is removed then."""
    def flock(descriptor, operation):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    part = f'{names.folder}/tmp-run.{comm.rank}.5.part'
    open(part, 'w').close()
    last = comm.size - 1
    if comm.rank == last:
        monkeypatch.setattr(fcntl, 'flock', flock)
    lock = lock_of(comm)
    with (pytest.warns(RuntimeWarning, match=rf'not locked(.|\n)*rank {last}: .*tmp-run.{last}.N.'
                                             'lock: .*not supported')
          if comm.rank == 0 else contextlib.nullcontext()):
        lock.acquire(names)
    assert lock.is_held and os.path.exists(part) == (comm.rank == last)
    lock.release()


def test_where_nothing_can_be_written_no_lock_is_needed(comm):
    lock = lock_of(comm)
    lock.acquire(names_in('/proc/none'))
    assert lock.is_held
    lock.release()


def test_an_only_writer_locks_alone(comm, tmp_path, monkeypatch):
    """The others raise the error in their next call."""
    monkeypatch.setattr(job_lock, 'TIMEOUT', 0.2)
    names, lock = names_in(comm.bcast_obj(str(tmp_path))), lock_of(comm, is_alone=True)
    with other_job(comm, names, 0), raises_on_all(RuntimeError, match='in use by another job'):
        if comm.rank == 0:
            lock.acquire(names)
        comm.barrier()
    if comm.rank == 0:
        lock.acquire(names)
        lock.release()
