"""Time per batch of the multi-node iterator, compared with ChainerMN 7.

Run it in an environment with ChainerMN, MPI and NumPy 1.26; the iterator of ChainerMN 7 fails on
NumPy 2 and is skipped there:
``python benchmarks/iterator.py [--ranks 2] [--rounds 15] [--svg FILE]``.

Batches consist of 32 digits: 64 float32 values and an int32 label. The output shows the time of
``next()`` on the slowest rank for both, the ratio within a round (median, minimum and maximum), and
the time of the underlying iterator on one rank, which is part of both.
"""

import importlib.metadata
import statistics
import time

import _rounds
from _rounds import V7, V8

GOAL = .3
CALLS = 100  # timed calls in a turn


def work(kind: str, folder: str) -> None:
    """In the processes of a group: time some batches per turn."""
    import chainer
    import numpy as np
    from mpi4py import MPI

    import chainermn

    assert (kind == V7) != chainermn.__version__.startswith('8.'), chainermn.__file__
    world = MPI.COMM_WORLD
    comm = chainermn.create_communicator('naive')
    rng = np.random.RandomState(0)
    digits = [(rng.rand(64).astype(np.float32), np.int32(i % 10)) for i in range(1797)]
    alone = chainer.iterators.SerialIterator(digits, 32)
    shared = chainermn.iterators.create_multi_node_iterator(
        chainer.iterators.SerialIterator(digits, 32), comm)

    def turn(which: str) -> float:
        iterator = shared if which == 'shared' else alone
        for _ in range(5):
            next(iterator)
        world.Barrier()
        start = time.perf_counter()
        for _ in range(CALLS):
            next(iterator)
        seconds = world.allreduce(time.perf_counter() - start, MPI.MAX)
        return seconds / CALLS

    _rounds.answer(kind, folder, world.rank, turn)


def main() -> None:
    """Run the benchmark and print the results."""
    parser = _rounds.parser(__doc__, rounds=15, ranks=2)
    args = parser.parse_args()
    if args.work:
        work(args.work, args.folder)
        return
    rounds = 1 if args.quick else args.rounds
    times: dict[str, list[float]] = {V8: [], V7: [], 'alone': []}
    kinds = (V8, V7)
    if not importlib.metadata.version('numpy').startswith('1.'):
        print(f'The iterator of {V7} is skipped: it needs NumPy 1.26')
        kinds = (V8,)
    with _rounds.groups(__file__, args.ranks, kinds) as groups:
        for n in range(rounds):
            for kind in kinds if n % 2 else kinds[::-1]:
                times[kind].append(groups[kind].ask('shared'))
            times['alone'].append(groups[V8].ask('alone'))
    _rounds.table(['iterator', 'time, ms'], (
        ['the iterator alone' if kind == 'alone' else kind, statistics.median(each) * 1e3]
        for kind, each in times.items() if each), f'{args.ranks} ranks')
    if times[V7]:
        print(_rounds.show('batch', times[V8], times[V7], GOAL))
    print(f'{V8} over the iterator alone: {_rounds.times(times[V8], times["alone"])};',
          _rounds.load())
    if args.svg:
        _rounds.chart(args.svg, 'A batch of the multi-node iterator', 'time, ms', {
            kind: {f'{args.ranks} ranks': [1e3 * one for one in times[kind]]} for kind in kinds})


if __name__ == '__main__':
    main()
