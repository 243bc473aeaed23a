"""Processes that read for ShardedIterator: the same batches, and no process left behind."""

import contextlib
import gc
import itertools
import logging
import os
import pathlib
import random
import signal
import threading
import time

import numpy as np
import pytest
from jobs import run_job
from ranks_in_threads import Alone
from shared_fixtures import create

import chainermn
from chainermn.iterators import ShardedIterator, ShardError, _reader_processes


@pytest.fixture(scope='module')
def comm():
    return create('naive')


def process_ids(iterator):
    """The processes of an iterator that has started to read."""
    return [each._process.pid for each in iterator._source._items._processes]


def wait_until_ended(processes):
    for each in processes:
        stat = pathlib.Path(f'/proc/{each}/stat')
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # ended, and waited for
            while stat.read_text().rpartition(')')[2].split()[0] not in 'ZX':
                time.sleep(.05)


@pytest.mark.compares_calls
@pytest.mark.mpi(min_size=2)
def test_an_error_is_raised_on_all_ranks_with_its_traceback(comm):
    last = comm.size - 1

    def fail_on_the_last_rank(x, rank=comm.rank):
        if rank == last and x >= 50:
            raise OverflowError('too bright')
        return x

    iterator = ShardedIterator([range(100)], 2, comm, transform=fail_on_the_last_rank,
                               shuffle=False, n_processes=1)
    with pytest.raises(ShardError, match=r'shard 0 \(range\), sample 5\d: OverflowError: too br'
                       ) as caught:
        for _ in iterator:
            comm.allgather_obj(0)
    assert len({*comm.allgather_obj(str(caught.value))}) == 1
    if comm.rank == last:
        cause = str(caught.value.__cause__)
        assert 'in fail_on_the_last_rank' in cause and cause.count('Traceback') == 1
        assert os.path.dirname(chainermn.__file__) not in cause
    iterator.finalize()


@pytest.mark.compares_calls
@pytest.mark.slow
@pytest.mark.mpi(min_size=2)
def test_a_killed_process_is_an_error_on_all_ranks(comm):
    iterator = ShardedIterator([range(10 * comm.size)], 2, comm, n_processes=1)
    used = [next(iterator)]
    if comm.rank == comm.size - 1:
        os.kill(process_ids(iterator)[0], signal.SIGKILL)
    with pytest.raises(ShardError, match=r'reader process \d+.* was killed by signal 9'):
        for batch in iterator:
            used.append(batch)
            comm.allgather_obj(0)
    used += itertools.islice(iterator, 5)  # new processes continue at the same position
    iterator.finalize()
    expected = ShardedIterator([range(10 * comm.size)], 2, comm)
    assert [*itertools.islice(expected, len(used))] == used
    expected.finalize()


class Slow:
    def __len__(self):
        return 10

    def __getitem__(self, i):
        time.sleep(1000 if i > 2 else 0)
        return i


@pytest.mark.mpi_skip
@pytest.mark.slow
def test_processes_end_with_the_iterator(monkeypatch):
    monkeypatch.setattr(_reader_processes, '_GRACE', .2)
    gc.collect()  # files of earlier tests
    before = threading.active_count(), len(os.listdir('/proc/self/fd'))
    for shard, end in [(Slow(), 'finalize'), (range(10), 'reset'), (range(10), 'delete')]:
        iterator = ShardedIterator([shard], 1, Alone(), shuffle=False, n_processes=1)
        next(iterator)
        processes = process_ids(iterator)
        if end != 'delete':
            getattr(iterator, end)()
        del iterator
        gc.collect()
        wait_until_ended(processes)
        assert not any(os.path.exists(f'/proc/{each}') for each in processes)  # waited for
    assert (threading.active_count(), len(os.listdir('/proc/self/fd'))) == before


SCRIPT = """
import os, sys, signal
import chainermn


class Pair:
    def __init__(self, x):
        self.x = x, x + offset

offset = 3
comm = chainermn.create_communicator('naive')  # there is no main guard
iterator = chainermn.iterators.ShardedIterator(
    [range(100)], 5, comm, transform=lambda x: Pair(x), n_processes=1)
found = comm.allgather_obj([each.x for _ in range(3) for each in next(iterator)])
assert all(isinstance(each, Pair) for each in next(iterator))
assert len({pair for pairs in found for pair in pairs}) == 15 * comm.size, found
ids = comm.allgather_obj([each._process.pid for each in iterator._source._items._processes])
if comm.rank == 0:
    print('processes', *sum(ids, []), flush=True)
comm.barrier()
if sys.argv[1] == 'killed' and comm.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[1] == 'aborted' and comm.rank == 1:
    raise ValueError('of the program')
"""


@pytest.mark.mpi_skip
@pytest.mark.parametrize('end', [
    'killed', *(pytest.param(each, marks=pytest.mark.slow) for each in ('normal', 'aborted'))])
def test_a_script_without_main_guard(tmp_path, end):
    """Its processes end with the job, however it ends."""
    job = run_job(tmp_path, SCRIPT, end)
    assert (job.returncode == 0) == (end == 'normal'), job.stdout
    _, _, processes = job.stdout.partition('processes ')
    processes = processes.splitlines()[0].split()
    assert len(processes) == 2
    wait_until_ended(processes)


@pytest.mark.mpi_skip
def test_what_is_skipped_is_logged_by_the_rank(caplog):
    def fail_at_three(x):
        if x % 5 == 3:
            raise ValueError('three')
        return x

    iterator = ShardedIterator([range(11)], 2, Alone(), transform=fail_at_three, shuffle=False,
                               repeat=False, on_error='skip', n_processes=2)
    with caplog.at_level(logging.WARNING, 'chainermn'):
        assert [*itertools.chain(*iterator)] == [0, 1, 2, 4, 5, 6, 7, 9, 10]
    assert iterator.skipped == 2 and iterator.epoch == 1 and iterator.is_new_epoch
    assert caplog.messages == [
        f'skipped: shard 0 (range), sample {i}: ValueError: three' for i in (3, 8)]


@pytest.mark.mpi_skip
def test_what_cannot_be_pickled_is_named():
    lock = threading.Lock()
    iterator = ShardedIterator([range(10)], 2, Alone(), n_processes=1,
                               transform=lambda x: (x, lock))
    with pytest.raises(TypeError, match='n_processes=1: the shards, reader or transform cannot be'):
        next(iterator)
    iterator = ShardedIterator([range(10)], 2, Alone(), n_processes=1,
                               transform=lambda x: threading.Lock())
    with pytest.raises(ShardError, match='cannot pickle'):
        next(iterator)


@pytest.mark.mpi_skip
@pytest.mark.slow
def test_random_numbers_are_those_of_the_seed():
    def random_numbers(seed, n_processes):
        iterator = ShardedIterator([range(10)], 2, Alone(), seed=seed, n_processes=n_processes,
                                   transform=lambda x: (random.random(), np.random.rand()))
        found = [*itertools.islice(iterator, 4)]
        iterator.finalize()
        return found

    first = random_numbers(0, 2)
    assert random_numbers(0, 1)[:2] == first[::2]
    assert len({x for batch in (*first, *random_numbers(1, 1)) for pair in batch for x in pair}
               ) == 2 * 2 * 8
