"""Time to average gradients over links between hosts: ChainerMN 8, a lower bound and PyTorch DDP.

Run it as root on Linux with iproute2, in an environment with ChainerMN and MPI:
``python benchmarks/hosts.py [--shapes 2x1,4x2] [--rates 1gbit,10gbit]
[--compression fp16,2bit] [--torch PYTHON] [--svg FILE]``.

The hosts are network namespaces on this machine (``tests/virtual_hosts.py``). The link of each host
has the given rate in each direction. The hosts share the cores of this machine, so they have fewer
cores than real hosts. ``3x2`` means three hosts with two ranks each.

Rows, for the gradients or parameters of ResNet-50 (102 MB):

- ChainerMN 8: ``multi_node_mean_grad`` of ``flat``, also with the given compression;
- PyTorch DDP: the same buckets of 25 MB, by ``torch.distributed`` on gloo; skipped if the Python
  given by ``--torch`` has no torch;
- sharded update: an update by SGD with ``flat`` and ``shard_states=True``, with given gradients;
- bcast_data, and scatter_dataset of 102 MB of images.

The lower bound is the time to send the bytes, with headers, over the busiest link: 2 (n-1)/n of the
encoded gradients for n hosts, all parameters for bcast_data, and the shards of other hosts for
scatter_dataset. All rows take turns, round by round. The output shows milliseconds (medians over
the rounds), and the ratios to the bound and to PyTorch DDP within a round.
"""

import argparse
import os
import pathlib
import statistics
import sys
import time

import _rounds
import mean_grad
from _rounds import DDP, V8

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / 'tests'))
import virtual_hosts

CALLS = 2  # timed calls in a turn
BITS = {'': 32, 'fp16': 16, 'bf16': 16, '2bit': 2}  # per element of a gradient, by compression
IMAGE = (3, 32, 32)
UNITS = {'mbit': 1e6, 'gbit': 1e9}
BOUND = 'lower bound'
PAYLOAD = 1448 / 1514  # share of an Ethernet frame without headers


# --- the processes that are measured -------------------------------------------------------------


def methods_of_chainermn():
    """Return a barrier, a maximum over the ranks, and a function that returns the calls to time."""
    import chainer
    import numpy as np
    from mpi4py import MPI

    import chainermn
    from chainermn.communicators import compression

    assert chainermn.__version__.startswith('8.'), chainermn.__file__
    world = MPI.COMM_WORLD
    comm = chainermn.create_communicator('flat')

    def calls(model_name):
        model = chainer.Link()
        with model.init_scope():
            for n, shape in enumerate(mean_grad.shapes_of(model_name)):
                # One array for data and gradient: the values do not matter.
                param = chainer.Parameter(np.full(shape, world.rank + n % 5, np.float32))
                param.grad = param.array
                setattr(model, f'p{n:04}', param)
        dataset = None
        if world.rank == 0:
            count = size_of(model_name) // (4 * np.prod(IMAGE, dtype=int))
            dataset = chainer.datasets.TupleDataset(np.zeros((count, *IMAGE), np.float32))

        def mean(kind):
            compressor = compression.get(kind or None)
            return lambda: comm.multi_node_mean_grad(model, compression=compressor)

        optimizer = chainermn.create_multi_node_optimizer(
            chainer.optimizers.SGD(0), comm, shard_states=True).setup(model)
        optimizer.update()  # broadcasts the parameters
        return {**{name_of(kind): mean(kind) for kind in BITS},
                'sharded update': optimizer.update,
                'bcast_data': lambda: comm.bcast_data(model),
                'scatter_dataset': lambda: chainermn.scatter_dataset(dataset, comm)}

    return world.rank, world.Barrier, lambda x: world.allreduce(x, MPI.MAX), calls


def work(kind: str, folder: str) -> None:
    """In the processes of a group: time some calls of a method per turn."""
    if kind == DDP:
        os.environ['GLOO_SOCKET_IFNAME'] = 'eth0'
        rank, barrier, maximum, calls = mean_grad.methods_of_torch(folder)
    else:
        rank, barrier, maximum, calls = methods_of_chainermn()
    made: dict = {}

    def turn(command: tuple[str, str]) -> float:
        model, method = command
        made.setdefault(model, None)
        made[model] = made[model] or calls(model)
        seconds = []
        for _ in range(1 + CALLS):
            barrier()
            start = time.perf_counter()
            made[model][method]()
            seconds.append(maximum(time.perf_counter() - start))
        return statistics.median(seconds[1:])

    _rounds.answer(kind, folder, rank, turn)


# --- the driver ----------------------------------------------------------------------------------


def size_of(model: str) -> int:
    """Return the bytes of all gradients."""
    import numpy as np

    return 4 * sum(int(np.prod(shape)) for shape in mean_grad.shapes_of(model))


def name_of(compression: str) -> str:
    """Return the name of a method with this compression."""
    return f'{V8}, {compression}' if compression else V8


def ranks_of(shape: str) -> list[int]:
    """Return the ranks on each host.

    >>> ranks_of('3x2')
    [2, 2, 2]
    """
    hosts, ranks = map(int, shape.split('x'))
    return [ranks] * hosts


def bound(method: str, ranks: list[int], size: int, rate: str) -> float:
    """Return the seconds to send the bytes of a method over the busiest link."""
    seconds = 8 * size / (float(rate[:-4]) * UNITS[rate[-4:]] * PAYLOAD)
    if method == 'bcast_data':
        return seconds
    if method == 'scatter_dataset':
        return seconds * (1 - ranks[0] / sum(ranks))
    bits = BITS.get(method.removeprefix(f'{V8}, '), 32)
    return seconds * bits / 32 * 2 * (len(ranks) - 1) / len(ranks)


def measure(hosts: virtual_hosts.Hosts, rate: str, methods: dict[str, str],
            args: argparse.Namespace) -> dict[str, float]:
    """Measure the methods of these kinds of processes; return the median seconds."""
    times: dict[str, list[float]] = {method: [] for method in methods}
    order = list(methods)
    kinds = sorted(set(methods.values()), reverse=True)
    with _rounds.groups(__file__, sum(hosts.ranks), kinds, args.torch, hosts.mpiexec) as groups:
        for n in range(args.rounds):
            for method in order[n % len(order):] + order[:n % len(order)]:
                times[method].append(groups[methods[method]].ask((args.model, method)))
    for method, seconds in times.items():
        least = bound(method, hosts.ranks, size_of(args.model), rate)
        ratio = statistics.median(each / least for each in seconds)
        row = (f'  {method}: {statistics.median(seconds) * 1e3:.1f} ms; over the bound '
               f'{ratio:.3f} times')
        if method.startswith(V8) and DDP in times:
            row += f'; over {DDP} {_rounds.times(seconds, times[DDP])}'
        print(row, flush=True)
    return {method: statistics.median(seconds) for method, seconds in times.items()}


def draw(path: str, found: dict[tuple[str, str], dict[str, float]], model: str) -> None:
    """Draw the time to average gradients over the number of hosts, and the bound."""
    panels: dict[str, dict[str, dict[int, float]]] = {}
    for (shape, rate), medians in found.items():
        hosts, ranks = map(int, shape.split('x'))
        panel = panels.setdefault(
            f'{rate[:-4]} {rate[-4].upper()}bit/s, {ranks} rank{"s" * (ranks > 1)} per node', {})
        least = bound(V8, ranks_of(shape), size_of(model), rate)
        for method, seconds in {**medians, BOUND: least}.items():
            if method in _rounds.STYLES:
                panel.setdefault(method, {})[hosts] = seconds * 1e3
    n_rows, n = -(-len(panels) // 2), min(2, len(panels))
    figure, all_axes = _rounds.axes_of(1 + 2.5 * n_rows, n, n_rows)
    for axes, (title, lines) in zip(all_axes, panels.items(), strict=True):
        for method in _rounds.in_order(lines):
            points = lines[method]
            color, marker, line = _rounds.STYLES[method]
            axes.plot(points.keys(), points.values(), line, color=color, marker=marker,
                      label=method)
        axes.set(title=title.replace(', ', ',\n'), ylim=(0, None),
                 xticks=sorted({n for points in lines.values() for n in points}))
        axes.grid(alpha=.3)
    for axes in all_axes[-n:]:
        axes.set_xlabel('nodes')
    for axes in all_axes[::n]:
        axes.set_ylabel('time, ms')
    _rounds.add_legend(figure, all_axes[0])
    _rounds.save(figure, path)


def main() -> None:
    """Run the benchmark and print the results."""
    parser = _rounds.parser(__doc__, rounds=3, takes_torch=True)
    parser.add_argument('--shapes', default='2x1,4x1,2x2,4x2',
                        help='default: %(default)s')
    parser.add_argument('--rates', default='1gbit,10gbit', help='default: %(default)s')
    parser.add_argument('--compression', default='fp16,2bit',
                        help='default: %(default)s; or none')
    parser.add_argument('--model', default='resnet50', help='of mean_grad.py; default: %(default)s')
    args = parser.parse_args()
    if args.work:
        work(args.work, args.folder)
        return
    if reason := virtual_hosts.why_not():
        raise SystemExit(f'hosts {reason}')
    if args.quick:
        args.shapes, args.rates, args.rounds, args.model = '2x1,3x1', '1gbit', 1, 'small'
    methods = dict.fromkeys([name_of(kind) for kind in ('', *args.compression.split(','))
                             if kind != 'none'], V8)
    if _rounds.has_torch(args.torch):
        methods[DDP] = DDP
    others = ('sharded update', 'bcast_data', 'scatter_dataset')
    methods |= dict.fromkeys(others, V8)
    found = {}
    for rate in args.rates.split(','):
        for shape in args.shapes.split(','):
            print(f'{shape} at {rate}: {args.rounds} rounds, {_rounds.load()}')
            with virtual_hosts.Hosts(ranks_of(shape), rate) as hosts:
                found[shape, rate] = measure(hosts, rate, methods, args)
    for caption, shown in [
            ('Gradients', _rounds.in_order({BOUND, *methods} - {*others})),
            ('Other operations', others)]:
        rows = []
        for (shape, rate), medians in found.items():
            times = medians | {BOUND: bound(V8, ranks_of(shape), size_of(args.model), rate)}
            rows.append([f'{float(rate[:-4]) * UNITS[rate[-4:]] / 1e9:g}',
                         *map(int, shape.split('x')), *(times[method] * 1e3 for method in shown)])
        _rounds.table(['link, Gbit/s', 'nodes', 'ranks per node',
                       *(f'{method}, ms' for method in shown)], rows, caption)
    if args.svg:
        draw(args.svg, found, args.model)


if __name__ == '__main__':
    main()
