"""Jobs that resume from their last checkpoint, train until an iteration, and are killed there."""
import tempfile

from chainer import iterators
from chainer.training import extensions

import chainermn
from chainermn.extensions import multi_node_snapshot
from chainermn.iterators import (
    MultiNodeOrderSampler,
    create_multi_node_iterator,
    create_synchronized_iterator,
)

ITERATORS = {
    'serial': iterators.SerialIterator,
    'thread': iterators.MultithreadIterator,
    'process': lambda *args, **options: iterators.MultiprocessIterator(
        *args, n_processes=1, n_prefetch=2, shared_mem=1000, **options),
}


def make_iterator(comm, examples, case):
    """Return an iterator of the case's kind, which assigns examples to ranks as the case says."""
    kind, batch, shuffle = ITERATORS[case['kind']], case['batch'], case['shuffle']
    if case['data'] == 'sampler':
        return kind(examples, batch, order_sampler=MultiNodeOrderSampler(
            len(examples), comm, shuffle=shuffle))
    if case['data'] in ('scattered', 'uneven'):
        examples = chainermn.scatter_dataset(
            examples, comm, force_equal_length=case['data'] == 'scattered')
    iterator = kind(examples, batch, shuffle=shuffle)
    if case['data'] == 'multi-node':
        return create_multi_node_iterator(iterator, comm, comm.size - 1)
    if case['data'] == 'synchronized':
        return create_synchronized_iterator(iterator, comm)
    return iterator


def make_saver(comm, folder, how):
    """Return an object that saves; its ``finalize`` keeps all files, as if the job was killed."""
    if how == 'snapshot':
        return multi_node_snapshot(comm, extensions.snapshot(autoload=True, n_retains=3))
    saver = chainermn.create_multi_node_checkpointer('run', comm, path=folder)
    saver.finalize = lambda: (saver._saver.flush(), saver._saver.lock.release())
    return saver


def run_loop(saver, target, step, end, interval):
    """Train without a Trainer; ``target`` is a dict of the objects to save."""
    iteration = saver.maybe_load(target) or 0
    while iteration < end:
        iteration += 1
        step(next(target['iterator']))
        if iteration % interval == 0:
            saver.save(target, iteration)
    saver.finalize()


def new_folder(comm, parent):
    """Return a new folder, the same on all ranks."""
    return comm.bcast_obj(tempfile.mkdtemp(dir=parent) if comm.rank == 0 else None)


def some_of(comm, n):
    """Return a communicator of the first ``n`` ranks, and None on the others."""
    part = comm.split(int(comm.rank >= n), comm.rank)
    return part if comm.rank < n else None
