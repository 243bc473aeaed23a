"""Communication time that overlap does not hide: overlap=True compared with no overlap.

Run it in an environment with ChainerMN and MPI:
``python benchmarks/overlap.py [--ranks 2] [--rounds 3] [--only nodes] [--svg FILE]``.

Slowed: a communicator that simulates a network card. Averaging takes as long as the backward pass,
in proportion to the bytes, without using a core. The exposed time of a step is its time minus the
time of a step without communication; the ratio compares the exposed times with and without overlap.
The models are ten layers of 1000 units with one bucket each, and layers with the 161 parameters of
ResNet-50 (102 MB) in buckets of 25 MB. Each of these layers computes as much as a linear layer with
as many parameters. With ten layers, a tenth is always exposed: the layer that backward computes
last.

Shared: ``flat``, with one rank per core, all of them computing. Overlap has no benefit here, and
overlap=True detects this. With 'always', which is also shown, communication slows down the backward
pass. "Half shared" uses half the ranks, so there are free cores; it needs more than two cores.

Nodes: two nodes with one rank each, with a link of 1 Gbit/s between them
(``tests/virtual_hosts.py``, which needs root). Averaging takes about half as long as a step.

Watching: a perceptron of 100 small layers. No gradients are sent, so only the overhead of observing
the backward pass and assigning buckets remains.

Steps of each kind take turns. Ratios use medians of the differences between neighboring steps,
because the speed of the machine varies.
"""

import contextlib
import os
import pathlib
import statistics
import sys
import time

import _rounds

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / 'tests'))
import virtual_hosts

GOALS = {'slowed, ten layers': .25, 'slowed, ResNet-50': .4, 'nodes, ten wide layers': .15,
         'shared, ten layers': 1.03,
         'shared, ResNet-50': 1.03, 'shared always, ResNet-50': None,
         'half shared, ResNet-50': None, 'watching, 100 layers': 1.05}
EXPOSED = 'slowed', 'nodes'  # for these, the ratio compares exposed times, not steps
LATE = 4e-4  # seconds by which time.sleep can be late, unlike a network card
BLOCKS = ((3, 64), (4, 128), (6, 256), (3, 512))  # number and width of ResNet-50's blocks


def ten_layers(width: int = 1000, n: int = 10):
    """Return a perceptron of ``n`` layers with the same width."""
    import chainer
    import chainer.functions as F
    import chainer.links as L

    return chainer.Sequential(*[each for _ in range(n) for each in (L.Linear(width, width),
                                                                    F.relu)])


def resnet50():
    """Return a linear layer for each convolution, with as many parameters, and a scale and bias."""
    import chainer
    import chainer.functions as F
    import chainer.links as L

    shapes = [(3 * 49, 64)]
    inputs = 64
    for n, width in BLOCKS:
        for block in range(n):
            shapes += [(inputs, width), (9 * width, width), (width, 4 * width)]
            if block == 0:
                shapes.append((inputs, 4 * width))
            inputs = 4 * width

    def fitting(n):
        return lambda h: F.tile(h, (1, -(-n // h.shape[1])))[:, :n]

    layers = []
    for n_in, n_out in shapes:
        layers += [fitting(n_in), L.Linear(n_in, n_out, nobias=True),
                   L.Scale(W_shape=(n_out,), bias_term=True), F.relu]
    return chainer.Sequential(*layers, L.Linear(2048, 1000))


#: Function that creates the model, number of inputs, batch size, MB of a bucket.
MODELS = {
    'ten layers': (ten_layers, 1000, 128, 4),
    'ten wide layers': (lambda: ten_layers(1600), 1600, 1024, 10),
    'ResNet-50': (resnet50, 147, 64, 25),
    '100 layers': (lambda: ten_layers(50, 100), 50, 32, 25),
}


def make_slowed(world):
    """Return a communicator that waits instead of averaging; all ranks have the same gradients."""
    from chainermn.communicators.mpi_communicator_base import MpiCommunicatorBase
    from chainermn.communicators.transport import MpiTransport

    class SlowedTransport(MpiTransport):
        bytes_per_second = float('inf')

        def mean(self, arrays, results=None):
            # Gradients are the same in each step, so later steps need not write the results again.
            if results is not None and self.bytes_per_second == float('inf'):
                for x, y in zip(arrays, results, strict=True):
                    y[...] = x
            seconds = sum(x.nbytes for x in arrays) / self.bytes_per_second
            end = time.perf_counter() + seconds
            time.sleep(max(0, seconds - LATE))
            while time.perf_counter() < end:
                time.sleep(0)

    class SlowedCommunicator(MpiCommunicatorBase):
        transport_class = SlowedTransport

    return SlowedCommunicator(world)


def work(kind: str, folder: str) -> None:
    """In the processes of a group: time some steps of each kind per turn."""
    import chainer
    import chainer.functions as F
    import numpy as np
    from mpi4py import MPI

    import chainermn

    world = MPI.COMM_WORLD
    slowed, flat = make_slowed(world), chainermn.create_communicator('flat')
    steps: dict = {}
    of_backward = [0., 0]  # seconds of the last backward pass, and bytes of the gradients

    def loss_of(model, x):
        # With a Variable, the gradient of the inputs is also computed, so that the first layer
        # takes as long as the others.
        return F.mean(model(chainer.Variable(x)))

    def new_step(name: str, comm, **options):
        make, n_inputs, batch, bucket_mb = MODELS[name]
        np.random.seed(0)
        model, x = make(), np.random.rand(batch, n_inputs).astype('f')
        optimizer = chainer.optimizers.SGD(1e-9)
        if comm is not None:
            if options:
                options['bucket_mb'] = bucket_mb
            optimizer = chainermn.create_multi_node_optimizer(optimizer, comm, **options)
        optimizer.setup(model)
        if options and name == '100 layers':
            optimizer._averaging._submit = lambda *_: None

        if comm is not None:
            return lambda: optimizer.update(lambda: loss_of(model, x))

        def step():  # the same, and measures the backward pass
            loss = loss_of(model, x)
            model.cleargrads()
            start = time.perf_counter()
            loss.backward()
            seconds = time.perf_counter() - start
            optimizer.update()
            of_backward[:] = seconds, sum(p.array.nbytes for p in model.params())

        return step

    def turn(command) -> dict[str, float]:
        which, name, n = command
        comm, overlap = slowed if which in ('slowed', 'watching') else flat, True
        if which in ('shared always', 'slowed', 'watching'):
            overlap = 'always'
        if (which, name) not in steps:
            steps.clear()
            steps[which, name] = {'alone': new_step(name, None), 'without': new_step(name, comm),
                                  'with': new_step(name, comm, overlap=overlap)}
        each = steps[which, name]
        for step in each.values():
            step()
            step()
        seconds: dict[str, list[float]] = {what: [] for what in each}
        backward: list[float] = []
        for _ in range(n):
            for what, step in each.items():
                world.Barrier()
                start = time.perf_counter()
                step()
                seconds[what].append(world.allreduce(time.perf_counter() - start, MPI.MAX))
                if which == 'slowed' and what == 'alone':
                    backward.append(world.allreduce(of_backward[0], MPI.MAX))
                    slowed.transport_class.bytes_per_second = (
                        of_backward[1] / statistics.median(backward[-4:]))
        alone, without, overlapped = (np.array(values) for values in seconds.values())
        if which in EXPOSED:
            ratio = np.median(overlapped - alone) / np.median(without - alone)
        else:
            ratio = 1 + np.median(overlapped - without) / np.median(without)
        return {'ratio': float(ratio)} | {
            what: statistics.median(values) for what, values in seconds.items()}

    _rounds.answer(kind, folder, world.rank, turn)


def main() -> None:
    """Run the benchmark and print the results."""
    parser = _rounds.parser(__doc__, rounds=3, ranks=2)
    parser.add_argument('--only', help='the rows with this word')
    args = parser.parse_args()
    if args.work:
        work(args.work, args.folder)
        return
    rows = [row for row in GOALS if not args.only or args.only in row]
    if args.quick:
        args.rounds = 1
        rows = [row for row in rows if row.endswith(' layers') and 'wide' not in row]  # small
    if any('nodes' in row for row in rows) and (reason := virtual_hosts.why_not()):
        print(f'not measured on two nodes: {reason}')
        rows = [row for row in rows if 'nodes' not in row]
    if (os.cpu_count() or 1) <= 2:  # half of the ranks would be one rank
        rows = [row for row in rows if 'half' not in row]
    found, table = {}, []
    for row in rows:
        goal = GOALS[row]
        which, _, name = row.partition(', ')
        cores = os.cpu_count() or 1
        ranks = {'shared': cores, 'shared always': cores, 'half shared': max(2, cores // 2),
                 'nodes': 2}.get(which, args.ranks)
        with contextlib.ExitStack() as stack:
            hosts = (stack.enter_context(virtual_hosts.Hosts([1, 1], '1gbit'))
                     if which == 'nodes' else None)
            groups = stack.enter_context(_rounds.groups(
                __file__, ranks, [_rounds.V8], mpiexec=hosts and hosts.mpiexec))
            n_steps = 1 if args.quick else {'slowed': 12, 'watching': 24, 'nodes': 3}.get(which, 6)
            turns = [groups[_rounds.V8].ask((which, name, n_steps))
                     for _ in range(args.rounds)]
        values = [turn['ratio'] for turn in turns]
        found[row] = values
        alone, without, overlapped = (statistics.median(turn[what] * 1e3 for turn in turns)
                                      for what in ('alone', 'without', 'with'))
        what = 'exposed communication' if which in EXPOSED else 'step'
        table.append([row, ranks, alone, without, overlapped, statistics.median(values), what])
        print(f'{row}: {what} {statistics.median(values):.3f} ({min(values):.3f} to '
              f'{max(values):.3f}) times; {"" if goal is None else f"goal {goal:g}; "}'
              f'{_rounds.load()}', flush=True)
    _rounds.table(['case', 'ranks', 'step without communication, ms', 'without overlap, ms',
                   'with overlap, ms', 'ratio with / without', 'ratio of'], table)
    if args.svg:
        _rounds.chart(args.svg, 'Overlap of communication and computation',
                      'with overlap / without (exposed communication, or step)',
                      {_rounds.V8: found})


if __name__ == '__main__':
    main()
