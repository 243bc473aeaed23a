"""Every operation as the last one of a correct program, whose ranks end seconds apart."""

from __future__ import annotations

import functools
import time
from typing import Any

from contract import CASES, call
from correct_play import Play

SLOW: list[float] = []  # by rank: seconds that unpickling or adding an object takes there


class Slow:
    """Slow to unpickle and to add, depending on the rank."""

    def __init__(self, value: int = 1) -> None:
        self.value = value

    def __reduce__(self) -> Any:
        return _slowly, (self.value,)

    def __add__(self, other: Slow) -> Slow:
        time.sleep(max(SLOW[_rank()], .01))
        return Slow(self.value + other.value)


def _slowly(value: int) -> Slow:
    time.sleep(SLOW[_rank()])
    return Slow(value)


def _rank() -> int:
    from mpi4py import MPI

    return MPI.COMM_WORLD.rank


def _x(size: int = 100) -> Any:
    import numpy as np

    return np.ones(size, 'f')


def _model() -> Any:
    import chainer

    model = chainer.links.Linear(300, 400, initialW=0)
    model.cleargrads()
    for param in model.params():
        param.grad = param.array * 0 + 1
    return model


def messages(send: str, receive: str, nbytes: int = 1000) -> Any:
    """The last rank receives one message from each other rank, which ends at once."""
    def run(comm: Any) -> None:
        if comm.rank < comm.size - 1:
            what = Slow() if send == 'send_obj' else _x(nbytes // 4)
            getattr(comm, send)(what, comm.size - 1, 3)
            return
        time.sleep(SLOW[comm.rank])
        for source in range(comm.size - 1):
            if receive == 'recv_obj':
                assert comm.recv_obj(source, tag=3).value == 1
            elif receive == 'recv_obj of any':
                assert comm.recv_obj(-2).value == 1
            elif receive == 'irecv':
                assert comm.irecv(source, 3).wait().size == nbytes // 4
            elif receive == 'waitall':
                assert comm.waitall([comm.irecv(source, 3)])[0].size == nbytes // 4
            else:
                assert comm.recv(source, 3).size == nbytes // 4
    return run


def answer(comm: Any) -> None:
    """Each of two ranks waits for the other, which would be a deadlock if neither unpickled."""
    if comm.rank == 0:
        comm.send_obj(Slow(), comm.size - 1)
        comm.recv_obj(comm.size - 1)
    elif comm.rank == comm.size - 1:
        comm.recv_obj(0)
        comm.send_obj(3, 0)


def serve(comm: Any) -> None:
    """The last rank asks rank 0, which is slow to answer and at the end of its script."""
    def reply(source: int, request: Any) -> list[bytes]:
        time.sleep(max(SLOW))
        return [bytes(request)]

    service = comm.serve(reply)
    if comm.rank == comm.size - 1:
        time.sleep(SLOW[comm.rank])
        for rank in range(comm.size - 1):
            assert bytes(service.ask({rank: [b'x']})[rank]) == b'x'


def dist_async(comm: Any) -> None:
    import chainermn

    store = chainermn.kvstore.create('dist_async', comm)
    store.init('w', _x())

    def update(key: Any, pushed: Any, stored: Any) -> None:
        time.sleep(max(SLOW))
        stored += pushed

    store.set_updater(update)
    if comm.rank == comm.size - 1:
        store.push('w', _x())


def overlap(comm: Any) -> None:
    import chainer

    import chainermn

    model = chainer.links.Classifier(chainer.links.Linear(10, 10))
    optimizer = chainermn.create_multi_node_optimizer(
        chainer.optimizers.SGD(), comm, overlap=True).setup(model)
    x, t = _x(20).reshape(2, 10), _x(2).astype('i')
    for _ in range(3):
        optimizer.update(model, x, t)


def parts(comm: Any) -> None:
    part = comm.split(comm.rank % 2, comm.rank)
    part.allgather_obj(Slow())


def scatter_dataset(comm: Any) -> None:
    import chainermn

    data = [Slow() for _ in range(comm.size)] if comm.rank == 0 else None
    assert chainermn.scatter_dataset(data, comm)[0].value == 1


def new_communicator(comm: Any) -> None:
    import chainermn

    assert chainermn.create_communicator('flat').allreduce(_x())[0] == comm.size


def finished(comm: Any) -> None:
    comm.allgather_obj(Slow())
    comm.finalize()


def _call(comm: Any, name: str) -> None:
    call(comm, name)


#: The last operations.
OPERATIONS: dict[str, Any] = {
    **{name: functools.partial(_call, name=name) for name in CASES},
    'bcast': lambda comm: comm.bcast(_x(10**7)),
    'gather': lambda comm: comm.gather(_x(10**6), root=comm.size - 1),
    'allreduce': lambda comm: comm.allreduce(_x(10**6)),
    'bcast_obj': lambda comm: comm.bcast_obj(Slow()),
    'large bcast_obj': lambda comm: comm.bcast_obj((Slow(), bytes(2**25))),
    'gather_obj': lambda comm: comm.gather_obj(Slow(), root=comm.size - 1),
    'large gather_obj': lambda comm: comm.gather_obj((Slow(), bytes(2**20)), root=1),
    'allgather_obj': lambda comm: comm.allgather_obj(Slow()),
    'scatter_obj': lambda comm: comm.scatter_obj([Slow()] * comm.size),
    'allreduce_obj': lambda comm: comm.allreduce_obj(Slow()),
    'bcast_data': lambda comm: comm.bcast_data(_model()),
    'multi_node_mean_grad': lambda comm: comm.multi_node_mean_grad(_model()),
    'check_replicas': lambda comm: comm.check_replicas(_model()),
    'an operation of a part': parts,
    'create_communicator': new_communicator,
    'finalize': finished,
    'send, recv': messages('send', 'recv'),
    'large send, recv': messages('send', 'recv', 10**7),
    'isend, recv': messages('isend', 'recv'),
    'large isend, recv': messages('isend', 'recv', 10**7),
    'isend, irecv': messages('isend', 'irecv'),
    'send, waitall': messages('send', 'waitall', 10**6),
    'send_obj, recv_obj': messages('send_obj', 'recv_obj'),
    'send_obj, recv_obj of any': messages('send_obj', 'recv_obj of any'),
    'answer': answer,
    'serve': serve,
    'dist_async': dist_async,
    'overlap': overlap,
    'scatter_dataset': scatter_dataset,
}


def play_last(play: Play, name: str, longest: float) -> None:
    """Play an operation; some ranks are late, or slow to unpickle and to add, the last one always.

    Args:
        play: The state of the program.
        name: The operation.
        longest: Seconds; more than the watchdog's grace period for ranks that have ended.
    """
    delays = (0, 0, .7 * longest, longest)
    late = play.rng.choices(delays, k=play.size)
    SLOW[:] = [*play.rng.choices(delays, k=play.size - 1), longest]
    play.comm.barrier()
    time.sleep(late[play.rank])
    OPERATIONS[name](play.comm)
