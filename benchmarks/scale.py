"""Costs of a rank in a job with many ranks: startup, updates, small operations, end, memory.

Run it in an environment with ChainerMN and MPI:
``python benchmarks/scale.py [--ranks 8,64] [--rounds 3] [--svg FILE]``.

The benchmark compares ``flat`` and ``naive`` with ``naive`` of ChainerMN 7 and with mpi4py. Each
has its own job; the jobs take turns, with fewer rounds for more ranks. Milliseconds are CPU time
(mean over the ranks); rows with "wall-clock" show the wall-clock time on the slowest rank. All
ranks share the cores of one machine, and a rank that polls for a message also takes CPU time.
Chainer runs without PyTorch, whose import would take most of the time and memory.

- job: the whole job, with Python, Chainer and MPI;
- import: ``import chainermn`` and ``mpi4py.MPI``, after ``import chainer``;
- first updates: the first update broadcasts the parameters of a model with 11,110 numbers, and the
  second one averages gradients for the first time; mpi4py only sends the same arrays;
- memory: resident set size (RSS) and proportional set size (PSS), which divides shared pages among
  ranks, before the end of the job.

The output shows medians over the rounds, and ratios to ChainerMN 7 within a round.
"""

import json
import os
import pathlib
import re
import resource
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import _rounds
from _rounds import MPI4PY, V7, V8

NAIVE = f'{V8}, naive'
#: The kind of processes, and the communicator.
KINDS = {V8: (V8, 'flat'), NAIVE: (V8, 'naive'), V7: (V7, 'naive'), MPI4PY: (V8, '')}
CALLS = 30  # number of calls of each small operation
UPDATES = 'next 20 updates'
#: Steps whose wall-clock time is also shown.
ON_CLOCK = ('create_communicator', UPDATES)
SIZES = ('RSS, MB', 'PSS, MB', 'file descriptors', 'threads')
SHAPES = [(100, 100), (100,), (10, 100), (10,)]  # parameters of the model
GOALS = [  # step or size, kind, limit, and whether the limit is relative to ChainerMN 7
    ('create_communicator', V8, 10, False),
    ('first 2 updates', V8, 25, False),
    (f'{UPDATES}, wall-clock', NAIVE, 1, True),
    ('RSS, MB', V8, 80, False),
]

Costs = dict[str, float]  # costs of a rank in one job, by step or size


# --- the processes that are measured -------------------------------------------------------------


class Meter:
    """Measures steps of this process."""

    def __init__(self) -> None:
        self.barrier: Callable[[], object] = lambda: None  # replaced when MPI is imported
        self.cpu: Costs = {}
        self.wall: Costs = {}

    def __call__(self, step: str, function: Callable[[], Any], calls: int = 1) -> Any:
        """Measure calls of a function; return the last result."""
        self.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(calls):
            result = function()
        self.cpu[step] = (time.process_time() - cpu) * 1e3
        if step in ON_CLOCK:
            self.wall[f'{step}, wall-clock'] = (time.perf_counter() - wall) * 1e3
        self.barrier()
        return result


def chainermn_steps(measure: Meter, kind: str) -> Costs:
    """Measure all steps with ChainerMN; return the sizes before ``finalize``."""
    import chainer
    import numpy as np

    def start() -> Any:
        from mpi4py import MPI

        import chainermn

        measure.barrier = MPI.COMM_WORLD.Barrier
        return chainermn

    chainermn = measure('import', start)
    assert (kind == V7) != chainermn.__version__.startswith('8.'), chainermn.__file__
    comm = measure('create_communicator',
                   lambda: chainermn.create_communicator(KINDS[kind][1]))
    model = chainer.Sequential(chainer.links.Linear(100, 100), chainer.links.Linear(100, 10))
    assert [param.shape for param in model.params()] == SHAPES
    optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.SGD(), comm).setup(model)
    batch, x = np.ones((4, 100), 'f'), np.ones(1, 'f')
    first = {'loss': 1.5} if comm.rank == 0 else None

    def update() -> None:
        optimizer.update(lambda: chainer.functions.sum(model(batch)))

    measure('first 2 updates', update, 2)
    measure(UPDATES, update, 20)
    measure(f'bcast_obj, {CALLS} calls', lambda: comm.bcast_obj(first), CALLS)
    measure(f'gather_obj, {CALLS} calls', lambda: comm.gather_obj({'loss': 1.5}), CALLS)
    measure(f'allreduce_obj, {CALLS} calls', lambda: comm.allreduce_obj(1.5), CALLS)
    measure(f'allreduce, {CALLS} calls', lambda: comm.allreduce(x), CALLS)
    measure('split', lambda: comm.split(comm.rank % 2, comm.rank))
    sizes = sizes_of_process()
    measure('finalize', comm.finalize)
    return sizes


def mpi4py_steps(measure: Meter) -> Costs:
    """Measure the same messages with mpi4py; return the sizes before ``finalize``."""
    import numpy as np

    def start() -> Any:
        from mpi4py import MPI

        measure.barrier = MPI.COMM_WORLD.Barrier
        return MPI

    mpi = measure('import', start)
    comm = measure('create_communicator', mpi.COMM_WORLD.Dup)
    arrays, x, y = [np.zeros(shape, 'f') for shape in SHAPES], np.ones(1, 'f'), np.ones(1, 'f')

    def exchange() -> None:
        for array in arrays:
            comm.Allreduce(mpi.IN_PLACE, array)

    measure('first 2 updates', lambda: ([comm.Bcast(array) for array in arrays], exchange()))
    measure(UPDATES, exchange, 20)
    measure(f'bcast_obj, {CALLS} calls', lambda: comm.bcast({'loss': 1.5}), CALLS)
    measure(f'gather_obj, {CALLS} calls', lambda: comm.gather({'loss': 1.5}), CALLS)
    measure(f'allreduce_obj, {CALLS} calls', lambda: comm.allreduce(1.5), CALLS)
    measure(f'allreduce, {CALLS} calls', lambda: comm.Allreduce(x, y), CALLS)
    part = measure('split', lambda: comm.Split(comm.rank % 2, comm.rank))
    sizes = sizes_of_process()
    measure('finalize', lambda: (part.Free(), comm.Free()))
    return sizes


def sizes_of_process() -> Costs:
    """Return memory in MB, and numbers of file descriptors and threads of this process."""
    text = pathlib.Path('/proc/self/smaps_rollup').read_text()
    memory = [int(kilobytes) / 1e3 for kilobytes in re.findall(r'^[RP]ss: +(\d+) kB', text, re.M)]
    descriptors = len(os.listdir('/proc/self/fd')) - 1  # not the one that listdir has open
    return dict(zip(SIZES, [*memory, descriptors, len(os.listdir('/proc/self/task'))],
                    strict=True))


def work(kind: str) -> None:
    """On each rank: measure all steps. Rank 0 prints the costs over all ranks."""
    measure = Meter()
    sizes = mpi4py_steps(measure) if kind == MPI4PY else chainermn_steps(measure, kind)
    from mpi4py import MPI

    every = MPI.COMM_WORLD.gather((measure.cpu, measure.wall, sizes))
    if every is None:
        return
    cpu, wall, sizes = ([ranks[n] for ranks in every] for n in range(3))
    costs = {step: statistics.mean(each[step] for each in cpu) for step in cpu[0]}
    costs |= {step: max(each[step] for each in wall) for step in wall[0]}
    costs |= {name: statistics.mean(each[name] for each in sizes) for name in sizes[0]}
    print(json.dumps(costs), flush=True)


# --- the driver ----------------------------------------------------------------------------------


def run(kind: str, ranks: int) -> Costs:
    """Run a job and return its costs."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with subprocess.Popen(
            _rounds.local(ranks)([sys.executable, '-W', 'ignore', __file__, '--work', kind]),
            env=_rounds.environment(KINDS[kind][0]) | {'CHAINER_USE_TORCH': 'never'},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as process:
        try:
            output, _ = process.communicate()
        except BaseException:
            process.terminate()  # also ends the ranks
            raise
    if process.returncode:
        raise RuntimeError(f'{kind} on {ranks} ranks exited with status {process.returncode}')
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {'whole job': seconds * 1e3 / ranks} | json.loads(output.splitlines()[-1])


def measure_all(ranks: int, rounds: int) -> dict[str, list[Costs]]:
    """Return the costs of all rounds, by kind."""
    found: dict[str, list[Costs]] = {kind: [] for kind in KINDS}
    order = list(KINDS)
    for n in range(rounds):
        for kind in order[n % len(order):] + order[:n % len(order)]:
            found[kind].append(run(kind, ranks))
    return found


def main() -> None:
    """Run the benchmark and print the results."""
    parser = _rounds.parser(__doc__, rounds=3)
    parser.add_argument('--ranks', default='8,64', help='default: %(default)s')
    args = parser.parse_args()
    if args.work:
        work(args.work)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit('time limit reached'))  # also ends the job
    sizes = [2, 4] if args.quick else [int(n) for n in args.ranks.split(',')]
    rounds = {n: 1 if args.quick else min(args.rounds, max(2, 64 // n)) for n in sizes}
    found = {n: measure_all(n, rounds[n]) for n in sizes}

    def median(step: str, kind: str, n: int) -> float:
        return statistics.median(costs[step] for costs in found[n][kind])

    def ratio(step: str, kind: str, n: int) -> float:
        return statistics.median(x[step] / y[step] for x, y in zip(
            found[n][kind], found[n][V7], strict=True))

    for n in sizes:
        costs = found[n][V7][0]
        _rounds.table(['CPU time per rank', *(f'{kind}, ms' for kind in KINDS)],
                      ([step, *(median(step, kind, n) for kind in KINDS)]
                       for step in costs if step not in SIZES), f'{n} ranks')
        _rounds.table(['usage per rank', *KINDS],
                      ([size, *(each if 'MB' in size else round(each)
                                for each in (median(size, kind, n) for kind in KINDS))]
                       for size in SIZES),
                      f'{n} ranks')
    print(f'{", ".join(map(str, rounds.values()))} rounds; {_rounds.load()}')
    last = sizes[-1]
    for step, kind, goal, is_ratio in GOALS:
        value = f'{ratio(step, kind, last):.2f} times {V7}' if is_ratio else (
            f'{median(step, kind, last):.1f}')
        print(f'{step}, {kind}, {last} ranks: {value}; goal {goal}')
    if args.svg:
        drawn = {kind: {f'{step}, {n} ranks': [max(costs[step], 1e-2) for costs in found[n][kind]]
                        for step in ('create_communicator', 'first 2 updates', UPDATES)
                        for n in sizes} for kind in KINDS}
        _rounds.chart(args.svg, 'Jobs with many ranks', 'CPU time of a rank, ms', drawn,
                      is_log=True)


if __name__ == '__main__':
    main()
