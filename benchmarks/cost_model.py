"""A model that predicts the time to average 102 MB of gradients on up to 1,024 ranks.

Run it in an environment with ChainerMN and MPI:
``python benchmarks/cost_model.py [--network MICROSECONDS GBIT] [--rounds 5] [--svg FILE]``.

The parameters are measured on this machine, without an allreduce, with as many ranks as the
prediction has per node, all busy at the same time. They are the ``latency`` of a message of 8
bytes, and the time per byte, for 102 MB, of the following operations:

- message: each rank sends to the next rank, 16 MB at a time;
- copy, add: ``a[:] = b`` and ``a += b`` in memory;
- read, write: copies between memory and a chunk that stays in the cache;
- reduce: ``a += b`` in such chunks;
- fresh: writing to newly allocated memory, as MPI_Allreduce does for received data.

Algorithms:

- mpi4py: pack, one MPI_Allreduce by recursive halving and doubling, nearest ranks first, unpack;
- ChainerMN 8: the communicator ``flat``. Chunks go through shared memory within a node; between
  nodes, each rank exchanges its slice of a chunk with the ranks that have the same slice;
- ring, as in NCCL: pack, 2 (N - 1) steps for N ranks in which each rank sends one N-th of the bytes
  to the next rank, unpack.

A node has as many ranks as this machine has cores. The ranks of a node share one network link,
which is as fast as a message between two ranks on this machine, unless ``--network`` is given. All
three algorithms are also measured on this machine, and compared with the predictions.
"""

import math
import os
import statistics
import time

import _rounds

FITTED = ('latency', 'message', 'copy', 'add', 'read', 'write', 'reduce', 'fresh')
SHAPES = (V8, MPI4PY, RING) = (_rounds.V8, _rounds.MPI4PY, 'ring, as in NCCL')
CHUNK = 1 << 19  # bytes of a chunk in shared memory; with several nodes, four times as many
LATE = 4  # number of steps between packing and unpacking a chunk
MESSAGE = 16 << 20


# --- the model -----------------------------------------------------------------------------------


def predict(shape: str, n: float, ranks: int, nodes: int, rate: dict[str, float],
            network: tuple[float, float]) -> float:
    """Return the seconds to average ``n`` bytes, with this number of ``ranks`` on each node."""
    latency, link = network  # seconds; seconds per byte
    total = ranks * nodes
    if total == 1:
        return 0
    here, there = 1 - 1 / ranks, 1 - 1 / nodes  # share of the bytes that is sent, one way
    added = (1 - 1 / total) * n
    if shape == V8:
        steps = n / (CHUNK if nodes == 1 else 4 * CHUNK)
        seconds = n * (rate['read'] + rate['write']) + here * n * rate['reduce']
        seconds *= 1 + LATE / steps  # ranks only wait for each other at the first chunks
        if nodes > 1:
            seconds += 2 * there * n * link + there * n / ranks * rate['reduce']
            seconds += steps * 2 * math.log2(nodes) * latency
        return seconds
    packing = 2 * n * rate['copy']
    if shape == RING:
        slowest = rate['message'] if nodes == 1 else max(rate['message'], link)
        wait = rate['latency'] if nodes == 1 else max(rate['latency'], latency)
        return packing + 2 * (total - 1) * (wait + n / total * slowest) + added * rate['add']
    return (packing + 2 * here * n * rate['message'] + 2 * there * n * link
            + added * (rate['add'] + rate['fresh'])
            + 2 * math.log2(ranks) * rate['latency'] + 2 * math.log2(nodes) * latency)


# --- what is measured ----------------------------------------------------------------------------


def work(kind: str, folder: str) -> None:
    """In the processes of a group: time a fitted operation or an algorithm per turn."""
    import chainer
    import mean_grad
    import numpy as np
    from mpi4py import MPI

    import chainermn

    world = MPI.COMM_WORLD
    rank, size = world.rank, world.size
    comm = chainermn.create_communicator('flat')
    model = chainer.Link()
    with model.init_scope():
        for i, shape in enumerate(mean_grad.shapes_of('resnet50')):
            param = chainer.Parameter(np.ones(shape, np.float32))
            param.grad = param.array
            setattr(model, f'p{i:04}', param)
    grads = [param.grad.reshape(-1) for param in model.params()]
    buffer = np.concatenate(grads)
    sent, received = np.ones_like(buffer), np.ones_like(buffer)
    near, other = np.ones(CHUNK // 4, np.float32), np.ones(CHUNK // 4, np.float32)

    def message(size_in_bytes):
        for start in range(0, len(sent), size_in_bytes // 4):
            part = slice(start, start + size_in_bytes // 4)
            world.Sendrecv(sent[part], (rank + 1) % size, 0, received[part], (rank - 1) % size, 0)

    def latency():
        for _ in range(100):
            world.Sendrecv(sent[:2], (rank + 1) % size, 0, received[:2], (rank - 1) % size, 0)

    def chunks(operation):
        def call():
            for start in range(0, len(sent), len(near)):
                far = received[start:start + len(near)]
                operation(far, near[:len(far)], other[:len(far)])
        return call

    def packed(exchange):
        def call():
            np.concatenate(grads, out=buffer)
            exchange()
            start = 0
            for grad in grads:
                np.multiply(buffer[start:start + grad.size], 1 / size, out=grad)
                start += grad.size
        return call

    def ring():
        parts = np.array_split(buffer, size)
        for step in range(2 * (size - 1)):
            mine, theirs = parts[(rank - step) % size], parts[(rank - step - 1) % size]
            is_sum = step < size - 1
            into = received[:theirs.size] if is_sum else theirs
            world.Sendrecv(mine, (rank + 1) % size, 0, into, (rank - 1) % size, 0)
            if is_sum:
                theirs += into

    calls = {
        'latency': latency,
        'message': lambda: message(MESSAGE),
        'copy': lambda: np.copyto(received, sent),
        'add': lambda: np.add(received, sent, out=received),
        'read': chunks(lambda far, near, other: np.copyto(near, far)),
        'write': chunks(lambda far, near, other: np.copyto(far, near)),
        'reduce': chunks(lambda far, near, other: np.add(near, other, out=near)),
        'fresh': lambda: np.empty_like(buffer).fill(1),
        MPI4PY: packed(lambda: world.Allreduce(MPI.IN_PLACE, buffer)),
        V8: lambda: comm.multi_node_mean_grad(model),
        RING: packed(ring),
    }

    def turn(what: str) -> float:
        calls[what]()
        world.Barrier()
        start = time.perf_counter()
        calls[what]()
        seconds = world.allreduce(time.perf_counter() - start, MPI.MAX)
        if what in SHAPES:
            return seconds
        return seconds / (100 if what == 'latency' else buffer.nbytes)

    _rounds.answer(kind, folder, rank, turn)


def measure(ranks: int, rounds: int) -> dict[str, list[float]]:
    """Measure the operations and algorithms in turns, on this number of ranks."""
    turns = FITTED + SHAPES
    seconds: dict[str, list[float]] = {what: [] for what in turns}
    with _rounds.groups(__file__, ranks, [V8]) as groups:
        for n in range(rounds):
            for what in turns[n % len(turns):] + turns[:n % len(turns)]:
                seconds[what].append(groups[V8].ask(what))
    return seconds


def main() -> None:
    """Fit the parameters, predict, compare, and print the results."""
    parser = _rounds.parser(__doc__, rounds=5)
    parser.add_argument('--network', nargs=2, type=float, metavar=('MICROSECONDS', 'GBIT'),
                        help="latency, and gigabits per second, of a node's link")
    args = parser.parse_args()
    if args.work:
        work(args.work, args.folder)
        return
    import mean_grad

    n_bytes = 4 * sum(math.prod(shape) for shape in mean_grad.shapes_of('resnet50'))
    sizes = (2,) if args.quick else (2, 4, 8)
    rates, compared, rows = {}, {shape: {} for shape in SHAPES}, []
    for ranks in sizes:
        seconds = measure(ranks, 1 if args.quick else args.rounds)
        rates[ranks] = {what: statistics.median(seconds[what]) for what in FITTED}
        for shape in SHAPES:
            predicted = predict(shape, n_bytes, ranks, 1, rates[ranks], (0, 0))
            ratios = [predicted / one for one in seconds[shape]]
            compared[shape][f'{ranks}'] = ratios
            rows.append([ranks, shape, predicted * 1e3, statistics.median(seconds[shape]) * 1e3,
                         statistics.median(ratios)])
    print(f'{n_bytes / 1e6:.0f} MB; {_rounds.load()}')
    print('\nfitted; all but the latency in GB/s of a rank\nranks here  latency'
          + ''.join(f'{what:>9}' for what in FITTED[1:]))
    for ranks, rate in rates.items():
        print(f'{ranks:<10}{rate["latency"] * 1e6:6.1f} us'
              + ''.join(f'{1e-9 / rate[what]:9.1f}' for what in FITTED[1:]))
    node = max(ranks for ranks in sizes if ranks <= max(2, len(os.sched_getaffinity(0))))
    pair = rates[min(rates)]
    network = (pair['latency'], pair['message'])
    if args.network:
        network = args.network[0] * 1e-6, 8e-9 / args.network[1]
    curves: dict[str, list[float]] = {shape: [] for shape in SHAPES}
    totals = [node << i for i in range(11) if node << i <= 1024]
    for total in totals:
        for shape in SHAPES:
            curves[shape].append(
                1e3 * predict(shape, n_bytes, node, total // node, rates[node], network))
    _rounds.table(['ranks', *(f'{shape}, ms' for shape in SHAPES)],
                  zip(totals, *curves.values(), strict=True),
                  f'Predicted: {node} ranks on a node, network of {network[0] * 1e6:.1f} µs and '
                  f'{8e-9 / network[1]:.0f} Gbit/s')
    _rounds.table(['ranks', 'algorithm', 'predicted, ms', 'measured, ms', 'predicted / measured'],
                  rows, 'Predicted and measured on this machine')
    if args.svg:
        draw(args.svg, totals, curves, compared)


def draw(path: str, totals: list[int], curves: dict[str, list[float]],
         compared: dict[str, dict[str, list[float]]]) -> None:
    """Draw the predictions, and below them their ratios to measured times."""
    figure, (upper, lower) = _rounds.axes_of(6.5, n_rows=2)
    for shape in SHAPES:
        color, marker, line = _rounds.STYLES[shape]
        style = {'color': color, 'marker': marker, 'linestyle': line}
        upper.plot(totals, curves[shape], label=shape, **style)
        lower.plot(range(len(compared[shape])),
                   [statistics.median(each) for each in compared[shape].values()], **style)
    upper.set(title='Predicted for many nodes', xlabel='ranks', ylabel='time, ms', xscale='log',
             ylim=(0, None))
    upper.set_xticks(totals, [str(total) for total in totals], rotation=45)
    upper.minorticks_off()
    labels = list(compared[SHAPES[0]])
    lower.axhline(1, color='gray')
    lower.set(title='On this machine', xlabel='ranks', ylabel='predicted / measured',
              ylim=(0, None))
    lower.set_xticks(range(len(labels)), labels)
    upper.grid(alpha=.3)
    lower.grid(alpha=.3)
    _rounds.add_legend(figure, upper)
    _rounds.save(figure, path)


if __name__ == '__main__':
    main()
