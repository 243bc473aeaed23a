"""The work that averaging gradients adds to an update: launches, copies, NCCL calls, waits.

``python benchmarks/gpu_counts.py [--ranks 2]`` runs on the virtual GPU (tests/virtual_gpu), which
counts the calls of CUDA's libraries. The output shows the difference from an update without a
communicator, on rank 0, after the first updates. "Host waits" counts how often the host waits for
the device. Gradients are float32; the parameters of ResNet-50 have 102 MB, the 1,000 small ones
have 0.4 MB.

``pure_nccl`` packs all gradients with one kernel, averages them with one all-reduce, and unpacks
them with another kernel. ``overlap`` does this for each bucket, and double buffering for all
gradients at once, but they need not unpack: the gradients become views of the buffer.
``non_cuda_aware`` reduces to one rank of each host and then broadcasts. ``flat`` averages gradients
with MPI through host memory, and waits for both copies. ``flat`` of ChainerMN 7 passes pointers to
device memory to MPI; these bytes are not counted.

``MNBN`` compares a layer of multi-node batch normalization with Chainer's layer for one rank. A
negative number is work that ChainerMN saves.
"""

import argparse
import json
import os
import pathlib
import re
import runpy
import signal
import subprocess
import sys

import _rounds
from _rounds import V7, V8

ROOT = pathlib.Path(__file__).parents[1]
COLUMNS = {  # the first ones count calls, the others count bytes
    'launches': ['launches'], 'NCCL calls': ['nccl_calls'], 'host waits': ['synchronizations'],
    'allocations': ['allocations', 'host_allocations'], 'to the host': ['bytes_to_host'],
    'to the device': ['bytes_to_device'], 'within the device': ['bytes_within_device'],
    'NCCL': ['nccl_bytes'],
}
#: For each case: the communicator, its options, the options of the optimizer, and whether ChainerMN
#: 7 supports it.
CASES = {
    'pure_nccl': ('pure_nccl', {}, {}, True),
    'float16': ('pure_nccl', {'allreduce_grad_dtype': 'float16'}, {}, True),
    'overlap': ('pure_nccl', {}, {'overlap': 'always'}, False),
    'double buffering': ('pure_nccl', {}, {'double_buffering': True}, True),
    'non_cuda_aware': ('non_cuda_aware', {}, {}, True),
    'flat': ('flat', {}, {}, True),
}
SMALL = 'small arrays (1,000)'
N_FIRST, N_UPDATES = 4, 2


def why_not() -> str:
    """Return why this environment cannot run the benchmark, or ''."""
    try:
        import cupy

        name = cupy.cuda.runtime.getDeviceProperties(0)['name']
    except Exception as error:
        return f'needs CuPy and the virtual GPU: {error}'
    return '' if name == b'Virtual GPU' else 'needs the virtual GPU (tests/virtual_gpu/build.py)'


def shapes_of(model: str) -> list[tuple[int, ...]]:
    """Return the shapes of a model's parameters."""
    if model == SMALL:
        return [(100,)] * 1000
    model = runpy.run_path(str(ROOT / 'examples' / 'imagenet' / 'models.py'))['ResNet50'](1000)
    return [param.shape for param in model.params()]


def make(shapes):
    """Return parameters on the device, and a loss whose gradients need no computation."""
    import chainer
    import cupy

    class Precomputed(chainer.FunctionNode):
        """Returns its first input; the gradient of the second input is precomputed."""

        def __init__(self, grad):
            super().__init__()
            self.grad = grad

        def forward(self, inputs):
            return inputs[0],

        def backward(self, indexes, grads):
            return grads[0], chainer.Variable(self.grad)

    model = chainer.Chain()
    with model.init_scope():
        for n, shape in enumerate(shapes):
            setattr(model, f'p{n:04}', chainer.Parameter(cupy.zeros(shape, 'f')))
    model.to_device('@cupy:0')
    grads = {path: cupy.ones(param.shape, 'f') for path, param in model.namedparams()}

    def loss():
        y = chainer.Variable(cupy.zeros((), 'f'))
        for path, param in sorted(model.namedparams()):
            y, = Precomputed(grads[path]).apply((y, param))
        return y

    return model, loss


def counts_of(optimizer, loss) -> dict[str, float]:
    """Return the counts of one update."""
    import cupy
    from counters import counting

    for _ in range(N_FIRST):
        optimizer.update(loss)
    cupy.cuda.Device().synchronize()
    with counting() as counted:
        for _ in range(N_UPDATES):
            optimizer.update(loss)
    if hasattr(optimizer, 'wait'):
        optimizer.wait()
    cupy.cuda.Device().synchronize()
    return {column: sum(counted[name] for name in names) / N_UPDATES
            for column, names in COLUMNS.items()}


def normalization(comm):
    """Return a network with batch normalization, on one or all ranks, and its loss."""
    import chainer
    import cupy

    import chainermn

    if comm is None:
        link = chainer.links.BatchNormalization(16)
    else:
        link = chainermn.links.MultiNodeBatchNormalization(16, comm)
    model = chainer.Sequential(link)
    model.to_device('@cupy:0')
    x = cupy.arange(128, dtype='f').reshape(8, 16)
    return model, lambda: chainer.functions.sum(model(x) * x)


def work(version: str, quick: bool) -> None:
    """Print the counts of one version as JSON, on rank 0."""
    import chainer
    from mpi4py import MPI

    os.environ['NCCL_HOSTID'] = f'rank {MPI.COMM_WORLD.rank}'  # the ranks share a device
    sys.path.insert(0, str(ROOT / 'tests' / 'virtual_gpu'))
    import chainermn

    def show(model, case, counted, alone):
        if MPI.COMM_WORLD.rank == 0:
            numbers = [round(counted[column] - alone[column]) for column in COLUMNS]
            print(json.dumps([[model, case, version], numbers]), flush=True)

    def sgd(model):
        return chainer.optimizers.SGD(.1).setup(model)

    for name in [SMALL] if quick else ['ResNet-50', SMALL]:
        shapes = shapes_of(name)
        model, loss = make(shapes)
        alone = counts_of(sgd(model), loss)
        for case, (kind, options, of_optimizer, in_7) in CASES.items():
            if version == V7 and not in_7:
                continue
            comm = chainermn.create_communicator(kind, **options)
            model, loss = make(shapes)
            optimizer = chainermn.create_multi_node_optimizer(
                chainer.optimizers.SGD(.1), comm, **of_optimizer).setup(model)
            show(name, case, counts_of(optimizer, loss), alone)
            if hasattr(comm, 'finalize'):
                comm.finalize()
    model, loss = normalization(None)
    alone = counts_of(sgd(model), loss)
    comm = chainermn.create_communicator('pure_nccl')
    model, loss = normalization(comm)
    show('MNBN', 'pure_nccl', counts_of(sgd(model), loss), alone)


def main() -> None:
    """Run both versions, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--ranks', type=int, default=2, help='default: %(default)s')
    parser.add_argument('--quick', action='store_true', help='only small parameters')
    parser.add_argument('--work', help=argparse.SUPPRESS)
    parser.add_argument('--svg', help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        return work(args.work, args.quick)
    if reason := why_not():
        sys.exit(f'benchmarks/gpu_counts.py {reason}')
    found = []
    next_to_python = pathlib.Path(sys.executable).with_name('mpiexec')
    mpiexec = str(next_to_python) if next_to_python.exists() else 'mpiexec'
    for version, overlay in [(V8, '1'), (V7, '0')]:
        env = os.environ | {'CHAINERMN_OVERLAY': overlay, 'VGPU_MODE': 'eager'}
        command = [mpiexec, '-n', str(args.ranks), sys.executable, '-W', 'ignore', __file__,
                   '--work', version, *(['--quick'] if args.quick else [])]
        process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL,
                                   stdout=subprocess.PIPE, text=True)
        signal.signal(signal.SIGTERM, lambda *_, process=process: process.terminate())
        output, _ = process.communicate()
        found += map(json.loads, re.findall(r'^\[\[".*\]\]$', output, re.MULTILINE))
        if process.returncode:
            print(f'{version} exited with status {process.returncode}')
    start = ['gradients', 'method', 'version']
    for caption, part in [('Calls per update', slice(4)),
                          ('Bytes that an update copies or sends', slice(4, None))]:
        _rounds.table(start + [*COLUMNS][part], ([*labels, *numbers[part]]
                                                 for labels, numbers in found), caption)


if __name__ == '__main__':
    main()
