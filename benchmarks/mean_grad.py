"""What averaging gradients on CPUs costs: ``flat`` against its rivals, as ratios within one run.

Run it in an environment that has ChainerMN and MPI: ``python benchmarks/mean_grad.py``.

Models: ResNet-50 (102 MB of gradients), 1000 arrays of 64 floats, one array of 400 MB.  Methods:

- flat, naive: ``multi_node_mean_grad`` of these communicators;
- old naive: that of the chainermn that Chainer carries (``CHAINERMN_OVERLAY=0``);
- raw: ``MPI_Allreduce`` of one buffer as large as all gradients, without packing or scaling;
- gloo: ``torch.distributed`` in buckets of 25 MB; skipped if the Python named by ``--torch`` has no
  torch;
- LB, a lower bound: ``g *= 1`` for each gradient g, which reads and writes each byte once.

The processes of all methods are there all the time and take turns, round by round, so that a busy
moment meets all of them; those that have no turn sleep.  A turn is one call to warm up and some
more, of which the median counts.  Printed are the medians over the rounds: milliseconds, and ratios
to old naive and to LB within a round.
"""

import argparse
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

CALLS = {'resnet50': 3, 'small': 10, 'big': 1}  # timed ones in a turn
METHODS = {'ours': ['flat', 'naive', 'raw', 'LB'], 'old': ['old naive'], 'gloo': ['gloo']}
BUCKET = 25 << 20  # bytes


# --- the processes that are measured -------------------------------------------------------------


def shapes_of(model: str) -> list[tuple[int, ...]]:
    """Returns the shapes of the gradients."""
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
                shapes += [kernel, kernel[:1], kernel[:1]]  # and batch normalization
            inputs = outputs
    return shapes


def methods_of_chainermn(is_old: bool):
    """Returns a barrier, a maximum, and what makes the calls to be timed for a model."""
    import chainer
    import numpy as np
    from mpi4py import MPI

    import chainermn

    assert is_old != chainermn.__version__.startswith('8.'), chainermn.__file__
    world = MPI.COMM_WORLD
    names = {'old naive': 'naive'} if is_old else {'flat': 'flat', 'naive': 'naive'}
    comms = {method: chainermn.create_communicator(name) for method, name in names.items()}

    def calls(model_name):
        model = chainer.Link()
        with model.init_scope():
            for n, shape in enumerate(shapes_of(model_name)):
                # One array for data and gradient: data are not looked at.
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

        return {**{method: mean(comm) for method, comm in comms.items()}, 'LB': touch_all,
                'raw': lambda: world.Allreduce(MPI.IN_PLACE, flat)}

    return world.rank, world.Barrier, lambda x: world.allreduce(x, MPI.MAX), calls


def methods_of_gloo(folder: str):
    """The same for torch.distributed."""
    import torch
    import torch.distributed as dist

    rank = int(os.environ.get('PMI_RANK', os.environ.get('OMPI_COMM_WORLD_RANK', 0)))
    size = int(os.environ.get('PMI_SIZE', os.environ.get('OMPI_COMM_WORLD_SIZE', 1)))
    torch.set_num_threads(1)
    dist.init_process_group('gloo', init_method=f'file://{folder}/gloo', rank=rank, world_size=size)

    def maximum(x):
        x = torch.tensor(x, dtype=torch.float64)
        dist.all_reduce(x, dist.ReduceOp.MAX)
        return float(x)

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

        return {'gloo': mean}

    return rank, dist.barrier, maximum, calls


def work(kind: str, folder: str) -> None:
    """Takes commands from a pipe of this rank's own, and times what they name."""
    if kind == 'gloo':
        rank, barrier, maximum, calls = methods_of_gloo(folder)
    else:
        rank, barrier, maximum, calls = methods_of_chainermn(kind == 'old')
    model, made = None, {}
    with open(f'{folder}/{kind}.{rank}') as commands:
        answers = open(f'{folder}/{kind}.answers', 'w') if rank == 0 else None  # noqa: SIM115
        for command in commands:
            wanted, _, method = command.strip().partition(' ')
            if wanted != model:
                made.clear()
                model, made = wanted, calls(wanted)
            seconds = []
            for n in range(1 + CALLS[model]):
                barrier()
                start = time.perf_counter()
                made[method]()
                seconds.append(maximum(time.perf_counter() - start))
                if n == 0:
                    seconds.clear()
            if answers:
                print(statistics.median(seconds), file=answers, flush=True)


# --- the driver ----------------------------------------------------------------------------------


class Group:
    """The processes of one kind."""

    def __init__(self, kind: str, ranks: int, folder: str, python: str) -> None:
        for name in ('answers', *range(ranks)):
            os.mkfifo(f'{folder}/{kind}.{name}')
        env = {key: value for key, value in os.environ.items() if key != 'CHAINERMN_OVERLAY'}
        env |= dict.fromkeys(['OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS', 'MKL_NUM_THREADS'], '1')
        if kind == 'old':
            env = {**env, 'CHAINERMN_OVERLAY': '0'}
            env.pop('PYTHONPATH', None)
        beside = pathlib.Path(sys.executable).with_name('mpiexec')
        mpiexec = str(beside) if beside.exists() else 'mpiexec'
        self.process = subprocess.Popen(
            [mpiexec, '-n', str(ranks), python, '-W', 'ignore', pathlib.Path(__file__).resolve(),
             '--work', kind, '--folder', folder],
            env=env, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        self.commands = [self._open(f'{folder}/{kind}.{rank}', os.O_WRONLY | os.O_NONBLOCK)
                         for rank in range(ranks)]
        self.answers = os.fdopen(os.open(f'{folder}/{kind}.answers', os.O_RDONLY))

    def _open(self, path: str, flags: int) -> int:
        """Opens a pipe once the process is at the other end."""
        while True:
            try:
                return os.open(path, flags)
            except OSError:
                if self.process.poll() is not None:
                    raise RuntimeError('a benchmark process ended while it started') from None
                time.sleep(.05)

    def time(self, model: str, method: str) -> float:
        """Lets all ranks take a turn; returns the seconds of a call."""
        for pipe in self.commands:
            os.write(pipe, f'{model} {method}\n'.encode())
        answer = self.answers.readline()
        if not answer:
            raise RuntimeError(f'the processes for {method} ended with {self.process.wait()}')
        return float(answer)

    def end(self) -> None:
        """Ends the processes."""
        for pipe in self.commands:
            os.close(pipe)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.terminate()
            self.process.wait()


def measure(ranks: int, models: list[str], rounds: int, pythons: dict[str, str]) -> None:
    """Measures all methods at one number of ranks, and prints."""
    groups: dict[str, Group] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for kind, python in pythons.items():
                groups[kind] = Group(kind, ranks, folder, python)
            turns = [(kind, method) for kind in groups for method in METHODS[kind]]
            for model in models:
                times: dict[str, list[float]] = {method: [] for _, method in turns}
                for n in range(rounds):
                    for kind, method in turns[n % len(turns):] + turns[:n % len(turns)]:
                        times[method].append(groups[kind].time(model, method))
                print(f'\n{ranks} ranks, {model}: {rounds} rounds, load average '
                      f'{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores')
                for method, seconds in times.items():
                    print(f'  {method:<10} {statistics.median(seconds) * 1e3:9.2f} ms'
                          f'  x old naive {ratio(seconds, times["old naive"]):6.3f}'
                          f'  x LB {ratio(seconds, times["LB"]):7.2f}', flush=True)
        finally:
            for group in groups.values():
                group.end()


def ratio(a: list[float], b: list[float]) -> float:
    """The median of the ratios within a round."""
    return statistics.median(x / y for x, y in zip(a, b, strict=True))


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--ranks', default='2,4,8', help='default: %(default)s')
    parser.add_argument('--rounds', type=int, default=9, help='default: %(default)s')
    parser.add_argument('--models', default='resnet50,small,big', help='default: %(default)s')
    parser.add_argument('--torch', default=sys.executable, metavar='PYTHON',
                        help='a Python with torch; default: this one')
    parser.add_argument('--work', help=argparse.SUPPRESS)
    parser.add_argument('--folder', help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args.work, args.folder)
        return
    pythons = {'ours': sys.executable, 'old': sys.executable}
    python = shutil.which(args.torch) or args.torch
    if subprocess.run([python, '-c', 'import torch'], capture_output=True, check=False).returncode:
        print(f'gloo: {python} has no torch')
    else:
        pythons['gloo'] = python
    for ranks in map(int, args.ranks.split(',')):
        measure(ranks, args.models.split(','), args.rounds, pythons)


if __name__ == '__main__':
    main()
