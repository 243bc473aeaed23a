"""Training steps of ChainerMN 8, with and without PyTorch's kernels, and of PyTorch.

Run it in an environment with ChainerMN, MPI, scikit-learn and PyTorch:
``python benchmarks/training_step.py [--ranks 1,2] [--hosts 1gbit] [--rounds 4] [--only CNN,LSTM]
[--svg FILE]``.

The models: six 3x3 convolutions of 32 channels, on 16 images of 3 x 32 x 32; ResNet-50, on 4 images
of 3 x 224 x 224; the perceptron of ``examples/mnist`` with 1,000 units, on 100 images; an LSTM of
256 units, on 16 sequences of 32 vectors of 128; and the networks of ``examples/dcgan`` (32 images)
and ``examples/seq2seq`` (32 pairs, 5,000 words, 256 units). PyTorch runs models with the same
shapes, written as PyTorch users write them, in three variants: with the defaults; with fused
optimizers, and images with channels last; and, on one rank, compiled with ``torch.compile``, which
needs a C++ compiler. The table shows the fastest variant.

A step consists of forward, backward and the update, without computing the accuracy. One rank does
not communicate. Several ranks average gradients, ChainerMN with ``flat`` and PyTorch with DDP on
gloo; only the CNN and ResNet-50 run. Each process has one thread. The variants take turns of a few
steps. The result of a turn is the fastest step on one rank, and the mean on several ranks, which
wait for each other. The time of "PyTorch kernels alone" is spent in PyTorch's functions, in the
fastest of 10 steps; Chainer, NumPy and the optimizer take the rest of the step. The memory is the
largest resident set size of rank 0.

Finally, two hosts with one rank each are measured. They are network namespaces of this machine,
whose links have the rate given by ``--hosts`` in each direction, and need root and iproute2. Here,
ChainerMN uses ``overlap=True``, because DDP always overlaps communication.

On processors with bfloat16 instructions, steps are also measured with
``chainer.config.torch_compute_dtype``, and in PyTorch with autocast; ``--no-bfloat16`` skips this.
"""

import argparse
import cProfile
import functools
import os
import pathlib
import pstats
import re
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterable

import _rounds
from _rounds import (
    AUTOCAST,
    AUTOCAST_FUSED,
    BFLOAT16,
    COMPILED,
    FUSED,
    TORCH,
    V8,
    WITHOUT_TORCH,
)

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / 'tests'))
import virtual_hosts

from chainer_compat.pytorch.tensors import compute_dtype

#: Number of steps in a turn, by model.
TURNS = {'CNN': 8, 'ResNet-50': 2, 'perceptron': 20, 'LSTM': 20, 'DCGAN': 4, 'seq2seq': 4}
PARALLEL = ('CNN', 'ResNet-50')
#: Variants of PyTorch in float32.
VARIANTS = (TORCH, FUSED, COMPILED)
#: ``torch.compile`` fails for packed sequences.
NOT_COMPILED = ('seq2seq',)
GOALS = {1: 1., 2: 1.}
MEMORY = 'memory'  # command: return megabytes instead of seconds
KERNELS = 'kernels'  # command: return the seconds of a step in PyTorch's functions
#: Captions and columns of the tables.
IN_FLOAT32, IN_BFLOAT16, RESIDENT = 'Time in float32', 'Time in bfloat16', 'Memory of rank 0'
COLUMNS = {
    IN_FLOAT32: [f'{V8}, ms', f'{WITHOUT_TORCH}, ms', 'PyTorch kernels alone, ms',
                 f'{TORCH}, ms', f'{V8} / {TORCH}'],
    IN_BFLOAT16: [f'{V8}, ms', f'{AUTOCAST}, ms', f'{V8} / {AUTOCAST}'],
    RESIDENT: [f'{kind}, MB' for kind in (V8, BFLOAT16, WITHOUT_TORCH, TORCH, AUTOCAST)],
}


def work(kind: str, folder: str) -> None:
    """In each process of a group: time some steps of a model per turn."""
    if kind.startswith(TORCH):
        import _gloo
        import _steps_of_torch as steps_of
        import torch.distributed

        rank, barrier, maximum = _gloo.start(folder, kind)
        context = torch.distributed.get_world_size() > 1
        wrapped = functools.partial(steps_of.wrapped, kind=kind)
    else:
        import _steps_of_chainer as steps_of
        from mpi4py import MPI

        import chainermn

        world = MPI.COMM_WORLD
        rank, barrier = world.rank, world.Barrier
        context = chainermn.create_communicator('flat') if world.size > 1 else None
        wrapped = steps_of.wrapped

        def maximum(seconds):
            return world.allreduce(seconds, MPI.MAX)

    steps = {}

    def turn(command: tuple[str, int, bool, bool]) -> float:
        name, n, is_alone, overlap = command
        if name == MEMORY:
            status = pathlib.Path('/proc/self/status').read_text(encoding='utf-8')
            return int(re.search(r'VmHWM:\s*(\d+) kB', status)[1]) / 1e3
        if name == KERNELS:
            step, = steps.values()
            return min(seconds_in_torch(step) for _ in range(n))
        if name not in steps:
            steps[name] = steps_of.STEPS[name](wrapped(context, overlap))
            for _ in range(2):
                steps[name]()  # creates parameters and buffers
        seconds = []
        steps[name]()
        for _ in range(n):
            barrier()
            start = time.perf_counter()
            steps[name]()
            seconds.append(maximum(time.perf_counter() - start))
        return min(seconds) if is_alone else statistics.mean(seconds)

    _rounds.answer(kind, folder, rank, turn)


def seconds_in_torch(step: Callable[[], object]) -> float:
    """Return the seconds that a step spends in PyTorch's compiled functions."""
    profile = cProfile.Profile()
    profile.runcall(step)
    return sum(own for (file, _, function), (_, _, own, *_) in pstats.Stats(profile).stats.items()
               if file == '~' and 'torch' in function)


def measure(name: str, kinds: list[str], ranks: int, args: argparse.Namespace,
            tables: dict[str, list[list]], hosts: virtual_hosts.Hosts | None = None
            ) -> dict[str, list[float]]:
    """Measure a model, add rows to tables, and return the seconds of each kind of processes."""
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    with _rounds.groups(__file__, ranks, kinds, args.torch, hosts and hosts.mpiexec) as groups:
        for n in range(args.rounds):
            for kind in kinds[n % len(kinds):] + kinds[:n % len(kinds)]:
                seconds[kind].append(groups[kind].ask(
                    (name, 1 if args.quick else TURNS[name], ranks == 1, hosts is not None)))
        kernels = (groups[V8].ask((KERNELS, 1 if args.quick else 10, False, False)) * 1e3
                   if ranks == 1 else None)
        memory = {kind: groups[kind].ask((MEMORY, 0, False, False)) for kind in kinds}
    middle = {kind: statistics.median(each) * 1e3 for kind, each in seconds.items()}
    place = '2 hosts' if hosts else f'{ranks} rank{"s" * (ranks > 1)}'
    start = [name, 2 if hosts else 1, ranks // 2 if hosts else ranks]
    print(f'{name}, {place}: ' + ', '.join(f'{kind} {each:.2f} ms' for kind, each in middle.items())
          + f'; {_rounds.load()}', flush=True)

    def ratio(kind: str, fastest: str) -> float:
        print(f'  {kind} over {fastest}: {_rounds.times(seconds[kind], seconds[fastest])}; goal '
              f'{GOALS.get(ranks, 1):g}', flush=True)
        return statistics.median(_rounds.ratios(seconds[kind], seconds[fastest]))

    row = [*start, middle[V8], middle.get(WITHOUT_TORCH), kernels]
    if TORCH in kinds:
        fastest = fastest_of(seconds, VARIANTS)
        row += [middle[fastest], ratio(V8, fastest)]
    tables[IN_FLOAT32].append(row)
    if AUTOCAST in kinds:
        fastest = fastest_of(seconds, (AUTOCAST, AUTOCAST_FUSED))
        tables[IN_BFLOAT16].append(
            [*start, middle[BFLOAT16], middle[fastest], ratio(BFLOAT16, fastest)])
    tables[RESIDENT].append([*start, *(
        memory.get(column.removesuffix(', MB')) for column in COLUMNS[RESIDENT])])
    return seconds


def fastest_of(seconds: dict[str, list[float]], kinds: Iterable[str]) -> str:
    """Return the kind with the shortest median."""
    return min((kind for kind in kinds if kind in seconds),
               key=lambda kind: statistics.median(seconds[kind]))


def main() -> None:
    """Run the benchmark and print the results."""
    parser = _rounds.parser(__doc__, rounds=4, takes_torch=True)
    parser.add_argument('--ranks', default='1,2', help='default: %(default)s')
    parser.add_argument('--hosts', metavar='RATE', default='1gbit',
                        help='rate of the links between two hosts, or none; default: %(default)s')
    parser.add_argument('--bfloat16', action=argparse.BooleanOptionalAction,
                        default=compute_dtype.has_instructions(),
                        help='also measure bfloat16, and autocast in PyTorch; default: %(default)s')
    parser.add_argument('--only', help='models, separated by commas')
    args = parser.parse_args()
    if args.work:
        work(args.work, args.folder)
        return
    if args.quick:
        args.rounds, args.ranks, args.only, args.hosts = 1, '1', args.only or 'LSTM', 'none'
    has_torch = _rounds.has_torch(args.torch)
    kinds = [V8, WITHOUT_TORCH, *(VARIANTS if has_torch else []),
             *([BFLOAT16, AUTOCAST, AUTOCAST_FUSED] if has_torch and args.bfloat16 else [])]
    if has_torch and not shutil.which('c++'):
        kinds.remove(COMPILED)
    tables: dict[str, list[list]] = {caption: [] for caption in COLUMNS}
    drawn: dict[str, dict[str, list[float]]] = {V8: {}, WITHOUT_TORCH: {}}
    only = args.only.split(',') if args.only else None
    for ranks in map(int, args.ranks.split(',')):
        for name in only or (TURNS if ranks == 1 else PARALLEL):
            is_compiled = ranks == 1 and name not in NOT_COMPILED
            seconds = measure(name, [kind for kind in kinds if is_compiled or kind != COMPILED],
                              ranks, args, tables)
            for kind, shown in drawn.items():
                if has_torch:
                    shown[f'{name}, {ranks} rank{"s" * (ranks > 1)}'] = _rounds.ratios(
                        seconds[kind], seconds[fastest_of(seconds, VARIANTS)])
    if args.hosts != 'none' and (reason := virtual_hosts.why_not()):
        print(f'not measured on two hosts: {reason}')
    elif args.hosts != 'none':
        os.environ['GLOO_SOCKET_IFNAME'] = 'eth0'
        with virtual_hosts.Hosts([1, 1], args.hosts) as hosts:
            for name in only or PARALLEL:
                measure(name, [kind for kind in kinds if kind not in (WITHOUT_TORCH, COMPILED)], 2,
                        args, tables, hosts)
    for caption, rows in tables.items():
        columns = ['model', 'nodes', 'ranks per node', *COLUMNS[caption]]
        if rows:
            _rounds.table(columns[:len(rows[0])], rows, caption)
    if args.svg and drawn[V8]:
        _rounds.chart(args.svg, 'Training steps on a CPU', 'time relative to PyTorch', drawn,
                      {TORCH: 1}, is_log=True)


if __name__ == '__main__':
    main()
