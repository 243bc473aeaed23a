"""Time to average gradients on CPUs: ``flat`` compared with alternatives.

Run it in an environment with ChainerMN and MPI: ``python benchmarks/mean_grad.py``.

Models: ResNet-50 (102 MB of gradients), 1000 arrays of 64 floats, one array of 400 MB. Methods:

- ChainerMN 8: ``multi_node_mean_grad`` of the communicators ``flat`` and ``naive``;
- ChainerMN 7: the communicator ``naive`` (``CHAINERMN_OVERLAY=0``);
- mpi4py: ``Allreduce`` of one buffer as large as all gradients, without packing or scaling;
- PyTorch DDP: the same buckets of 25 MB, by ``torch.distributed`` on gloo; skipped if the Python
  given by ``--torch`` has no torch;
- lower bound: ``g *= 1`` for each gradient g, which reads and writes each byte once.

The processes of all methods run for the whole time and take turns, round by round, so that load on
the machine affects all methods equally. Processes that are not in their turn sleep. A turn consists
of one call to warm up and several timed calls, of which the median counts. The output shows
milliseconds, and the ratios to ChainerMN 7 and to the lower bound within a round (medians over the
rounds).
"""

import statistics
import time

import _rounds
from _rounds import DDP, MPI4PY, V7, V8

CALLS = {'resnet50': 3, 'small': 10, 'big': 1}  # timed calls in a turn
#: Names of the models in tables.
TITLES = {'resnet50': 'ResNet-50, 102 MB', 'small': 'small arrays, 0.3 MB',
          'big': 'one array, 400 MB'}
NAIVE, BOUND = f'{V8}, naive', 'lower bound'
METHODS = {V8: [V8, NAIVE, MPI4PY, BOUND], V7: [V7], DDP: [DDP]}
BUCKET = 25 << 20  # bytes


# --- the processes that are measured -------------------------------------------------------------


def shapes_of(model: str) -> list[tuple[int, ...]]:
    """Return the shapes of the gradients of a model."""
    if model == 'small':
        return [(64,)] * 1000
    if model == 'big':
        return [(100_000_000,)]
    shapes = [(64, 3, 7, 7), (64,), (64,), (1000, 2048), (1000,)]
    inputs = 64
    for blocks, width in ((3, 64), (4, 128), (6, 256), (3, 512)):
        for block in range(blocks):
            outputs = 4 * width
            kernels = [(width, inputs, 1, 1), (width, width, 3, 3), (outputs, width, 1, 1)]
            if block == 0:
                kernels.append((outputs, inputs, 1, 1))
            for kernel in kernels:
                shapes += [kernel, kernel[:1], kernel[:1]]  # convolution, batch normalization
            inputs = outputs
    return shapes


def methods_of_chainermn(is_7: bool):
    """Return rank, barrier, maximum over the ranks, and a function that returns calls to time."""
    import chainer
    import numpy as np
    from mpi4py import MPI

    import chainermn

    assert is_7 != chainermn.__version__.startswith('8.'), chainermn.__file__
    world = MPI.COMM_WORLD
    names = {V7: 'naive'} if is_7 else {V8: 'flat', NAIVE: 'naive'}
    comms = {method: chainermn.create_communicator(name) for method, name in names.items()}

    def calls(model_name):
        model = chainer.Link()
        with model.init_scope():
            for n, shape in enumerate(shapes_of(model_name)):
                # Use one array for data and gradient: the values of the data do not matter.
                param = chainer.Parameter(np.full(shape, world.rank + n % 5, np.float32))
                param.grad = param.array
                setattr(model, f'p{n:04}', param)
        grads = [param.grad for param in model.params()]
        flat = np.concatenate(grads, axis=None) if len(grads) > 1 else grads[0]

        def touch_all():
            for grad in grads:
                grad *= 1

        def mean(comm):
            return lambda: comm.multi_node_mean_grad(model)

        return {**{method: mean(comm) for method, comm in comms.items()}, BOUND: touch_all,
                MPI4PY: lambda: world.Allreduce(MPI.IN_PLACE, flat)}

    return world.rank, world.Barrier, lambda x: world.allreduce(x, MPI.MAX), calls


def methods_of_torch(folder: str):
    """Return the same as ``methods_of_chainermn``, for torch.distributed."""
    import _gloo
    import torch
    import torch.distributed as dist

    rank, barrier, maximum = _gloo.start(folder)
    size = dist.get_world_size()

    def calls(model_name):
        grads = [torch.full(shape, float(rank)) for shape in shapes_of(model_name)]
        buckets, filled = [[]], 0
        for grad in grads:
            if filled and filled + 4 * grad.numel() > BUCKET:
                buckets.append([])
                filled = 0
            buckets[-1].append(grad)
            filled += 4 * grad.numel()
        buffers = [torch.empty(sum(grad.numel() for grad in bucket)) for bucket in buckets]

        def mean():
            works = []
            for bucket, buffer in zip(buckets, buffers, strict=True):
                torch.cat([grad.view(-1) for grad in bucket], out=buffer)
                buffer /= size
                works.append(dist.all_reduce(buffer, async_op=True))
            for bucket, buffer, work in zip(buckets, buffers, works, strict=True):
                work.wait()
                parts = buffer.split([grad.numel() for grad in bucket])
                torch._foreach_copy_([grad.view(-1) for grad in bucket], list(parts))

        return {DDP: mean}

    return rank, barrier, maximum, calls


def work(kind: str, folder: str) -> None:
    """In the processes of a group: time some calls of a method per turn."""
    if kind == DDP:
        rank, barrier, maximum, calls = methods_of_torch(folder)
    else:
        rank, barrier, maximum, calls = methods_of_chainermn(kind == V7)
    made: dict = {}

    def turn(command: tuple[str, str]) -> float:
        model, method = command
        if model not in made:
            made.clear()
            made[model] = calls(model)
        seconds = []
        for n in range(1 + CALLS[model]):
            barrier()
            start = time.perf_counter()
            made[model][method]()
            seconds.append(maximum(time.perf_counter() - start))
            if n == 0:
                seconds.clear()
        return statistics.median(seconds)

    _rounds.answer(kind, folder, rank, turn)


# --- the driver ----------------------------------------------------------------------------------


def measure(ranks: int, models: list[str], rounds: int, kinds: list[str], torch: str
            ) -> dict[str, dict[str, list[float]]]:
    """Measure all methods on a number of ranks; return the seconds by model and method."""
    turns = [(kind, method) for kind in kinds for method in METHODS[kind]]
    found: dict[str, dict[str, list[float]]] = {}
    with _rounds.groups(__file__, ranks, kinds, torch) as groups:
        for model in models:
            times: dict[str, list[float]] = {method: [] for _, method in turns}
            for n in range(rounds):
                for kind, method in turns[n % len(turns):] + turns[:n % len(turns)]:
                    times[method].append(groups[kind].ask((model, method)))
            print(f'{ranks} ranks, {TITLES[model]}: {rounds} rounds, {_rounds.load()}')
            for rival in (V7, BOUND):
                print(f'  {V8} over {rival}: {_rounds.times(times[V8], times[rival])}', flush=True)
            found[model] = times
    return found


def main() -> None:
    """Run the benchmark and print the results."""
    parser = _rounds.parser(__doc__, rounds=5, takes_torch=True)
    parser.add_argument('--ranks', default='2,4', help='default: %(default)s')
    parser.add_argument('--models', default='resnet50,small,big', help='default: %(default)s')
    args = parser.parse_args()
    if args.work:
        work(args.work, args.folder)
        return
    if args.quick:
        args.ranks, args.rounds, args.models = '2', 1, 'small'
    kinds = [V8, V7, *([DDP] if _rounds.has_torch(args.torch) else [])]
    methods = _rounds.in_order(method for kind in kinds for method in METHODS[kind])
    rows, found = [], {method: {} for method in methods}
    for ranks in map(int, args.ranks.split(',')):
        each = measure(ranks, args.models.split(','), args.rounds, kinds, args.torch)
        for model, times in each.items():
            rows.append([TITLES[model], ranks,
                         *(statistics.median(times[method]) * 1e3 for method in methods)])
            for method, seconds in times.items():
                found[method][f'{TITLES[model]}, {ranks} ranks'] = [
                    1e3 * one for one in seconds]
    _rounds.table(['gradients', 'ranks', *(f'{method}, ms' for method in methods)], rows)
    if args.svg:
        _rounds.chart(args.svg, 'Averaging gradients on one node', 'time, ms', found, is_log=True)


if __name__ == '__main__':
    main()
