"""On a GPU: bandwidth of packing, and steps of ResNet-50 and of a perceptron with 1 G parameters.

``python benchmarks/gpu.py [--ranks N] [--rounds 3] [--svg FILE]``; on a machine without a network,
use ``tests/gpu/offline.py``. By default, there is one rank per GPU, but at least two ranks. If
ranks share a GPU, NCCL sends through sockets instead of NVLink, and the ranks compute at the same
time. In this case, only compare numbers of kernels and times on the host.

Bandwidth: bytes per second that ``pack`` and ``unpack`` read and write, compared with a plain
device copy of as many bytes. ``pack`` and ``unpack`` copy all gradients with one kernel. One rank
runs; the other ranks wait.

Steps: float32, SGD, a batch of 32 images of 224 x 224 pixels or of 256 rows. "Alone" is without a
communicator. "Host" is the time until ``update`` returns, before the GPU has finished. "Kernels" is
the number of kernels in one step, counted by CUPTI. The kinds of steps take turns, round by round.
"""

import itertools
import os
import pathlib
import runpy
import signal
import statistics
import subprocess
import sys
import time

import _rounds
from _kernel_count import KernelCount

EXAMPLES = pathlib.Path(__file__).parents[1] / 'examples'
N_LAYERS, WIDTH = 10, 10_000  # size of the perceptron
DTYPES = [('float32', 'float32'), ('float32', 'float16'), ('float16', 'float16')]
KINDS = {
    'alone': None,
    'without overlap': {},
    'with overlap': {'overlap': 'always'},
}


def why_not() -> str:
    """Return why this machine cannot run the benchmark, or ''."""
    try:
        import cupy
    except ImportError as error:
        return f'needs CuPy: {error}'
    try:
        cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f'needs a GPU: {error}'
    from chainermn import nccl

    return '' if nccl._available else f'needs NCCL: {nccl._reason}'


# --- bandwidth -----------------------------------------------------------------------------------


def seconds_of(call, n: int) -> float:
    """Return the median time of a call on the GPU."""
    import cupy

    for _ in range(3):
        call()
    times = []
    for _ in range(n):
        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(cupy.cuda.get_elapsed_time(start, end) / 1e3)
    return statistics.median(times)


def shapes_of_resnet() -> list[tuple[int, ...]]:
    """Return the shapes of the parameters of ResNet-50: 102 MB in float32."""
    model = runpy.run_path(str(EXAMPLES / 'imagenet' / 'models.py'))['ResNet50'](1000)
    return [param.shape for param in model.params()]


def rates_of(shapes, dtype: str, buffer_dtype: str, n: int) -> tuple[int, list[float]]:
    """Return the bytes that are copied, and the GB/s of pack, unpack and a device copy."""
    import cupy

    from chainermn._transport import packing

    arrays = [cupy.ones(shape, dtype) for shape in shapes]
    buffer = packing.pack(arrays, cupy.dtype(buffer_dtype), True, .5)
    n_bytes = sum(x.nbytes for x in arrays) + buffer.nbytes
    source = cupy.ones(n_bytes // 2, 'i1')
    target = cupy.empty_like(source)
    return n_bytes, [n_bytes / 1e9 / seconds_of(call, n) for call in (
        lambda: packing.pack(arrays, buffer.dtype, True, .5),
        lambda: packing.unpack(buffer, arrays, 1, True),
        lambda: cupy.copyto(target, source))]


def bandwidth(n: int) -> None:
    """Print the bandwidth of pack and unpack, and of a device copy."""
    import cupy

    rows = []
    for name, shapes in {'ResNet-50': shapes_of_resnet(),
                         'perceptron': [(WIDTH, WIDTH)] * N_LAYERS}.items():
        for dtype, buffer_dtype in DTYPES:
            n_bytes, rates = rates_of(shapes, dtype, buffer_dtype, n)
            rows.append([f'{name}, {dtype} as {buffer_dtype}', n_bytes / 1e9, *rates])
            cupy.get_default_memory_pool().free_all_blocks()
    _rounds.table(['gradients', 'moved, GB', 'pack, GB/s', 'unpack, GB/s', 'plain copy, GB/s'],
                  rows)


# --- steps ---------------------------------------------------------------------------------------


def resnet50():
    """The model, and arguments of its loss."""
    import chainer
    import cupy

    net = runpy.run_path(str(EXAMPLES / 'imagenet' / 'models.py'))['ResNet50'](1000)
    model = chainer.links.Classifier(net)
    return model, (cupy.ones((32, 3, 224, 224), 'f'), cupy.zeros(32, 'i'))


def perceptron():
    """The model, and arguments of its loss."""
    import chainer
    import chainer.functions as F
    import chainer.links as L
    import cupy

    weights = chainer.initializers.Constant(1 / WIDTH)
    layers = [each for _ in range(N_LAYERS)
              for each in (L.Linear(None, WIDTH, initialW=weights), F.relu)]  # made on the GPU
    model = chainer.links.Classifier(chainer.Sequential(*layers))
    return model, (cupy.ones((256, WIDTH), 'f'), cupy.zeros(256, 'i'))


def time_steps(mpi_comm, comm, model, batch, options, n: int) -> tuple[list[float], list[float]]:
    """Return the milliseconds of steps, in total and on the host, on the slowest rank."""
    import cupy
    from mpi4py import MPI

    update = make_update(comm, model, batch, options)
    steps, hosts = [], []
    for k in range(n + 3):
        cupy.cuda.Device().synchronize()
        mpi_comm.Barrier()
        start = time.perf_counter()
        update()
        host = time.perf_counter() - start
        cupy.cuda.Device().synchronize()
        step = time.perf_counter() - start
        if k >= 3:  # the first steps compile kernels and broadcast parameters
            steps.append(mpi_comm.allreduce(step, MPI.MAX) * 1e3)
            hosts.append(mpi_comm.allreduce(host, MPI.MAX) * 1e3)
    return steps, hosts


def make_update(comm, model, batch, options):
    """Return a function that makes one step."""
    import chainer

    import chainermn

    optimizer = chainer.optimizers.SGD(1e-9)
    if options is not None:
        optimizer = chainermn.create_multi_node_optimizer(optimizer, comm, **options)
    optimizer.setup(model)
    return lambda: optimizer.update(model, *batch)


def steps(mpi_comm, comm, n_rounds: int, n: int) -> dict[str, list[float]]:
    """Print the times of steps; return the milliseconds in each round."""
    import cupy

    count = KernelCount()
    found: dict[str, list[float]] = {}
    rows = []
    for name, make in {'ResNet-50': resnet50, 'perceptron': perceptron}.items():
        model, batch = make()
        model.to_device(f'@cupy:{cupy.cuda.Device().id}')
        steps_of: dict[str, list[float]] = {kind: [] for kind in KINDS}
        hosts_of: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for _, (kind, options) in itertools.product(range(n_rounds), KINDS.items()):
            steps, hosts = time_steps(mpi_comm, comm, model, batch, options, n)
            steps_of[kind].append(statistics.median(steps))
            hosts_of[kind].append(statistics.median(hosts))
        for kind, options in KINDS.items():
            update = make_update(comm, model, batch, options)
            for _ in range(2):
                update()
            kernels = count(update)
            row = f'{name}, {kind}'
            found[row] = steps_of[kind]
            rows.append([row, statistics.median(steps_of[kind]),
                         statistics.median(hosts_of[kind]), kernels])
        if mpi_comm.rank == 0:
            print(f'{name}, with overlap: '
                  + _rounds.times(steps_of['with overlap'], steps_of['without overlap'])
                  + ' that without')
        model.cleargrads()
        del model, batch, update
        cupy.get_default_memory_pool().free_all_blocks()
    if mpi_comm.rank == 0:
        _rounds.table(['step', 'time, ms', 'host, ms', 'kernels'], rows)
    return found


# --- processes -----------------------------------------------------------------------------------


def work(args) -> None:
    """On each rank: measure. Rank 0 prints the results."""
    import cupy
    from mpi4py import MPI

    import chainermn
    from chainermn import nccl

    world = MPI.COMM_WORLD
    node = world.Split_type(MPI.COMM_TYPE_SHARED)
    n_devices = cupy.cuda.runtime.getDeviceCount()
    cupy.cuda.Device(node.rank % n_devices).use()
    if n_devices < node.size:  # to NCCL they look like ranks of several hosts
        os.environ['NCCL_HOSTID'] = f'rank {world.rank}'
        os.environ['NCCL_SOCKET_IFNAME'] = 'lo'
    if world.rank == 0:
        name = cupy.cuda.runtime.getDeviceProperties(0)['name'].decode()
        shared = ' (shared: see the description)' if n_devices < node.size else ''
        print(f'{world.size} rank(s) on {n_devices} x {name}{shared}; CuPy {cupy.__version__}, '
              f'CUDA {cupy.cuda.runtime.runtimeGetVersion()}, NCCL {nccl.get_version()}\n',
              flush=True)
        bandwidth(2 if args.quick else 20)
    ready = world.Ibarrier()
    while not ready.Test():  # meanwhile the others leave the cores and the GPU alone
        time.sleep(.05)
    comm = chainermn.create_communicator('pure_nccl')
    found = steps(world, comm, args.rounds, 2 if args.quick else 4)
    if args.svg and world.rank == 0:
        _rounds.chart(args.svg, 'Training steps on GPUs', 'time, ms', {_rounds.V8: found})
    comm.finalize()


def main() -> None:
    """Start the ranks."""
    parser = _rounds.parser(__doc__, rounds=3)
    parser.add_argument('--ranks', type=int, help='default: one per GPU, but at least two')
    args = parser.parse_args()
    if reason := why_not():
        sys.exit(f'benchmarks/gpu.py {reason}')
    if args.quick:
        args.rounds = 1
    if args.work:
        work(args)
        return
    import cupy

    ranks = args.ranks or max(2, cupy.cuda.runtime.getDeviceCount())
    process = subprocess.Popen(_rounds.local(ranks)([
        sys.executable, '-W', 'ignore', __file__, '--work', _rounds.V8, *sys.argv[1:]]))
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    sys.exit(process.wait())


if __name__ == '__main__':
    main()
