"""Communication time in a training step: ChainerMN 8, ChainerMN 7, and PyTorch DDP on gloo.

Run it in an environment with ChainerMN, MPI and scikit-learn:
``python benchmarks/weak_scaling.py [--up-to 4] [--rounds 7] [--torch PYTHON] [--svg FILE]``.

Models: the perceptron of ``examples/mnist`` on digits, 16 examples per rank, and a small ResNet of
three blocks on images of 3 x 32 x 32, 8 examples per rank. PyTorch runs models with the same
shapes. The work per rank does not depend on the number of ranks, and each rank has one thread.

A turn alternates between steps with and without communication, on all ranks at the same time. The
difference is the communication time, which includes waiting for slower ranks. Only steps of the
same framework with the same number of ranks are subtracted, because the time of a step without
communication differs between frameworks, and because cores share memory bandwidth and clock
frequency. Efficiency is the time of a step without communication on one rank, divided by the time
of a step with communication on all ranks. The output shows medians over the rounds. A time below
half the interquartile range is noise.
"""

import pathlib
import runpy
import statistics
import time

import _rounds
from _rounds import DDP, V7, V8

MODELS = {'perceptron': 25, 'small ResNet': 3}  # number of steps of each kind in a part of a turn
PARTS = 4
#: Shape of a batch; number of units or channels.
SHAPES = {'perceptron': ((16, 64), 100), 'small ResNet': ((8, 3, 32, 32), 16)}
BLOCKS = ((1, 1), (2, 2), (4, 2))  # multiple of the number of channels; stride


def steps_of_chainer(name: str, comm) -> dict:
    """Return a step that averages gradients, and one that does not."""
    import chainer
    import chainer.functions as F
    import chainer.links as L
    import numpy as np

    import chainermn

    class Block(chainer.Chain):
        def __init__(self, inputs, outputs, stride):
            super().__init__()
            with self.init_scope():
                self.a = L.Convolution2D(inputs, outputs, 3, stride, 1, nobias=True)
                self.b = L.Convolution2D(outputs, outputs, 3, 1, 1, nobias=True)
                self.bn_a, self.bn_b = L.BatchNormalization(outputs), L.BatchNormalization(outputs)
                if inputs != outputs:
                    self.short = L.Convolution2D(inputs, outputs, 1, stride, nobias=True)

        def forward(self, x):
            h = self.bn_b(self.b(F.relu(self.bn_a(self.a(x)))))
            return F.relu(h + (self.short(x) if hasattr(self, 'short') else x))

    def model():
        if name == 'perceptron':
            example = pathlib.Path(__file__).parents[1] / 'examples/mnist/train_mnist.py'
            return runpy.run_path(str(example))['MLP'](SHAPES[name][1])
        width = SHAPES[name][1]
        layers, inputs = [L.Convolution2D(3, width, 3, 1, 1), F.relu], width
        for times, stride in BLOCKS:
            layers.append(Block(inputs, times * width, stride))
            inputs = times * width
        return chainer.Sequential(*layers, lambda x: F.mean(x, (2, 3)), L.Linear(inputs, 10))

    random = np.random.RandomState(comm.rank)
    x = random.rand(*SHAPES[name][0]).astype('f')
    t = random.randint(10, size=len(x)).astype('i')
    steps = {}
    for what in ('with', 'without'):
        classifier = L.Classifier(model())
        optimizer = chainer.optimizers.Adam()
        if what == 'with':
            optimizer = chainermn.create_multi_node_optimizer(optimizer, comm)
        optimizer.setup(classifier)
        steps[what] = lambda optimizer=optimizer, model=classifier: optimizer.update(model, x, t)
    return steps


def steps_of_torch(name: str, rank: int) -> dict:
    """Return the same steps in PyTorch, which averages gradients during backward."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self, inputs, outputs, stride):
            super().__init__()
            self.a = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
            self.b = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
            self.bn_a, self.bn_b = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
            self.short = (nn.Conv2d(inputs, outputs, 1, stride, bias=False)
                          if inputs != outputs else nn.Identity())

        def forward(self, x):
            h = self.bn_b(self.b(torch.relu(self.bn_a(self.a(x)))))
            return torch.relu(h + self.short(x))

    def model():
        width = SHAPES[name][1]
        if name == 'perceptron':
            return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width),
                                 nn.ReLU(), nn.Linear(width, 10))
        layers, inputs = [nn.Conv2d(3, width, 3, 1, 1), nn.ReLU()], width
        for times, stride in BLOCKS:
            layers.append(Block(inputs, times * width, stride))
            inputs = times * width
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 10))

    torch.manual_seed(rank)
    x, t = torch.rand(SHAPES[name][0]), torch.randint(10, SHAPES[name][0][:1])
    steps = {}
    for what in ('with', 'without'):
        module = model()
        if what == 'with':
            # Like ChainerMN, leave the statistics of batch normalization to each rank.
            module = nn.parallel.DistributedDataParallel(module, broadcast_buffers=False)
        optimizer = torch.optim.Adam(module.parameters())

        def step(module=module, optimizer=optimizer):
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(x), t).backward()
            optimizer.step()

        steps[what] = step
    return steps


def work(kind: str, folder: str) -> None:
    """In the processes of a group: time some steps of each kind per turn."""
    if kind == DDP:
        import _gloo

        rank, barrier, maximum = _gloo.start(folder)
        steps = {name: steps_of_torch(name, rank) for name in MODELS}
    else:
        from mpi4py import MPI

        import chainermn

        assert (kind == V7) != chainermn.__version__.startswith('8.'), chainermn.__file__
        world = MPI.COMM_WORLD
        rank, barrier = world.rank, world.Barrier
        # The flat of ChainerMN 7 needs GPUs.
        comm = chainermn.create_communicator('naive' if kind == V7 else 'flat')
        steps = {name: steps_of_chainer(name, comm) for name in MODELS}

        def maximum(seconds):
            return world.allreduce(seconds, MPI.MAX)

    def turn(command: tuple[str, int]) -> list[float]:
        name, n = command
        seconds = {'with': 0., 'without': 0.}
        for _ in range(PARTS):
            for what, step in steps[name].items():
                step()
                barrier()
                start = time.perf_counter()
                for _ in range(n):
                    step()
                seconds[what] += maximum(time.perf_counter() - start)
        return [each / PARTS / n for each in seconds.values()]

    _rounds.answer(kind, folder, rank, turn)


def compare(rival: str, lost_by: dict[str, list[float]]) -> str:
    """Return a text with the ratio of both times, unless one of them is less than the noise."""
    for name in (rival, V8):
        lost = lost_by[name]
        low, middle, high = statistics.quantiles(lost, n=4) if len(lost) > 1 else lost * 3
        if middle <= (high - low) / 2:
            return f'{name} is less than the noise'
    return f'{statistics.median(lost_by[V8]) / statistics.median(lost_by[rival]):.3f} times'


def main() -> None:
    """Run the benchmark and print the results."""
    parser = _rounds.parser(__doc__, rounds=7, takes_torch=True)
    parser.add_argument('--up-to', type=int, default=4, metavar='RANKS', help='default: 4')
    args = parser.parse_args()
    if args.work:
        work(args.work, args.folder)
        return
    if args.quick:
        args.rounds, args.up_to = 1, 2
    kinds = [V8, V7, *([DDP] if _rounds.has_torch(args.torch) else [])]
    alone: dict[tuple[str, str], float] = {}
    drawn: dict[str, dict[str, list[float]]] = {kind: {} for kind in kinds}
    communication, efficiency = [], []
    ranks = 1
    while ranks <= args.up_to:
        with _rounds.groups(__file__, ranks, kinds, args.torch) as groups:
            for name, n_steps in MODELS.items():
                step: dict[str, list[list[float]]] = {kind: [] for kind in kinds}
                for n in range(args.rounds):
                    for kind in kinds[n % len(kinds):] + kinds[:n % len(kinds)]:
                        step[kind].append(groups[kind].ask((name, 1 if args.quick else n_steps)))
                print(f'{name}, {ranks} rank{"s" * (ranks > 1)}; {_rounds.load()}')
                lost: dict[str, list[float]] = {}
                scaled = []
                for kind, seconds in step.items():
                    total, without = map(statistics.median, zip(*seconds, strict=True))
                    alone.setdefault((name, kind), without)
                    lost[kind] = [with_ - without for with_, without in seconds]
                    scaled.append(alone[name, kind] / total)
                    drawn[kind][f'{name}, {ranks} rank{"s" * (ranks > 1)}'] = [
                        1e3 * each for each in lost[kind]]
                    print(f'  {kind}: a step takes {total * 1e3:.3f} ms')
                for rival in kinds[1:]:
                    print(f'  communication of {V8} over {rival}:', compare(rival, lost),
                          flush=True)
                communication.append([name, ranks, *(
                    statistics.median(each) * 1e3 for each in lost.values())])
                efficiency.append([name, ranks, *scaled])
        ranks *= 2
    _rounds.table(['model', 'ranks', *(f'{kind}, ms' for kind in kinds)], communication,
                  'Communication in a training step')
    _rounds.table(['model', 'ranks', *kinds], efficiency,
                  'Efficiency: a step without communication on one rank / a step on all ranks')
    if args.svg:
        _rounds.chart(args.svg, 'Communication in a training step', 'time, ms', drawn)


if __name__ == '__main__':
    main()
