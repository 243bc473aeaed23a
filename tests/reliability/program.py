"""The program of the fault matrix: ``program.py WAY PLACE COMMUNICATOR FOLDER``.

All ranks go to a place; there the last rank ends, or hangs, in a way.
"""

import atexit
import itertools
import os
import signal
import sys
import threading
import time

import chainer
import numpy as np
from mpi4py.MPI import COMM_WORLD

import chainermn
import chainermn.kvstore

sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import contract

FOLDER = ''


def _raise():
    raise ValueError('no such luck')


def _raise_in_a_thread():
    threading.Thread(target=_raise, name='loader').start()
    time.sleep(3600)


def _take_all_memory():
    np.ones(1 << 55)


def _kill(number):
    os.kill(os.getpid(), number)
    time.sleep(3600)


def _loop():
    while True:
        pass


#: Ways to end a rank, with the expected cause and location in the message.
WAYS = {
    'exception': (_raise, 'uncaught ValueError', 'ValueError: no such luck'),
    'exception in a thread': (_raise_in_a_thread, 'uncaught ValueError in thread loader',
                              'ValueError: no such luck'),
    'MemoryError': (_take_all_memory, 'uncaught .*MemoryError', 'in _take_all_memory'),
    'sys.exit(3)': (lambda: sys.exit(3), 'sys.exit with status 3', ''),
    'sys.exit(0) alone': (lambda: sys.exit(0),
                          'end of the script|failed during an operation', ''),
    'os._exit(3)': (lambda: os._exit(3), 'os._exit with status 3', 'in <lambda>'),
    'SIGTERM': (lambda: _kill(signal.SIGTERM), 'killed by SIGTERM', 'in _kill'),
    'SIGKILL': (lambda: _kill(signal.SIGKILL), 'killed by SIGKILL', ''),
    'SIGSEGV': (lambda: _kill(signal.SIGSEGV), 'killed by SIGSEGV', 'in _kill'),
    'SIGSTOP': (lambda: _kill(signal.SIGSTOP), 'does not respond', ''),
    'endless loop': (_loop, '', 'in _loop'),
}
#: Ways that only a time limit ends.
HANGS = ('SIGSTOP', 'endless loop')


def fault():
    """End or hang this rank; record the time for the runner."""
    write_down_shared_memory()
    with open(f'{FOLDER}/when', 'w') as file:
        file.write(str(time.time()))
    WAYS[sys.argv[1]][0]()


def write_down_shared_memory():
    """Record shared memory, so that the runner can check whether it is freed."""
    with open('/proc/self/maps') as maps, open(f'{FOLDER}/shared-{os.getpid()}', 'w') as file:
        file.writelines(path for path in (line.split(None, 5)[-1] for line in maps)
                        if path.startswith('/dev/shm/') and '(deleted)' not in path)


OPERATIONS = (*contract.NAMES, 'check_replicas')


def inside(comm, is_last, operation):
    """Call an operation in which the last rank fails after the consistency check."""
    if is_last:
        for name in ('same', 'gather_equal', 'gather', 'bcast'):
            before = getattr(comm._context.check, name)

            def after(*args, before=before):
                result = before(*args)
                fault()
                return result
            setattr(comm._context.check, name, after)
    if operation == 'check_replicas':
        comm.check_replicas(contract.model())
    else:
        contract.call(comm, operation)
    if operation != 'finalize':
        comm.barrier()  # an operation may finish before the others need this rank


def before_a_communicator(name, is_last):
    """The others create their first communicator."""
    if is_last:
        fault()
    chainermn.create_communicator(name)


def making(name, is_last):
    """While all create their first communicator."""
    if is_last:
        from chainermn._transport import lifetime
        duplicates = lifetime.duplicates

        def duplicated(mpi_comm):
            fault()
            return duplicates(mpi_comm)
        lifetime.duplicates = duplicated
    chainermn.create_communicator(name).barrier()


def before(comm, is_last):
    """The others are in their first collective."""
    if is_last:
        fault()
    comm.barrier()


def message(comm, is_last):
    """The others receive from it, and call no collective."""
    if is_last:
        fault()
    comm.recv(comm.size - 1, 0)


def shared_memory(comm, is_last):
    """During an exchange."""
    if is_last:
        from chainermn._transport.shared_memory.window import Window
        publish = Window.publish

        def published(window, count):
            publish(window, count)
            if count == 3:
                fault()
        Window.publish = published
    comm.allreduce(np.ones(1 << 20, 'f'))
    comm.barrier()


class Target:
    """The object in the checkpoint."""

    def __init__(self, is_last):
        self.is_last = is_last

    def serialize(self, serializer):
        serializer('x', np.ones(1000))
        if self.is_last:
            fault()


def checkpoint(comm, is_last):
    """While it writes a checkpoint."""
    checkpointer = chainermn.create_multi_node_checkpointer('matrix', comm, path=FOLDER)
    checkpointer.save(Target(is_last), 1)
    checkpointer.save(Target(False), 2)
    comm.barrier()


class Images(chainer.dataset.DatasetMixin):
    """Loaded by another process."""

    def __init__(self, is_faulty=False):
        self.is_faulty = is_faulty

    def __len__(self):
        return 100

    def get_example(self, i):
        if self.is_faulty and i == 17:
            fault()
        return np.ones(3, 'f')


def loaders(comm, is_last):
    """While other processes load its data."""
    iterator = chainer.iterators.MultiprocessIterator(Images(), 5, n_processes=2)
    for n in range(6):
        next(iterator)
        comm.barrier()
        if is_last and n == 3:
            fault()


def in_a_loader(comm, is_last):
    """The fault is in a process that loads data, not in the rank."""
    iterator = chainer.iterators.MultiprocessIterator(Images(is_last), 5, n_processes=2,
                                                      shuffle=False)
    for _ in range(6):
        next(iterator)
        comm.barrier()


class _Fault(chainer.FunctionNode):
    """Ends the rank during backward."""

    def forward(self, xs):
        return xs[0].copy(),

    def backward(self, indexes, gradients):
        fault()
        return gradients


def overlap(comm, is_last):
    """In backward, while gradients of other layers are exchanged."""
    model = chainer.Sequential(*(chainer.links.Linear(100, 100) for _ in range(4)))
    optimizer = chainermn.create_multi_node_optimizer(
        chainer.optimizers.SGD(), comm, overlap='always', bucket_mb=.01).setup(model)
    for n in range(4):
        y = model[1](model[0](np.ones((1, 100), 'f')))
        if is_last and n == 2:
            y, = _Fault().apply((y,))
        loss = chainer.functions.sum(model[3](model[2](y)))
        optimizer.update(lambda loss=loss: loss)


def pipeline(comm, is_last):
    """In backward of the last stage, while the others compute other micro-batches."""
    model = chainermn.MultiNodeChainList(comm)
    model.add_link(chainer.links.Linear(3, 3), None if comm.rank == 0 else comm.rank - 1,
                   None if is_last else comm.rank + 1)
    micro_batches = itertools.count()

    def loss(y, t):
        if next(micro_batches) == 2:
            y, = _Fault().apply((y,))
        return chainer.functions.mean_squared_error(y, t)

    chainermn.Pipeline(model, loss, n_micro_batches=6)(*np.ones((2, 12, 3), 'f'))


def kvstore(comm, is_last):
    """While the others push to it and pull from it."""
    store = chainermn.kvstore.create('dist_sync', comm)
    x = np.ones(1000, 'f')
    store.init('w', x)
    for n in range(4):
        if is_last and n == 2:
            fault()
        store.push('w', x)
        store.pull('w', x)


def at_exit(comm, is_last):
    """While the program ends."""
    if is_last:
        atexit.register(fault)


PLACES = {'before an operation': before, 'in a message': message, 'in shared memory': shared_memory,
          'with overlap': overlap, 'in a kvstore': kvstore,
          'in a checkpoint': checkpoint, 'with data loaders': loaders,
          'in a data loader': in_a_loader, 'at exit': at_exit, 'in a pipeline': pipeline}
#: Places that create the communicator; they get its name.
FIRST = {'before a communicator': before_a_communicator, 'in create_communicator': making}


def main():
    """Run the place."""
    global FOLDER
    _, _, place, name, FOLDER = sys.argv
    is_last = COMM_WORLD.rank == COMM_WORLD.size - 1
    write_down_shared_memory()
    if place in FIRST:
        FIRST[place](name, is_last)
        return
    comm = chainermn.create_communicator(name)
    write_down_shared_memory()
    if place in PLACES:
        PLACES[place](comm, is_last)
    else:
        inside(comm, is_last, place)


if __name__ == '__main__':
    main()
