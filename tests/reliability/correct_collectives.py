"""Correct programs: collective operations, training, stores."""

import threading
import time

import chainer
import numpy as np
from contract import CASES, call
from correct_messages import Slow
from correct_play import ARRAY, LARGE, Play, part

import chainermn


def _operate(play: Play, comm: chainermn.CommunicatorBase) -> None:
    """Call a random operation."""
    root = play.rng.randrange(comm.size)
    name = play.rng.choice([name for name in CASES if name not in ('split', 'new_group')])
    play.rng.choice([
        lambda: call(comm, name, root),
        lambda: comm.allreduce(LARGE),
        lambda: comm.allgather(LARGE),
        lambda: comm.bcast(LARGE if comm.rank == root else None, root=root),
        lambda: chainermn.scatter_dataset(
            [*range(50)] if comm.rank == root else None, comm, root=root),
    ])()


@part
def operations(play: Play) -> None:
    """Several, on two communicators."""
    for _ in range(4):
        comm = play.rng.choice([play.comm, play.second])
        play.pause()
        _operate(play, comm)


@part
def many_operations(play: Play) -> None:
    """Without a break, on communicators in the same order."""
    for _ in range(play.rng.randrange(100, 1000)):
        play.comm.allreduce(ARRAY)
        play.second.barrier()


@part
def parts(play: Play) -> None:
    """Ranks of a part do their own work while the others wait for them."""
    color = play.rng.randrange(2)
    part_comm = play.comm.split(play.rank % 2 == color, play.rank)
    seconds = play.seconds()
    if play.rank % 2 == color:
        time.sleep(seconds * (part_comm.rank == 0))
        part_comm.allreduce(ARRAY)
    _operate(play, play.comm)
    part_comm.finalize()


@part
def new_communicators(play: Play) -> None:
    play.pause()
    comm = chainermn.create_communicator(play.rng.choice(['naive', 'flat']))
    play.pause()
    group = comm.new_group([0, 1])
    play.pause()
    if group is not None:
        group.barrier()
    play.pause()
    comm.finalize()


@part
def slow_objects(play: Play) -> None:
    """Ranks wait for others that pickle or unpickle."""
    times = [play.rng.choice([(seconds, 0), (0, seconds)])
             for seconds in (play.seconds() for _ in range(play.size))]
    source, dest = play.pair()
    way = play.rng.randrange(4)
    if way == 0:
        play.comm.allgather_obj(Slow(*times[play.rank]))
    elif way == 1:
        play.comm.bcast_obj(Slow(*times[0]) if play.rank == source else None, root=source)
    elif way == 2:
        play.comm.gather_obj(Slow(*times[play.rank]), root=source)
    elif play.rank == source:
        play.comm.send_obj(Slow(*times[0]), dest)
        play.comm.recv(dest, 0)
    elif play.rank == dest:
        play.comm.recv_obj(source)
        play.comm.send(ARRAY, source, 0)
    play.comm.barrier()


def _model() -> chainer.Sequential:
    return chainer.Sequential(*(chainer.links.Linear(5, 5) for _ in range(3)))


@part
def training(play: Play) -> None:
    """With and without overlap; ranks are late before an update or in the loss."""
    overlap = play.rng.choice([False, 'always'])
    optimizer = chainermn.create_multi_node_optimizer(
        chainer.optimizers.SGD(), play.comm, overlap=overlap, bucket_mb=1e-4).setup(_model())

    def loss() -> chainer.Variable:
        play.pause()
        return chainer.functions.sum(optimizer.target(ARRAY[None]))

    for _ in range(4):
        play.pause()
        optimizer.update(loss)
        play.second.barrier()


@part
def uneven_training(play: Play) -> None:
    optimizer = chainermn.create_multi_node_optimizer(
        chainer.optimizers.SGD(), play.comm).setup(_model())
    counts = [play.rng.randrange(4) for _ in range(play.size)]
    late, seconds = play.peer(), play.seconds()
    with chainermn.join(optimizer):
        for n in range(counts[play.rank]):
            if play.rank == late and n == counts[late] - 1:
                time.sleep(seconds)
            optimizer.update(lambda: chainer.functions.sum(optimizer.target(ARRAY[None])))


@part
def differentiable_messages(play: Play) -> None:
    """Forward and backward through a chain of ranks."""
    model = chainermn.MultiNodeChainList(play.comm)
    model.add_link(_model(), rank_in=play.rank - 1 if play.rank else None,
                   rank_out=play.rank + 1 if play.rank < play.size - 1 else None)
    play.pause()
    y = model(ARRAY[None]) if play.rank == 0 else model()
    play.pause()
    if play.rank == play.size - 1:
        y = chainer.functions.sum(y)
    y.backward()


@part
def asynchronous_store(play: Play) -> None:
    """Workers push and pull at any time; updates may be slow."""
    store = chainermn.kvstore.create('dist_async', play.comm)
    store.init([0, 1], [ARRAY, ARRAY])
    updates = play.rng.choice([play.seconds() / 3, 0])

    def update(key: object, value: np.ndarray, stored: np.ndarray) -> None:
        time.sleep(updates)
        stored += value

    store.set_updater(update)
    for _ in range(3):
        play.pause()
        store.push(play.rng.randrange(2), ARRAY)
        store.pull([0, 1])
    store.barrier()
    store.close()


@part
def synchronous_store(play: Play) -> None:
    store = chainermn.kvstore.create('dist_sync', play.comm)
    store.init('w', LARGE)
    for _ in range(2):
        play.pause()
        store.push('w', LARGE)
        store.pull('w')
    store.close()


class Images(chainer.dataset.DatasetMixin):
    """One of them takes long to load."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 12

    def get_example(self, i: int) -> np.ndarray:
        time.sleep(self.seconds * (i == 7))
        return ARRAY


@part
def iterators(play: Play) -> None:
    """One rank loads for all of them, in threads."""
    master = play.peer()
    images = Images(play.seconds())
    loads = chainer.iterators.MultithreadIterator(
        images, 3, repeat=False, shuffle=False, n_threads=2)
    iterator = chainermn.iterators.create_multi_node_iterator(loads, play.comm, master)
    for _ in iterator:
        play.comm.barrier()
    iterator.finalize()


@part
def operations_in_a_thread(play: Play) -> None:
    """Main threads wait in other operations; a thread of one rank is late."""
    late, seconds = play.peer(), play.seconds()

    def reduce() -> None:
        if play.rank == late:
            time.sleep(seconds)
        play.third.allreduce(LARGE)

    thread = threading.Thread(target=reduce)
    thread.start()
    if play.rank == late:
        play.comm.barrier()
        thread.join()
    else:
        thread.join()
        play.comm.barrier()

