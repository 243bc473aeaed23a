"""Removes each synchronization of the GPU code, one at a time; the tests must fail each time.

``python tests/virtual_gpu/mutations.py [--jobs 2] [name]`` runs tests in lazy mode on 2 ranks, on a
copy of the project, and lists the mutations that no test notices.
"""

import argparse
import concurrent.futures
import dataclasses
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).parents[2]
TRANSPORT = 'chainermn/_transport/nccl/nccl_transport.py'
BUFFERS = 'chainermn/_transport/array_buffers.py'
REDUCER = 'chainermn/_gradients/mean_queue.py'
QUEUE = 'chainermn/_gradients/nccl_mean_queue.py'
MESSAGES = 'chainermn/links/_pipeline/messages.py'
TRANSFERS = 'chainermn/links/_pipeline/transfers.py'
BATCHED = 'chainermn/_transport/batched_copy.py'


@dataclasses.dataclass(frozen=True)
class Mutation:
    """Replaces the first ``old`` after ``after`` in a file by ``new``; then ``tests`` must fail."""

    name: str
    file: str
    after: str
    old: str
    new: str
    tests: tuple[str, ...]
    protect: bool = True


CUDA_AWARE = ('tests/gpu/test_cuda_aware_mpi_on_gpu.py',)
MODELS = ('tests/gpu/test_communicators_on_gpu.py',)
OVERLAP = ('tests/gpu/test_overlap_on_gpu.py', 'tests/gpu/test_memory_pool_on_gpu.py')
PIPELINE = ('tests/gpu/test_pipeline_on_gpu.py',)
SYNCHRONIZE = 'cupy.cuda.get_current_stream().synchronize()'

MUTATIONS = [
    Mutation('MPI sends device memory', BUFFERS, 'def to_buffer', SYNCHRONIZE, 'pass',
             CUDA_AWARE, protect=False),
    Mutation('MPI receives into device memory', BUFFERS, 'def new_buffer', SYNCHRONIZE, 'pass',
             CUDA_AWARE, protect=False),
    Mutation('MPI sends a copy in device memory', BUFFERS, 'def copied', SYNCHRONIZE, 'pass',
             CUDA_AWARE, protect=False),
    Mutation('pinned memory is used again', BUFFERS, 'def from_buffer', SYNCHRONIZE, 'pass',
             (*MODELS, 'tests/gpu/test_functions_on_gpu.py')),
    Mutation('an exchange follows the computation', TRANSPORT, 'def _on_stream',
             'self._stream.wait_event(array_buffers.event())', 'pass', MODELS),
    Mutation('the caller waits for a mean', TRANSPORT, 'def mean(',
             'wait(self.begin_mean(arrays, results))', 'self.begin_mean(arrays, results)', MODELS),
    Mutation('the caller waits for a compressed mean', TRANSPORT, 'def mean_compressed',
             'wait(self.begin_mean(arrays, results, codec))',
             'self.begin_mean(arrays, results, codec)', ('tests/gpu/test_compression_on_gpu.py',)),
    Mutation('the caller waits for bcast_data', TRANSPORT, 'def bcast_arrays', 'wait(done)', 'pass',
             MODELS),
    Mutation('the caller waits for a queue', QUEUE, 'def wait', 'wait(self._done)', 'pass',
             OVERLAP),
    Mutation('arrays live until they are sent', QUEUE, 'def submit', 'self._held.append(arrays)',
             'pass', OVERLAP),
    Mutation('tables are of one stream', BATCHED, 'def _launch',
             'cupy.cuda.get_current_stream().ptr', '0', ('tests/gpu/test_batched_copy_on_gpu.py',)),
    Mutation('a pipeline sends what is computed', MESSAGES, 'def _send_computed',
             ' and self._transfers.is_reached(self._unsent[0].computed)', '', PIPELINE),
    Mutation('a pipeline sends before it waits', MESSAGES, 'def begin', 'self._send_all()', 'pass',
             PIPELINE),
    Mutation('a pipeline has a stream for transfers', TRANSFERS, 'def on_stream',
             'self._stream is None', 'True', PIPELINE),
    Mutation('a stage gets memory of its stream', TRANSFERS, 'def received',
             'copies = [x.copy() if _on_device(x) else x for x in arrays]', 'copies = arrays',
             PIPELINE),
    Mutation('received arrays live until they are copied', TRANSFERS, 'def received',
             'self._being_copied.append((self._event(), arrays))', 'pass', PIPELINE),
    Mutation('the thread follows the computation', REDUCER, 'def _computed_on',
             'computed.synchronize()', 'pass', OVERLAP),
    Mutation('the caller follows the thread', REDUCER, 'yield', SYNCHRONIZE, 'pass', OVERLAP),
    Mutation('the thread uses the device', REDUCER, 'def entered',
             'with array_buffers.device_in_thread(device.id):', 'if True:', OVERLAP),
]


def mutated(mutation: Mutation, folder: pathlib.Path) -> None:
    """Copy the project to a folder, with the mutation."""
    for name in ('chainermn', 'chainer_compat', 'tests', 'pyproject.toml', 'examples'):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns('__pycache__'))
        else:
            shutil.copy(source, folder)
    path = folder / mutation.file
    before, after, rest = path.read_text().partition(mutation.after)
    assert mutation.old in rest, f'{mutation.name}: {mutation.file} no longer contains this text'
    path.write_text(before + after + rest.replace(mutation.old, mutation.new, 1))


def is_noticed(mutation: Mutation) -> tuple[bool, str]:
    """Run the tests with a mutation; return whether they fail, and pytest's summary."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        mutated(mutation, folder)
        env = os.environ | {
            'VGPU_MODE': 'lazy', 'VGPU_POISON': '1', 'VGPU_DEVICES': '2',
            'VGPU_PROTECT': str(int(mutation.protect)), 'PYTHONPATH': str(folder),
            # If a test fails on only one rank, the other ranks may wait for it.
            'CHAINERMN_TIMEOUT': '30'}
        command = [sys.executable, 'tests/run_ranks.py', '--ranks', '2', '-m', 'gpu', '-q', '-x',
                   *mutation.tests]
        done = subprocess.run(command, cwd=folder, env=env, text=True, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT)
    summary = re.findall(r'\d+ (?:passed|failed|errors?)\b.* in [\d.]+s', done.stdout)
    return done.returncode != 0, summary[-1] if summary else f'status {done.returncode}'


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('name', nargs='?', default='', help='a part of the names of mutations')
    parser.add_argument('--jobs', type=int, default=1, help='runs at a time; default: 1')
    args = parser.parse_args()
    chosen = [mutation for mutation in MUTATIONS if args.name in mutation.name]
    missed = []
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as executor:
        for mutation, (noticed, text) in zip(chosen, executor.map(is_noticed, chosen), strict=True):
            print(f'{"noticed" if noticed else "MISSED "}  {mutation.name}: {text}', flush=True)
            if not noticed:
                missed.append(mutation.name)
    print(f'{len(chosen) - len(missed)} of {len(chosen)} mutations were noticed')
    return 1 if missed else 0


if __name__ == '__main__':
    sys.exit(main())
