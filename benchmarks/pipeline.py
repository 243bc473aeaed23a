"""Pipelines of two ranks, compared with one process and with torch.distributed.pipelining.

Run it in an environment with ChainerMN, MPI and PyTorch, without which its column is missing:
``python benchmarks/pipeline.py [--rounds 9] [--png FILE]``.

The model: six 3x3 convolutions of 32 channels, on 64 images of 32 x 32, and a mean squared error.
Each rank has three of them; there are 8 micro-batches.  PyTorch's pipeline has a model of the same
shapes, ``Schedule1F1B``, on gloo.  A step is forward, backward and the update by SGD.  Each process
has one thread.  The one process computes the whole batch at once, or accumulates the gradients of
the same micro-batches.  A turn is the fastest of some steps.

The memory is that of activations: the most micro-batches that each of 4 stages keeps at a time,
of 16, summed over the stages.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import _rounds
import numpy as np

IMAGES, CHANNELS, SIZE, LAYERS, MICRO_BATCHES = 64, 32, 32, 6, 8
ONE, ACCUMULATION = 'one process', 'one process, accumulating'
GOALS = {ONE: .6, ACCUMULATION: .6, 'PyTorch': 1., 'gpipe': .35}


def of_chainer(rank: int, ranks: int) -> Callable[[str], None]:
    """Return a function that takes a step with a schedule; in one process, without."""
    import chainer
    import chainer.functions as F
    import chainer.links as L

    import chainermn

    stage = chainer.Sequential(*(
        each for _ in range(LAYERS // ranks)
        for each in (L.Convolution2D(CHANNELS, CHANNELS, 3, pad=1), F.relu)))
    x, t = np.random.RandomState(0).rand(
        2, IMAGES, CHANNELS, SIZE, SIZE).astype(np.float32)
    if ranks == 1:
        optimizer = chainer.optimizers.SGD().setup(stage)

        def step(method: str) -> None:
            n = MICRO_BATCHES if method == ACCUMULATION else 1
            stage.cleargrads()
            for xs, ts in zip(np.split(x, n), np.split(t, n), strict=True):
                (F.mean_squared_error(stage(xs), ts) / n).backward()
            optimizer.update()

        return step
    model = chainermn.MultiNodeChainList(chainermn.create_communicator('flat'))
    model.add_link(stage, None if rank == 0 else rank - 1,
                   None if rank == ranks - 1 else rank + 1)
    optimizer = chainer.optimizers.SGD().setup(model)
    pipelines = {schedule: chainermn.Pipeline(
        model, F.mean_squared_error, MICRO_BATCHES, schedule) for schedule in ('1f1b', 'gpipe')}
    return lambda schedule: optimizer.update(pipelines[schedule], x, t)


def of_torch(rank: int, ranks: int) -> Callable[[str], None]:
    """Return a function that takes a step with PyTorch."""
    import torch
    from torch.distributed import pipelining

    stage = torch.nn.Sequential(*(
        each for _ in range(LAYERS // ranks)
        for each in (torch.nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), torch.nn.ReLU())))
    x, t = torch.rand(2, IMAGES, CHANNELS, SIZE, SIZE)
    optimizer = torch.optim.SGD(stage.parameters(), lr=.01)
    pipeline = pipelining.PipelineStage(stage, rank, ranks, torch.device('cpu'))
    run = pipelining.Schedule1F1B(pipeline, MICRO_BATCHES, torch.nn.MSELoss())

    def step(schedule: str) -> None:
        optimizer.zero_grad()
        if rank == 0:
            run.step(x)
        else:
            run.step(target=t)
        optimizer.step()

    return step


def work(kind: str, folder: str) -> None:
    """In a process: takes turns of some steps."""
    if kind == 'gloo':
        import _gloo

        rank, barrier, maximum = _gloo.start(folder, kind)
        step = of_torch(rank, 2)
    else:
        from mpi4py import MPI

        world = MPI.COMM_WORLD
        rank, barrier = world.rank, world.Barrier
        step = of_chainer(rank, world.size)

        def maximum(seconds):
            return world.allreduce(seconds, MPI.MAX)

    def turn(command: tuple[str, int]) -> float:
        schedule, n = command
        seconds = []
        for _ in range(n):
            barrier()
            start = time.perf_counter()
            step(schedule)
            seconds.append(maximum(time.perf_counter() - start))
        return min(seconds)

    _rounds.answer(kind, folder, rank, turn)


def memory() -> float:
    """Return the activations of 1F1B over those of GPipe."""
    from chainermn.links._pipeline import schedule, stages

    parts = [[stages.ListedLink('', [rank - 1] if rank else None, [rank + 1] if rank < 3 else None)]
             for rank in range(4)]
    kept = {}
    for name in schedule.NAMES:
        cycles = schedule.clock_cycles(stages.connect(parts), 16, name)
        steps = [schedule.steps_of(rank, cycles) for rank in range(4)]
        kept[name] = sum(max(np.cumsum([1 if step.is_forward else -1 for step in each]))
                         for each in steps)
    return kept['1f1b'] / kept['gpipe']


def main() -> None:
    """Measures and prints."""
    parser = _rounds.parser(__doc__, rounds=9, takes_torch=True)
    args = parser.parse_args()
    if args.work:
        work(args.work, args.folder)
        return
    kinds = ['ours'] + ['gloo'] * _rounds.has_torch(args.torch)
    seconds: dict[str, list[float]] = {}
    with _rounds.groups(__file__, 1, ['ours']) as one, _rounds.groups(
            __file__, 2, kinds, args.torch) as two:
        methods = {ONE: (one['ours'], ONE), ACCUMULATION: (one['ours'], ACCUMULATION),
                   '1f1b': (two['ours'], '1f1b'),
                   'gpipe': (two['ours'], 'gpipe')}
        if 'gloo' in two:
            methods['PyTorch'] = two['gloo'], ''
        for n in range(2 if args.quick else args.rounds + 1):
            for name, (group, schedule) in methods.items():
                found = group.ask((schedule, 1 if args.quick else 3))
                if n:  # the first round warms up
                    seconds.setdefault(name, []).append(found)
    print(', '.join(f'{name} {statistics.median(each) * 1e3:.1f} ms (fastest {min(each) * 1e3:.1f})'
                    for name, each in seconds.items()))
    rows = {}
    for name in (ONE, ACCUMULATION, 'PyTorch'):
        if name in seconds:
            rows[name] = _rounds.ratios(seconds['1f1b'], seconds[name])
            print(f'1f1b over {name}: {_rounds.times(seconds["1f1b"], seconds[name])}; '
                  f'goal {GOALS[name]:g}')
    print(f'activations, 1f1b over gpipe, 4 stages, 16 micro-batches: {memory():.3f}; '
          f'goal {GOALS["gpipe"]:g}')
    print(_rounds.load())
    if args.png:
        _rounds.chart(args.png, 'Step of a pipeline of two ranks', 'times the other one',
                      {'1f1b': rows}, {})


if __name__ == '__main__':
    main()
