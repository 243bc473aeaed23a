"""Latency of operations on small data.

Run it in an environment with ChainerMN and MPI:
``python benchmarks/collectives.py [--ranks 2,4] [--rounds 25] [--svg FILE]``.

ChainerMN 8 is compared with ChainerMN 7 and mpi4py. Arrays have one float32 per rank, objects are a
small dict, and a round trip is a message from rank 0 to rank 1 and back. For arrays, mpi4py's
uppercase methods are called with preallocated buffers; for objects, the methods that pickle. The
output shows microseconds per call on the slowest rank (medians over the rounds), and the median of
the ratios within a round.
"""

import statistics
import time

import _rounds
from _rounds import MPI4PY, V7, V8

KINDS = (V8, V7)
#: Number of calls in a turn; ``CALLS`` for the other operations.
TIMED = {'round trip of 10 MB': 5}
CALLS = 400
OPERATIONS = ('allreduce', 'bcast', 'gather', 'scatter', 'allgather', 'alltoall', 'bcast_obj',
         'gather_obj', 'allreduce_obj', 'round trip of 1 KB', 'round trip of 10 MB')
GOALS = [  # operation, method, the method it is compared with, and the largest ratio
    ('allreduce', V8, MPI4PY, 1.6),
    *((each, V8, MPI4PY, 3) for each in ('bcast', 'gather', 'scatter', 'allgather')),
    ('alltoall', V8, MPI4PY, 4),
    *((each, V8, V7, .95) for each in OPERATIONS),
]


def calls_of(comm, world, is_raw: bool) -> dict:
    """Return a function for each operation, with ChainerMN's communicator or mpi4py's."""
    import numpy as np

    rank, size = comm.rank, comm.size
    x, y, xs = np.ones(1, 'f'), np.empty(1, 'f'), np.ones((size, 1), 'f')
    ys, obj = np.empty_like(xs), {'loss': 1.5}
    root, sent = (xs, obj) if rank == 0 else (None, None)

    def there_and_back(size_in_bytes: int):
        message = np.ones(size_in_bytes // 4, 'f')
        if is_raw:
            send, receive = world.Send, lambda source, tag: world.Recv(message, source, tag)
        else:
            send, receive = comm.send, comm.recv

        def call():
            if rank == 0:
                send(message, 1, 0)
                receive(1, 0)
            elif rank == 1:
                receive(0, 0)
                send(message, 0, 0)

        return call

    if is_raw:
        calls = [lambda: world.Allreduce(x, y), lambda: world.Bcast(x), lambda: world.Gather(x, ys),
                 lambda: world.Scatter(root, y), lambda: world.Allgather(x, ys),
                 lambda: world.Alltoall(xs, ys), lambda: world.bcast(obj),
                 lambda: world.gather(obj), lambda: world.allreduce(1.5)]
    else:
        calls = [lambda: comm.allreduce(x), lambda: comm.bcast(x), lambda: comm.gather(x),
                 lambda: comm.scatter(root), lambda: comm.allgather(x),
                 lambda: comm.alltoall(tuple(xs)), lambda: comm.bcast_obj(sent),
                 lambda: comm.gather_obj(obj), lambda: comm.allreduce_obj(1.5)]
    return dict(zip(OPERATIONS, [*calls, there_and_back(1 << 10), there_and_back(10 << 20)],
                    strict=True))


def work(kind: str, folder: str) -> None:
    """In each process of a group: time some calls of an operation per turn."""
    from mpi4py import MPI

    import chainermn

    assert (kind == V7) != chainermn.__version__.startswith('8.'), chainermn.__file__
    world = MPI.COMM_WORLD
    comm = chainermn.create_communicator('naive')
    duplicate = world.Dup()
    calls = {is_raw: calls_of(comm, duplicate, is_raw) for is_raw in (False, True)}

    def turn(command: tuple[str, bool, int]) -> float:
        operation, is_raw, n = command
        call = calls[is_raw][operation]
        for _ in range(1 + n // 10):
            call()
        world.Barrier()
        start = time.perf_counter()
        for _ in range(n):
            call()
        return world.allreduce(time.perf_counter() - start, MPI.MAX) / n

    _rounds.answer(kind, folder, world.rank, turn)


def measure(ranks: int, rounds: int, is_quick: bool) -> dict[str, dict[str, list[float]]]:
    """Return the seconds of all rounds, by operation and method."""
    names = (MPI4PY, *KINDS)
    seconds: dict[str, dict[str, list[float]]] = {
        operation: {name: [] for name in names} for operation in OPERATIONS}
    with _rounds.groups(__file__, ranks, KINDS) as groups:
        for n in range(rounds):
            for operation in OPERATIONS:
                n_calls = 2 if is_quick else TIMED.get(operation, CALLS)
                for name in names[n % 4:] + names[:n % 4]:
                    group = groups[V8 if name == MPI4PY else name]
                    seconds[operation][name].append(group.ask((operation, name == MPI4PY, n_calls)))
    return seconds


def report(ranks: int, seconds: dict[str, dict[str, list[float]]]
           ) -> dict[str, dict[str, list[float]]]:
    """Print the medians and the goals; return the ratios to mpi4py by kind and operation."""
    ratios = {kind: {operation: _rounds.ratios(each[kind], each[MPI4PY])
                     for operation, each in seconds.items()} for kind in KINDS}
    names = (*KINDS, MPI4PY)
    _rounds.table(['operation', *(f'{name}, µs' for name in names),
                   f'{V8} / {MPI4PY}'],
                  ([operation, *(statistics.median(each[name]) * 1e6 for name in names),
                    statistics.median(ratios[V8][operation])]
                   for operation, each in seconds.items()), f'{ranks} ranks')
    print(_rounds.load())
    for operation, kind, rival, goal in GOALS:
        times = _rounds.times(seconds[operation][kind], seconds[operation][rival])
        print(f'{operation}, {kind} over {rival}: {times}; goal {goal:g}')
    print()
    return ratios


def main() -> None:
    """Run the benchmark and print the results."""
    parser = _rounds.parser(__doc__, rounds=25)
    parser.add_argument('--ranks', default='2,4', help='default: %(default)s')
    args = parser.parse_args()
    if args.work:
        work(args.work, args.folder)
        return
    drawn: dict[str, dict[str, list[float]]] = {kind: {} for kind in KINDS}
    for ranks in map(int, ('2' if args.quick else args.ranks).split(',')):
        if ranks < 2:
            raise SystemExit('--ranks must be at least 2: a message needs two ranks')
        found = report(ranks, measure(ranks, 1 if args.quick else args.rounds, args.quick))
        for kind, ratios in found.items():
            for operation, each in ratios.items():
                drawn[kind][f'{operation}, {ranks} ranks'] = each
    if args.svg:
        _rounds.chart(args.svg, 'Latency of small operations', 'time relative to mpi4py', drawn,
                      {MPI4PY: 1}, is_log=True)


if __name__ == '__main__':
    main()
