"""Deadlocks of differentiable functions, links, optimizers, iterators and stores."""

import concurrent.futures
import logging.handlers
import queue
import threading
import time

import chainer
from deadlock_case import ARRAY, LARGE, deadlock, loss, model

import chainermn
from chainermn import functions


@deadlock(3)
def ring_of_multi_node_chain_list(comm):
    """Every rank begins with a receive."""
    right, left = (comm.rank + 1) % 3, (comm.rank - 1) % 3
    parts = chainermn.MultiNodeChainList(comm)
    parts.add_link(model(), rank_in=left, rank_out=right)
    parts()  # in chainermn.functions.recv: 0 waits for 2, 1 waits for 0, 2 waits for 1


@deadlock(2, bystanders=1)
def links_that_both_send_first(comm):
    parts = chainermn.MultiNodeChainList(comm)
    parts.add_link(model(), rank_out=1 - comm.rank)
    parts.add_link(model(), rank_in=1 - comm.rank)
    parts(ARRAY[None])  # in chainermn.functions.send: 0 waits for 1, 1 waits for 0


@deadlock(2, bystanders=1)
def functions_that_both_receive_first(comm):
    functions.recv(comm, 1 - comm.rank)  # in chainermn.functions.recv: 0 waits for 1, 1 waits for 0


@deadlock(2)
def functions_in_different_order(comm):
    x = chainer.Variable(ARRAY)
    if comm.rank == 0:
        functions.send(x, comm, 1, tag=1)  # in chainermn.functions.send: 0 waits for 1
        functions.send(x, comm, 1, tag=2)
    else:
        functions.recv(comm, 0, tag=2)  # in chainermn.functions.recv: 1 waits for 0
        functions.recv(comm, 0, tag=1)


@deadlock(2)
def sender_that_does_not_run_backward(comm):
    """It sends the next array while the receiver sends the gradient of the first one."""
    x = chainer.Variable(LARGE)
    if comm.rank == 0:
        functions.send(x, comm, 1)
        functions.send(x, comm, 1)  # in chainermn.functions.send: 0 waits for 1
    else:
        y = chainer.functions.sum(functions.recv(comm, 0))
        y.backward()  # in backward of chainermn.functions.recv: 1 waits for 0


@deadlock(2)
def receiver_that_does_not_run_backward(comm):
    """It receives the next array while the sender waits for the gradient of the first one."""
    if comm.rank == 0:
        y = functions.send(chainer.Variable(ARRAY), comm, 1)
        y.backward()  # in backward of chainermn.functions.send: 0 waits for 1
    else:
        functions.recv(comm, 0)
        functions.recv(comm, 0)  # in chainermn.functions.recv: 1 waits for 0


@deadlock(2)
def both_wait_for_gradients(comm):
    x = chainer.Variable(ARRAY)
    if comm.rank == 0:
        y = functions.send(x, comm, 1)
        functions.recv(comm, 1)
    else:
        functions.recv(comm, 0)
        y = functions.send(x, comm, 0)
    y.backward()  # in backward of chainermn.functions.send: 0 waits for 1, 1 waits for 0


@deadlock(2)
def gradient_that_is_never_sent(comm):
    """Rank 1 does not run backward."""
    if comm.rank == 0:
        y = functions.send(chainer.Variable(ARRAY), comm, 1)
        y.backward()  # in backward of chainermn.functions.send: 0 waits for 1
    else:
        functions.recv(comm, 0)
    comm.barrier()  # 1 waits for 0


@deadlock(3)
def gradients_around_a_ring(comm):
    """Rank 2 waits for a message of rank 1 instead of running backward."""
    x = chainer.Variable(ARRAY)
    if comm.rank == 0:
        y = functions.send(x, comm, 1)
        y.backward()  # in backward of chainermn.functions.send: 0 waits for 1
    elif comm.rank == 1:
        y = functions.send(functions.recv(comm, 0), comm, 2)
        y.backward()  # in backward of chainermn.functions.send: 1 waits for 2
    else:
        functions.recv(comm, 1)
        comm.recv(0, 0)  # 2 waits for 0


@deadlock(3)
def functions_with_wrong_peer(comm):
    x = chainer.Variable(ARRAY)
    if comm.rank == 0:
        functions.send(x, comm, 1)  # in chainermn.functions.send: 0 waits for 1
    elif comm.rank == 1:
        functions.recv(comm, 2)  # in chainermn.functions.recv: 1 waits for 2
    else:
        functions.recv(comm, 0)  # in chainermn.functions.recv: 2 waits for 0


@deadlock(2)
def functions_of_two_communicators(comm, second):
    x = chainer.Variable(ARRAY)
    if comm.rank == 0:
        functions.allgather(comm, x)  # 0 waits for 1
        functions.bcast(second, x)
    else:
        functions.bcast(second, x)  # 1 waits for 0
        functions.allgather(comm, x)


@deadlock(2)
def backward_of_two_communicators(comm, second):
    """Backward runs in the opposite order, which differs."""
    x = chainer.Variable(ARRAY)
    with chainer.using_config('train', True):
        y, z = functions.allreduce(comm, x), functions.allreduce(second, x)
    if comm.rank == 0:
        y.grad = ARRAY
        y.backward()  # in allreduce: 0 waits for 1
    z.grad = ARRAY
    z.backward()  # in allreduce: 1 waits for 0


@deadlock(2)
def batch_normalization_on_one_rank(comm):
    if comm.rank == 0:
        link = chainermn.links.MultiNodeBatchNormalization(3, comm)
        link(ARRAY[None])  # in allgather: 0 waits for 1
    else:
        comm.recv(0, 0)  # 1 waits for 0


def _optimizer(comm, **options):
    return chainermn.create_multi_node_optimizer(
        chainer.optimizers.SGD(), comm, **options).setup(model())


@deadlock(2)
def update_and_another_communicator(comm, second):
    optimizer = _optimizer(comm)
    for _ in range(3):
        optimizer.update(loss(optimizer.target))
    if comm.rank == 0:
        optimizer.update(loss(optimizer.target))  # in multi_node_mean_grad: 0 waits for 1
    second.barrier()  # 1 waits for 0


@deadlock(2)
def gradient_queue_and_another_communicator(comm, second):
    optimizer = _optimizer(comm, overlap='always')
    for _ in range(3):
        optimizer.update(loss(optimizer.target))
    if comm.rank == 0:
        optimizer.update(loss(optimizer.target))  # in queue_gradients: 0 waits for 1
    second.barrier()  # 1 waits for 0


@deadlock(2)
def gradient_queue_and_a_message(comm):
    optimizer = _optimizer(comm, overlap='always')
    optimizer.update(loss(optimizer.target))
    optimizer.update(loss(optimizer.target))
    if comm.rank == 0:
        optimizer.update(loss(optimizer.target))  # in queue_gradients: 0 waits for 1
    else:
        comm.recv(0, 0)  # 1 waits for 0


@deadlock(2)
def join_and_another_communicator(comm, second):
    """Rank 0 is exhausted; rank 1 calls an operation that is not shadowed."""
    optimizer = _optimizer(comm)
    with chainermn.join(optimizer):  # 0 waits for 1
        for _ in range(1 + 2 * comm.rank):
            optimizer.update(loss(optimizer.target))
        if comm.rank == 1:
            second.barrier()  # 1 waits for 0


@deadlock(2)
def join_by_one_rank(comm):
    optimizer = _optimizer(comm)
    if comm.rank == 0:
        with chainermn.join(optimizer):  # 0 waits for 1
            pass
    comm.recv(0, 0)  # 1 waits for 0


@deadlock(3)
def update_in_a_join_and_a_message(comm):
    optimizer = _optimizer(comm)
    with chainermn.join(optimizer):
        optimizer.update(loss(optimizer.target))
        if comm.rank == 2:
            comm.recv(0, 0)  # 2 waits for 0
        optimizer.update(loss(optimizer.target))  # in join: 0 waits for 2, (1 waits for 2)


@deadlock(2)
def iterator_on_one_rank(comm):
    iterator = chainermn.iterators.create_multi_node_iterator(
        chainer.iterators.SerialIterator(list(range(10)), 2), comm)
    next(iterator)
    if comm.rank == 0:
        comm.send(ARRAY, 1, 0)  # 0 waits for 1
    next(iterator)  # in bcast_obj: 1 waits for 0


@deadlock(2)
def evaluator_on_one_rank(comm):
    """A common error: rank 0 alone evaluates, and sends the result."""
    target = chainer.links.Classifier(chainer.links.Linear(3, 2))
    evaluator = chainermn.create_multi_node_evaluator(chainer.training.extensions.Evaluator(
        chainer.iterators.SerialIterator([(ARRAY, 0)] * 4, 2, False, False), target), comm)
    if comm.rank == 0:
        comm.send_obj(evaluator(), 1)  # in allgather_obj: 0 waits for 1
    else:
        comm.recv_obj(0)  # 1 waits for 0


@deadlock(2)
def push_and_recv(comm):
    store = chainermn.kvstore.create('dist_sync', comm)
    store.init('w', ARRAY)
    if comm.rank == 0:
        store.push('w', ARRAY)  # in alltoall: 0 waits for 1
    else:
        comm.recv(0, 0)  # 1 waits for 0


@deadlock(2)
def pull_and_another_communicator(comm, second):
    store = chainermn.kvstore.create('dist_sync', comm)
    store.init('w', ARRAY)
    if comm.rank == 0:
        store.pull('w', ARRAY.copy())  # in allgather: 0 waits for 1
    second.barrier()  # 1 waits for 0


@deadlock(2)
def updater_that_receives(comm, second):
    """A push waits for the updater of the other rank, which waits for a message of this rank."""
    store = chainermn.kvstore.create('dist_async', comm)
    store.init([0, 1], [ARRAY, ARRAY])

    def update(key, value, stored):
        second.recv(0, 0)  # 1 waits for 0

    store.set_updater(update)
    if comm.rank == 0:
        store.push(1, ARRAY)  # in KVStore request: 0 waits for 1
    comm.barrier()  # (1 waits for 0)


@deadlock(2)
def workers_whose_updaters_wait(comm, second):
    """Each rank pushes to the other one, whose updater is in a barrier of the first key."""
    store = chainermn.kvstore.create('dist_async', comm)
    store.init([0, 1], [ARRAY, ARRAY])

    def update(key, value, stored):
        comm.barrier()  # 1 waits for 0

    store.set_updater(update)
    if comm.rank == 0:
        store.push(1, ARRAY)  # in KVStore request: 0 waits for 1
    else:
        second.recv(0, 0)  # (1 waits for 0)


@deadlock(2, bystanders=1)
def with_idle_threads(comm):
    """Threads that load data do not communicate."""
    iterator = chainer.iterators.MultithreadIterator([ARRAY] * 100, 5, n_threads=2)
    next(iterator)
    comm.recv(1 - comm.rank, 0)  # 0 waits for 1, 1 waits for 0


@deadlock(2)
def with_processes_that_load_data(comm):
    iterator = chainer.iterators.MultiprocessIterator([ARRAY] * 100, 5, n_processes=2)
    next(iterator)
    comm.recv(1 - comm.rank, 0)  # 0 waits for 1, 1 waits for 0


@deadlock(2)
def with_a_queue_of_log_records(comm):
    logging.handlers.QueueListener(queue.Queue(), logging.StreamHandler()).start()
    comm.recv(1 - comm.rank, 0)  # 0 waits for 1, 1 waits for 0


@deadlock(2, needs_timeout=True)
def in_threads(comm):
    """The main threads wait for their threads."""
    def exchange():
        comm.recv(1 - comm.rank, 0)  # 0 waits for 1, 1 waits for 0

    thread = threading.Thread(target=exchange, name='exchange')
    thread.start()
    thread.join()


@deadlock(2)
def in_threads_after_the_main_thread(comm):
    """Python waits for these threads at the end of the script."""
    def exchange():
        comm.recv(1 - comm.rank, 0)  # 0 waits for 1, 1 waits for 0

    threading.Thread(target=exchange).start()


@deadlock(2, needs_timeout=True)
def in_the_threads_of_a_pool(comm, second):
    """One of them is idle."""
    def exchange():
        comm.recv(1 - comm.rank, 0)  # 0 waits for 1, 1 waits for 0

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        pool.submit(time.sleep, .1).result()
        pool.submit(exchange).result()


@deadlock(2)
def thread_and_main_thread(comm, second):
    """Two threads of rank 0 wait for rank 1."""
    if comm.rank == 0:
        threading.Thread(target=lambda: second.barrier()).start()  # in barrier: (0 waits for 1)
        comm.recv(1, 0)  # (0 waits for 1)
    else:
        comm.send(ARRAY, 0, 1)  # 1 waits for 0
