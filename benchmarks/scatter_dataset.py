"""Time and memory to scatter a dataset, compared with ChainerMN 7.

Run it in an environment with ChainerMN and MPI, on Linux:
``python benchmarks/scatter_dataset.py [--ranks 4] [--rounds 5] [--mib 1024] [--svg FILE]``.

The root has a ``TupleDataset`` of images (3 x 32 x 32 float32) and labels, which is scattered once
in order and once shuffled. The output shows the time until all ranks have their shard, with the
ratio to ChainerMN 7 within a round (median, minimum and maximum). It also shows the peak memory of
the node, in multiples of the data size: the sum of the peak growth of all resident sets, plus the
root's own copy.

ChainerMN 7 needs nine times the size of the data, and the roots of both versions have their own
copy. Use a smaller ``--mib`` if this does not fit into memory.
"""

import ctypes
import pathlib
import statistics
import time

import _rounds
from _rounds import V7, V8

GOAL = .3
MEMORY = 2.2
EXAMPLE = 3 * 32 * 32 * 4  # bytes


def resident(key: str) -> int:
    """Return the resident bytes: now (``VmRSS``), or the peak since ``forget_peak`` (``VmHWM``)."""
    for line in pathlib.Path('/proc/self/status').read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise OSError(f'no {key} in /proc/self/status')


def forget_peak() -> None:
    """Return free memory to the system, so that it counts when it is reused, and reset the peak."""
    ctypes.CDLL(None).malloc_trim(0)
    pathlib.Path('/proc/self/clear_refs').write_text('5')


def work(kind: str, folder: str) -> None:
    """In the processes of a group: time one call per turn."""
    import chainer
    import numpy as np
    from mpi4py import MPI

    import chainermn

    assert (kind == V7) != chainermn.__version__.startswith('8.'), chainermn.__file__
    world = MPI.COMM_WORLD
    comm = chainermn.create_communicator('naive')
    made = {}

    def turn(command: tuple[int, bool]) -> tuple[float, float]:
        mib, shuffle = command
        n = mib * 2**20 // EXAMPLE
        if world.rank == 0 and not made:
            made['images'] = np.ones((n, 3, 32, 32), np.float32)
            made['labels'] = np.arange(n, dtype=np.int32)
        dataset = chainer.datasets.TupleDataset(*made.values()) if made else None
        forget_peak()
        before = resident('VmRSS')
        world.Barrier()
        start = time.perf_counter()
        part = chainermn.scatter_dataset(dataset, comm, shuffle=shuffle, seed=0)
        seconds = world.allreduce(time.perf_counter() - start, MPI.MAX)
        grown = world.allreduce(resident('VmHWM') - before)
        order = np.random.RandomState(0).permutation(n) if shuffle else np.arange(n)
        assert [t for _, t in part[:3]] == order[n * world.rank // world.size:][:3].tolist()
        return seconds, 1 + grown / (n * EXAMPLE)

    _rounds.answer(kind, folder, world.rank, turn)


def main() -> None:
    """Run the benchmark and print the results."""
    parser = _rounds.parser(__doc__, rounds=5, ranks=4)
    parser.add_argument('--mib', type=int, default=1024, help='default: %(default)s')
    args = parser.parse_args()
    if args.work:
        work(args.work, args.folder)
        return
    if args.quick:
        args.rounds, args.mib = 1, 1
    rows: list[list] = []
    each: dict[str, dict[str, list[float]]] = {V8: {}, V7: {}}
    with _rounds.groups(__file__, args.ranks) as groups:
        for what, shuffle in (('in order', False), ('shuffled', True)):
            times: dict[str, list[float]] = {V8: [], V7: []}
            peaks: dict[str, list[float]] = {V8: [], V7: []}
            for n in range(args.rounds):
                for kind in (V8, V7) if n % 2 else (V7, V8):
                    seconds, peak = groups[kind].ask((args.mib, shuffle))
                    times[kind].append(seconds)
                    peaks[kind].append(peak)
            print(_rounds.show(what, times[V8], times[V7], GOAL))
            print(f'{what}, peak memory of {V8} / data: {statistics.median(peaks[V8]):.2f}; '
                  f'goal {MEMORY:g}', flush=True)
            rows += [[f'{what}, ms', *(statistics.median(times[kind]) * 1e3 for kind in times)],
                     [f'{what}, memory / data', *map(statistics.median, peaks.values())]]
            for kind, seconds in times.items():
                each[kind][what] = [1e3 * one for one in seconds]
    _rounds.table(['order', *each], rows, f'{args.mib} MiB to {args.ranks} ranks')
    print(_rounds.load())
    if args.svg:
        _rounds.chart(args.svg, f'Scattering {args.mib} MiB to {args.ranks} ranks', 'time, ms',
                      each, is_log=True)


if __name__ == '__main__':
    main()
