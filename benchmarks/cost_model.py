"""A model that predicts the time to average 102 MB of gradients on up to 1,024 ranks.

Run it in an environment with ChainerMN and MPI:
``python benchmarks/cost_model.py [--network MICROSECONDS GBIT] [--rounds 5] [--svg FILE]``.

The parameters are fitted on this machine, with as many ranks as in the prediction, all busy at the
same time, without running an allreduce: ``latency`` of a message of 8 bytes, and for 102 MB the
time per byte of

- message: each rank sends to the next one, 16 MB at a time;
- copy, add: ``a[:] = b`` and ``a += b`` in memory;
- read, write: copies between memory and a chunk that stays in the cache;
- reduce: ``a += b`` in such chunks;
- fresh: writing to newly allocated memory, as MPI_Allreduce does for received data.

Algorithms, for n bytes, N ranks, R of them on each of M nodes:

- mpi4py: pack, one MPI_Allreduce by halving and doubling, nearest ranks first, unpack;
- ChainerMN 8: the communicator ``flat``: chunk by chunk through shared memory within a node, and
  between nodes each rank exchanges its slice of a chunk with the same slice there;
- ring: as in NCCL, 2 (N - 1) steps in which each rank sends one N-th to the next; pack, unpack.

A node has as many ranks as this machine has cores, and one network link, which they share. The
network is as fast as a message between two ranks on this machine, unless ``--network`` is given.
All three algorithms are also measured on this machine, and compared with the predictions.
"""

import math
import os
import statistics
import time

import _rounds

FITTED = ('latency', 'message', 'copy', 'add', 'read', 'write', 'reduce', 'fresh')
SHAPES = (V8, MPI4PY, RING) = (_rounds.V8, _rounds.MPI4PY, 'ring, as in NCCL')
CHUNK = 1 << 19  # bytes that go through shared memory at a time; between nodes four times that
LATE = 4  # steps from when a chunk is packed to when it is unpacked
MESSAGE = 16 << 20


# --- the model -----------------------------------------------------------------------------------


def predict(shape: str, n: float, ranks: int, nodes: int, rate: dict[str, float],
            network: tuple[float, float]) -> float:
    """Return the seconds in which ``n`` bytes are averaged; ``ranks`` are those of a node."""
    latency, link = network  # seconds; seconds per byte
    total = ranks * nodes
    if total == 1:
        return 0
    here, there = 1 - 1 / ranks, 1 - 1 / nodes  # share of the bytes that passes, one way
    added = (1 - 1 / total) * n
    if shape == V8:
        steps = n / (CHUNK if nodes == 1 else 4 * CHUNK)
        seconds = n * (rate['read'] + rate['write']) + here * n * rate['reduce']
        seconds *= 1 + LATE / steps  # ranks need not wait for one another, but for the first chunks
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
    """In a process: takes turns of what is fitted, or of the shapes."""
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
    """Measures all of it on so many ranks of this machine, in turns."""
    turns = FITTED + SHAPES
    seconds: dict[str, list[float]] = {what: [] for what in turns}
    with _rounds.groups(__file__, ranks, [V8]) as groups:
        for n in range(rounds):
            for what in turns[n % len(turns):] + turns[:n % len(turns)]:
                seconds[what].append(groups[V8].ask(what))
    return seconds


def main() -> None:
    """Fits, predicts, compares and prints."""
    parser = _rounds.parser(__doc__, rounds=5)
    parser.add_argument('--network', nargs=2, type=float, metavar=('MICROSECONDS', 'GBIT'),
                        help='latency, and gigabits per second of the link of a node')
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
    """Draws the predictions, and below them how they compare with what was measured."""
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
