"""No rank waits for another, nothing that was pushed is lost, and the end is clean."""

import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from mpi4py import MPI
from time_limits import seconds

from chainermn.kvstore import RowSparse

alone = pytest.mark.skipif(MPI.COMM_WORLD.size > 1, reason='starts mpiexec itself')


def adding(kv):
    def update(key, input, stored):
        before = stored.copy()
        time.sleep(0)  # where another update would get in
        stored[...] = before + input
    kv.set_updater(update)


def pushes_of(rank, shapes):
    """What a rank pushes: keys and integers, in an order of its own."""
    random = np.random.RandomState(rank)
    for _ in range(60):
        keys = random.permutation(len(shapes))[:random.randint(1, len(shapes))].tolist()
        yield keys, [random.randint(-9, 10, shapes[key]) for key in keys]


@pytest.mark.parametrize('bound', [1_000_000, 1], ids=['whole', 'cut'])
def test_nothing_is_lost(create, comm, bound):
    """Integers that all ranks push at random times add up, whatever the order."""
    shapes = [(3,), (40, 5), (1,), (7, 2), (1000,)]
    kv = create('dist_async', bigarray_bound=bound)
    kv.init(list(range(5)), [np.zeros(shape, int) for shape in shapes])
    adding(kv)
    for n, (keys, values) in enumerate(pushes_of(comm.rank, shapes)):
        kv.push(keys, values)
        if n % 7 == comm.rank:
            time.sleep(.002)
        if n % 5 == 0:
            assert [x.shape for x in kv.pull(keys)] == [shapes[key] for key in keys]
    kv.barrier()
    expected = [np.zeros(shape, int) for shape in shapes]
    for rank in range(comm.size):
        for keys, values in pushes_of(rank, shapes):
            for key, value in zip(keys, values, strict=True):
                expected[key] += value
    for x, y in zip(kv.pull(list(range(5))), expected, strict=True):
        np.testing.assert_array_equal(x, y)


def test_many_threads_of_a_rank(create, comm):
    kv = create('dist_async', bigarray_bound=4)
    kv.init([0, 'cut'], [np.zeros(3, int), np.zeros(10, int)])
    adding(kv)

    def push():
        for _ in range(20):
            kv.push([0, 'cut'], [np.ones(3, int), np.ones(10, int)])

    threads = [threading.Thread(target=push) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    kv.barrier()
    assert (kv.pull(0) == 60 * comm.size).all() and (kv.pull('cut') == 60 * comm.size).all()


def test_row_sparse_pushes(create, comm):
    kv = create('dist_async', bigarray_bound=1)
    kv.init('e', RowSparse([], np.zeros((0, 2), int), (10, 2)))
    adding(kv)
    for i in range(10):
        kv.push('e', RowSparse([i, comm.rank, i], np.ones((3, 2), int), (10, 2)))
    kv.barrier()
    expected = np.full((10, 2), 2 * comm.size)
    expected[:comm.size] += 10
    found = kv.row_sparse_pull('e', row_ids=np.arange(10))
    np.testing.assert_array_equal(found.todense(), expected)


def test_a_rank_sees_what_it_pushed(create, comm):
    kv = create('dist_async')
    keys = list(range(comm.size))
    kv.init(keys, [np.zeros(2)] * comm.size)
    for i in range(20):
        kv.push(comm.rank, np.full(2, float(i)))  # to a key of its own
        assert kv.pull(comm.rank).tolist() == [i, i]
    kv.barrier()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize('how', ['sleeps', 'computes', 'waits in MPI', 'caught an exception'])
def test_goes_on_while_a_rank_does_something_else(create, comm, how):
    """Rank 0 does not come back before the others have trained, with its keys as well."""
    kv = create('dist_async', bigarray_bound=4)
    kv.init([0, 'cut'], [np.zeros(3, int), np.zeros(10, int)])
    adding(kv)
    steps = 30
    if comm.rank > 0:
        for _ in range(steps):
            kv.push([0, 'cut'], [np.ones(3, int), np.ones(10, int)])
            kv.pull([0, 'cut'])
        comm.send_obj('trained', 0)
    elif how == 'sleeps':
        while (kv._server.stored[0] < steps * (comm.size - 1)).any():
            time.sleep(.05)
    elif how == 'computes':
        x = np.ones((200, 200))
        while (kv._server.stored[0] < steps * (comm.size - 1)).any():
            x = x @ x / 200
    elif how == 'caught an exception':
        with pytest.raises(ZeroDivisionError):
            raise ZeroDivisionError
    if comm.rank == 0:
        for rank in range(1, comm.size):
            assert comm.recv_obj(rank) == 'trained'
    comm.barrier()
    assert (kv.pull(0) == steps * (comm.size - 1)).all()
    kv.barrier()


def test_an_updater_that_raises(create, comm):
    """Raises on the rank that pushed; the servers go on."""
    def update(key, input, stored):
        if (input < 0).any():
            raise ArithmeticError(f'negative {key}')
        stored += input

    kv = create('dist_async')
    keys = list(range(comm.size))
    kv.init(keys, [np.zeros(2, int)] * comm.size)
    kv.set_updater(update)
    if comm.rank == comm.size - 1:
        for key in keys:
            with pytest.raises(ArithmeticError, match=f'negative {key}'):
                kv.push(key, np.full(2, -1))
    kv.push(keys, [np.ones(2, int)] * comm.size)
    kv.barrier()
    assert all((x == comm.size).all() for x in kv.pull(keys))
    kv.barrier()


START = '''
import time
import numpy as np
import chainermn
comm = chainermn.create_communicator('naive')
kv = chainermn.kvstore.create('dist_async', comm, bigarray_bound=4)
kv.init([0, 1, 'cut'], [np.zeros(3), np.zeros(2), np.zeros(10)])
def train(steps):
    for _ in range(steps):
        kv.push([0, 1, 'cut'], [np.ones(3), np.ones(2), np.ones(10)])
        kv.pull([0, 1, 'cut'])
        time.sleep(.01)
'''


@alone
@pytest.mark.parametrize('body, text', [
    ('train(10 * comm.rank)', ''),
    ('with kv: train(10 * comm.rank)', ''),
    ('''
try:
    if comm.rank == 1:
        raise RuntimeError('out of data')
    train(20)
except RuntimeError:
    pass
''', ''),
    ('if comm.rank == 1: raise RuntimeError("out of data")\ntrain(10**9)', 'out of data'),
])
def test_the_end(tmp_path, body, text):
    script = tmp_path / 'script.py'
    script.write_text(START + body)
    done = subprocess.run(['mpiexec', '-n', '3', sys.executable, str(script)], text=True,
                          timeout=seconds(40), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          env=os.environ | {'OMP_NUM_THREADS': '1'})
    if text:
        assert done.returncode != 0 and text in done.stdout
    else:
        assert (done.returncode, done.stdout) == (0, '')
