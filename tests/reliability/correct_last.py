"""Correct programs whose ranks end seconds apart: every operation as the last one of a program.

``python tests/reliability/last_operations.py [--jobs 200] [--seed 1]`` runs random ones and prints
those that did not end with status 0. ``mpiexec -n 3 python last_operations.py --one 17`` is one.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import pathlib
import random
import subprocess
import sys
import time
from typing import Any

#: Seconds that a rank may be late or slow; longer than the watchdog's grace period for ranks that
#: have ended.
DELAYS = (0, 0, 3.5, 5)

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


def serve(comm: Any) -> None:
    """The last rank asks rank 0, which is slow to answer and at the end of its program."""
    def answer(source: int, request: Any) -> list[bytes]:
        time.sleep(max(SLOW))
        return [bytes(request)]

    service = comm.serve(answer)
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


#: The last operations.
OPERATIONS: dict[str, Any] = {
    'barrier': lambda comm: comm.barrier(),
    'bcast': lambda comm: comm.bcast(_x(10**7)),
    'gather': lambda comm: comm.gather(_x(10**6), root=comm.size - 1),
    'allgather': lambda comm: comm.allgather(_x()),
    'alltoall': lambda comm: comm.alltoall([_x()] * comm.size),
    'scatter': lambda comm: comm.scatter([_x()] * comm.size),
    'allreduce': lambda comm: comm.allreduce(_x(10**6)),
    'reduce': lambda comm: comm.reduce(_x(), 'sum', 0),
    'reduce_scatter': lambda comm: comm.reduce_scatter([_x()] * comm.size, 'sum'),
    'allreduce_many': lambda comm: comm.allreduce_many([_x(), _x(3)]),
    'bcast_obj': lambda comm: comm.bcast_obj(Slow()),
    'large bcast_obj': lambda comm: comm.bcast_obj((Slow(), bytes(2**25))),
    'gather_obj': lambda comm: comm.gather_obj(Slow()),
    'large gather_obj': lambda comm: comm.gather_obj((Slow(), bytes(2**20)), root=1),
    'allgather_obj': lambda comm: comm.allgather_obj(Slow()),
    'scatter_obj': lambda comm: comm.scatter_obj([Slow()] * comm.size),
    'allreduce_obj': lambda comm: comm.allreduce_obj(Slow()),
    'bcast_data': lambda comm: comm.bcast_data(_model()),
    'multi_node_mean_grad': lambda comm: comm.multi_node_mean_grad(_model()),
    'check_replicas': lambda comm: comm.check_replicas(_model()),
    'split': lambda comm: comm.split(0, comm.rank),
    'an operation of a part': parts,
    'new_group': lambda comm: comm.new_group([0]),
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
    'serve': serve,
    'dist_async': dist_async,
    'overlap': overlap,
    'scatter_dataset': scatter_dataset,
}


class Job(collections.namedtuple('Job', 'seed ranks operation communicator late slow')):
    """A random program; operations are chosen in turn."""

    @classmethod
    def of(cls, seed: int) -> Job:
        rng = random.Random(seed)
        ranks = rng.choice([2, 3, 4])
        return cls(seed, ranks, list(OPERATIONS)[seed % len(OPERATIONS)],
                   rng.choice(['naive', 'flat']), rng.choices(DELAYS, k=ranks),
                   [*rng.choices(DELAYS, k=ranks - 1), max(DELAYS)])


def play(job: Job) -> None:
    """Run on each rank."""
    import chainermn

    comm = chainermn.create_communicator(job.communicator)
    SLOW[:] = job.slow
    comm.barrier()
    time.sleep(job.late[comm.rank])
    OPERATIONS[job.operation](comm)


def run(seed: int) -> tuple[Job, int, str]:
    """Run a program; return its status and output."""
    job = Job.of(seed)
    done = subprocess.run(
        ['mpiexec', '-n', str(job.ranks), sys.executable, pathlib.Path(__file__), '--one',
         str(seed)], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL)
    return job, done.returncode, done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--jobs', type=int, default=200)
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--parallel', type=int, default=8)
    parser.add_argument('--one', type=int)
    args = parser.parse_args()
    if args.one is not None:
        play(Job.of(args.one))
        return 0
    failed = 0
    with concurrent.futures.ThreadPoolExecutor(args.parallel) as pool:
        for job, status, output in pool.map(run, range(args.seed, args.seed + args.jobs)):
            if status or output:
                failed += 1
                print(f'{job}: status {status}\n{output}', flush=True)
    print(f'{args.jobs} jobs, {failed} failed')
    return int(failed > 0)


if __name__ == '__main__':
    sys.modules['last_operations'] = sys.modules['__main__']  # where ranks unpickle from
    sys.exit(main())
