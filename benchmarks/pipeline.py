"""Pipelines of two ranks, compared with one process and with torch.distributed.pipelining.

Run it in an environment with ChainerMN, MPI and PyTorch (without PyTorch, its column is missing):
``python benchmarks/pipeline.py [--rounds 9] [--svg FILE]``.

There are two models with eight layers, half of them on each rank, and the mean squared error:

- convolutions: 3x3 convolutions of 32 channels, on 64 images of 32 x 32.
- sleeping layers: they sleep, in proportion to the number of images, like a rank whose GPU
  computes. Two such ranks do not compete for cores and memory.

A step consists of forward, backward and the update by SGD, in 8 micro-batches. "Interleaved" uses
GPipe with two stages per rank: rank 0 has the first and third quarter of the layers, rank 1 has the
others. PyTorch has a model with the same shapes, ``Schedule1F1B`` and gloo. "One process" computes
the whole batch at once, or accumulates the gradients of the same micro-batches. "Two processes
without messages" each compute their half of the layers; a pipeline takes at least 9/8 of their
time. Each process has one thread. The result of a turn is the fastest of some steps.

The memory is the peak of the allocations by Python and NumPy during a step, for 16 micro-batches,
summed over 4 ranks with two convolutions each. It includes the working memory of NumPy's
convolutions. The goal is the ratio for activations alone, which ``test_memory`` in
tests/links/test_pipeline.py measures.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import _rounds
import numpy as np

MODELS = CONVOLUTIONS, SLEEPING = 'convolutions', 'sleeping layers'
IMAGES, CHANNELS, SIZE, LAYERS, MICRO_BATCHES = 64, 32, 32, 8, 8
SECONDS = 2e-4  # per image in the forward pass of a sleeping layer; twice as long in backward
ONE, ACCUMULATION = 'one process', 'one process, accumulating'
HALVES = 'two processes without messages'
TORCH = 'PyTorch, 1F1B'
GOALS = {ONE: .6, ACCUMULATION: .6, TORCH: 1., 'gpipe': .35}


def layers_of_chainer(model: str, n: int):
    """Return ``n`` layers in sequence."""
    import chainer
    import chainer.functions as F
    import chainer.links as L

    class Sleep(chainer.FunctionNode):
        def forward(self, xs):
            time.sleep(SECONDS * len(xs[0]))
            return xs[0].copy(),

        def backward(self, indexes, gradients):
            time.sleep(2 * SECONDS * gradients[0].shape[0])
            return gradients

    def sleep(x):
        return Sleep().apply((x,))[0]

    return chainer.Sequential(*(
        each for _ in range(n) for each in (
            (L.Linear(CHANNELS, CHANNELS), sleep) if model == SLEEPING else
            (L.Convolution2D(CHANNELS, CHANNELS, 3, pad=1), F.relu))))


def batch(model: str) -> np.ndarray:
    """Return inputs and targets."""
    shape = (CHANNELS,) if model == SLEEPING else (CHANNELS, SIZE, SIZE)
    return np.random.RandomState(0).rand(2, IMAGES, *shape).astype(np.float32)


def of_chainer(model: str, rank: int, ranks: int, micro_batches: int = MICRO_BATCHES
               ) -> Callable[[str], None]:
    """Return a function that runs a step with the given method."""
    import chainer
    import chainer.functions as F

    import chainermn

    comm = chainermn.create_communicator('flat')

    def pipeline(n_parts: int, schedule: str):
        """Return a step of a pipeline with ``n_parts`` stages per rank."""
        parts = chainermn.MultiNodeChainList(comm)
        last = n_parts * ranks - 1
        for n in range(rank, last + 1, ranks):
            parts.add_link(layers_of_chainer(model, LAYERS // (last + 1)),
                           None if n == 0 else (n - 1) % ranks,
                           None if n == last else (n + 1) % ranks)
        optimizer = chainer.optimizers.SGD().setup(parts)
        function = chainermn.Pipeline(parts, F.mean_squared_error, micro_batches, schedule)
        return lambda: optimizer.update(function, x, t)

    def alone(n: int, loss: Callable):
        """Return a step in which this process only computes its layers, in ``n`` micro-batches."""
        def step() -> None:
            stage.cleargrads()
            for xs, ts in zip(np.split(x, n), np.split(t, n), strict=True):
                (loss(stage(chainer.Variable(xs, requires_grad=rank > 0)), ts) / n).backward()
            optimizer.update()

        stage = layers_of_chainer(model, LAYERS // ranks)
        optimizer = chainer.optimizers.SGD().setup(stage)
        return step

    x, t = batch(model)
    steps = {ONE: alone(1, F.mean_squared_error),
             ACCUMULATION: alone(micro_batches, F.mean_squared_error),
             HALVES: alone(micro_batches, F.mean_squared_error),
             '1f1b': pipeline(1, '1f1b'), 'gpipe': pipeline(1, 'gpipe'),
             'interleaved': pipeline(2, 'gpipe')}
    return lambda method: steps[method]()


def of_torch(model: str, rank: int, ranks: int) -> Callable[[str], None]:
    """Return a function that runs a step with PyTorch."""
    import torch
    from torch.distributed import pipelining

    class Sleep(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            time.sleep(SECONDS * len(x))
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            time.sleep(2 * SECONDS * len(gradient))
            return gradient

    class SleepModule(torch.nn.Module):
        def forward(self, x):
            return Sleep.apply(x)

    stage = torch.nn.Sequential(*(
        each for _ in range(LAYERS // ranks) for each in (
            (torch.nn.Linear(CHANNELS, CHANNELS), SleepModule()) if model == SLEEPING else
            (torch.nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), torch.nn.ReLU()))))
    x, t = map(torch.from_numpy, batch(model))
    optimizer = torch.optim.SGD(stage.parameters(), lr=.01)
    pipeline = pipelining.PipelineStage(stage, rank, ranks, torch.device('cpu'))
    run = pipelining.Schedule1F1B(pipeline, MICRO_BATCHES, torch.nn.MSELoss())

    def step(method: str) -> None:
        optimizer.zero_grad()
        if rank == 0:
            run.step(x)
        else:
            run.step(target=t)
        optimizer.step()

    return step


def work(kind: str, folder: str) -> None:
    """In the processes of a group: time some steps per turn."""
    if kind == _rounds.TORCH:
        import _gloo

        rank, barrier, maximum = _gloo.start(folder, kind)
        steps = {model: of_torch(model, rank, 2) for model in MODELS}
    else:
        from mpi4py import MPI

        world = MPI.COMM_WORLD
        rank, barrier = world.rank, world.Barrier

        def maximum(seconds):
            return world.allreduce(seconds, MPI.MAX)

        if kind == _rounds.WITHOUT_TORCH:
            _rounds.answer(kind, folder, rank, lambda schedule: peak(world, schedule))
            return
        steps = {model: of_chainer(model, rank, world.size) for model in MODELS}

    def turn(command: tuple[str, str, int]) -> float:
        model, method, n = command
        seconds = []
        for _ in range(n):
            barrier()
            start = time.perf_counter()
            steps[model](method)
            seconds.append(maximum(time.perf_counter() - start))
        return min(seconds)

    _rounds.answer(kind, folder, rank, turn)


def peak(world, schedule: str) -> int:
    """Return the peak of the bytes allocated during a step, summed over all ranks."""
    import tracemalloc

    step = of_chainer(CONVOLUTIONS, world.rank, world.size, 16)
    step(schedule)  # allocates memory that later steps reuse
    tracemalloc.start()
    step(schedule)
    found = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return world.allreduce(found)


def main() -> None:
    """Run the benchmark and print the results."""
    parser = _rounds.parser(__doc__, rounds=9, takes_torch=True)
    args = parser.parse_args()
    if args.work:
        work(args.work, args.folder)
        return
    kinds = [_rounds.V8] + [_rounds.TORCH] * _rounds.has_torch(args.torch)
    # The memory of NumPy's kernels can be traced.
    with _rounds.groups(__file__, 4, [_rounds.WITHOUT_TORCH]) as four:
        memory = {schedule: four[_rounds.WITHOUT_TORCH].ask(schedule)
                  for schedule in ('1f1b', 'gpipe')}
    seconds: dict[tuple[str, str], list[float]] = {}
    with _rounds.groups(__file__, 1, [_rounds.V8]) as one, _rounds.groups(
            __file__, 2, kinds, args.torch) as two:
        alone, both = one[_rounds.V8], two[_rounds.V8]
        methods = {ONE: alone, ACCUMULATION: alone, HALVES: both, '1f1b': both, 'gpipe': both,
                   'interleaved': both}
        if _rounds.TORCH in two:
            methods[TORCH] = two[_rounds.TORCH]
        for n in range(2 if args.quick else args.rounds + 1):
            for model in MODELS:
                for method, group in methods.items():
                    found = group.ask((model, method, 1 if args.quick else 3))
                    if n:  # the first round warms up
                        seconds.setdefault((model, method), []).append(found)
    drawn: dict[str, dict[str, list[float]]] = {}
    for model in MODELS:
        times = {method: seconds[model, method] for method in methods}
        for other in (ONE, ACCUMULATION, HALVES, TORCH):
            if other in times:
                goal = f'; goal {GOALS[other]:g}' if other in GOALS else ''
                print(f'{model}: 1f1b over {other}: '
                      f'{_rounds.times(times["1f1b"], times[other])}{goal}')
        for method, each in times.items():
            name, row = (_rounds.TORCH, '1f1b') if method == TORCH else (_rounds.V8, method)
            drawn.setdefault(name, {})[f'{model}, {row}'] = [1e3 * one for one in each]
    _rounds.table(['step', *(f'{model}, ms' for model in MODELS)], (
        [method if method == TORCH else f'{_rounds.V8}, {method}',
         *(statistics.median(seconds[model, method]) * 1e3 for model in MODELS)]
        for method in methods))
    print(f'memory of 1f1b over gpipe, 4 stages, 16 micro-batches: '
          f'{memory["1f1b"] / memory["gpipe"]:.3f} ({memory["1f1b"] / 1e6:.1f} and '
          f'{memory["gpipe"] / 1e6:.1f} MB); goal {GOALS["gpipe"]:g}')
    print(_rounds.load())
    if args.svg:
        _rounds.chart(args.svg, 'Step of a pipeline of two ranks', 'time, ms', drawn)


if __name__ == '__main__':
    main()
