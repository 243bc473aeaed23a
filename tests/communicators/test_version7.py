"""Communicators of third parties, with the methods of ChainerMN 7 and no more, and proxies.

The tests of functions, links, datasets, iterators and extensions also run with one of them.
"""

import os
import re

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
from contract import CASES, OPS, agree, play, step
from each_case import each_case
from jobs import run_job
from killed_jobs import make_saver
from mpi4py import MPI
from shared_fixtures import raises_on_all
from version7 import THIRD_PARTIES, Version7Communicator

import chainermn
from chainermn.communicators._recognize import as_communicator

pytestmark = pytest.mark.every_size


@pytest.fixture(scope='module', params=THIRD_PARTIES)
def comm(request):
    comm = THIRD_PARTIES[request.param]()
    yield comm
    comm.finalize()


def every(value):
    """The value of each rank, gathered with mpi4py."""
    return MPI.COMM_WORLD.allgather(value)


# --- operations that version 7 does not have ------------------------------------------------------

@each_case('name', [name for name in CASES if name not in vars(Version7Communicator)])
def test_operations_that_it_lacks(comm, name):
    """laws/test_collectives.py calls them with other arguments."""
    comm = as_communicator(comm, 'test')
    agree([play(comm, step(name, comm.size, **own)) for own in (
        [{'op': op} for op in OPS] if 'op' in CASES[name].arguments else [{}])])


def test_errors(comm):
    comm = as_communicator(comm, 'test')
    y = comm.multi_node_mean(np.full(2, 60000, np.float16))  # the sum is too large
    assert y.dtype == np.float16 and (y == np.float16(60000)).all()
    with pytest.raises(TypeError, match='floating-point'):
        comm.multi_node_mean(np.arange(2))
    with raises_on_all(ValueError, match=r'one object for each of the \d ranks but got'):
        comm.scatter_obj([1] * comm.size * 2 if comm.rank == 0 else None)
    with raises_on_all(ValueError, 'each rank only once'):
        comm.new_group([0, 0])


def test_replicas_are_compared(comm):
    comm = as_communicator(comm, 'test')
    comm.check_replicas(L.Linear(2, 1, initialW=1))
    if comm.size > 1:
        with raises_on_all(ValueError, 'check_replicas: 1 of 2 parameters differ'):
            comm.check_replicas(L.Linear(2, 1, initialW=comm.rank))


def test_an_error_of_one_rank_is_raised_on_all(comm):
    comm = as_communicator(comm, 'test')
    failed = comm.size - 1
    error = ZeroDivisionError('not this rank') if comm.rank == failed else None

    with raises_on_all(ZeroDivisionError, 'not this rank'):
        comm._chainermn_channel.share_error('work', error)
        comm.barrier()
    comm._chainermn_channel.share_error('work', None)
    assert comm.allgather_obj(1) == [1] * comm.size


def test_messages_of_functions_in_sequence(comm):
    """A message that needs no gradient is marked, whatever it is."""
    if comm.size == 1 or comm.rank > 1:
        return
    messages = [np.ones(2, 'f'), (np.ones(2, 'f'), np.zeros(3, 'f')), np.ones(33, 'f'),
                np.ones((), 'f'), np.array([True]), np.zeros(0, 'f'), np.arange(3),
                (np.ones(2, 'e'), np.ones(33, 'e'))]
    for x in messages:
        if comm.rank == 0:
            with chainer.no_backprop_mode():
                chainermn.functions.send(x, comm, 1)
        else:
            y = chainermn.functions.recv(comm, 0)
            assert isinstance(y, tuple) == isinstance(x, tuple)
            for got, sent in zip(*((z if isinstance(z, tuple) else (z,)) for z in (y, x)),
                                 strict=True):
                assert got.dtype == sent.dtype
                np.testing.assert_array_equal(got.array, sent)
            assert y[0].creator is not None if isinstance(y, tuple) else y.creator is not None


# --- optimizers -----------------------------------------------------------------------------------

X = np.arange(24, dtype='f').reshape(8, 3) / 8
LR = .05


def gradient(w, rank, update):
    """Of the mean of (x w)^2 / 2 over the batch of a rank."""
    x = X[[(rank + update) % 8, (rank + 3 * update) % 8]].astype('d')
    return x.T @ (x @ w) / 2


def loss(model, rank, update):
    y = model(X[[(rank + update) % 8, (rank + 3 * update) % 8]])
    return F.sum(y * y) / 4


def expected_weights(size):
    w = np.ones(3)
    for update in range(1, 7):  # the first one broadcasts
        w -= LR * sum(gradient(w, rank, update) for rank in range(size)) / size
    return w


def train(comm, **options):
    model = L.Linear(3, 1)
    optimizer = chainermn.create_multi_node_optimizer(
        chainer.optimizers.SGD(LR), comm, **options).setup(model)
    for update in range(3):
        optimizer.update(lambda: loss(model, comm.rank, update))  # noqa: B023


@each_case('name', ['version 7', 'same methods', 'public proxy of version 7'])
def test_options_that_need_more_are_refused(name):
    comm = THIRD_PARTIES[name]()
    for options, text in [
            ({'double_buffering': True}, 'does not support double buffering'),
            ({'compression': 'fp16'}, 'its multi_node_mean_grad takes no compression'),
            *([({'overlap': True}, 'Use overlap=False')] if comm.size > 1 else [])]:
        with raises_on_all(ValueError, text):
            train(comm, **options)
    train(comm)
    comm.finalize()


@pytest.mark.sample(2)
@each_case('how', ['checkpointer', 'snapshot'])
def test_a_training_that_resumes(comm, tmp_path, how):
    """It was killed in update 4, after it had saved update 3."""
    folder = MPI.COMM_WORLD.bcast(str(tmp_path / how))
    for end in 4, 7:
        model = L.Linear(3, 1, nobias=True, initialW=1 + comm.rank)
        optimizer = chainermn.create_multi_node_optimizer(
            chainer.optimizers.SGD(LR), comm).setup(model)
        updater = chainer.training.StandardUpdater(
            chainer.iterators.SerialIterator(range(7), 1, shuffle=False), optimizer,
            converter=lambda batch, device: batch[0],
            loss_func=lambda update, model=model: loss(model, comm.rank, update))
        trainer = chainer.training.Trainer(updater, (end, 'iteration'), folder)
        saver = make_saver(comm, folder, how)
        trainer.extend(saver, trigger=(3, 'iteration'))
        if how == 'checkpointer':
            assert saver.maybe_load(trainer, optimizer) == (3 if end == 7 else None)
        trainer.run()
    assert updater.iteration == 7
    np.testing.assert_allclose(model.W.array[0], expected_weights(comm.size), 1e-5)


# --- objects that are no communicators ------------------------------------------------------------


def test_a_method_that_a_stand_in_lacks_is_named():
    class Small:
        rank, size = 0, 1

        def bcast_obj(self, obj, root=0):
            return obj

    iterator = chainermn.iterators.create_synchronized_iterator
    with pytest.raises(AttributeError, match="'Small' object has no attribute 'gather_obj'"):
        iterator(chainer.iterators.SerialIterator([0], 1), Small())


# --- the end of the job ---------------------------------------------------------------------------

PROGRAM = '''
import sys, time
sys.path.insert(0, {tests!r})
import chainer, numpy as np
import chainermn
from version7 import Version7Communicator
comm = Version7Communicator()
model = chainer.links.Linear(2, 1)
optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.SGD(), comm).setup(model)
def loss(update):
    if update == 2 and comm.rank == 1:
        raise ZeroDivisionError('only here')
    return chainer.functions.sum(model(np.ones((1, 2), 'f')))
for update in range(4):
    optimizer.update(loss, update)
'''


@pytest.mark.mpi_skip
def test_an_error_in_an_update_of_one_rank_ends_the_job(tmp_path):
    """No check raises the error on the other ranks, because they wait for this rank."""
    done = run_job(tmp_path, PROGRAM.format(tests=os.path.dirname(os.path.dirname(__file__))))
    assert done.returncode != 0
    assert re.search(r'rank 1 of 2 .* aborts the job: uncaught ZeroDivisionError', done.stdout)

