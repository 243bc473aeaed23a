"""Type checkers and editors know the public interface, and find mistakes in scripts."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

import chainermn

pytestmark = [pytest.mark.mpi_skip, pytest.mark.limit(180)]

ROOT = pathlib.Path(chainermn.__file__).parents[1]

#: Lines of a script, with mypy's message for each.
SCRIPT = {
    'import chainermn': '',
    'import numpy as np': '',
    "comm = chainermn.create_communicator('naive')": '',
    'reveal_type(comm)': 'CommunicatorBase',
    'comm.barrier()': '',
    'comm.mpi_comm.Barrier()': '',
    'print(comm.rank + comm.intra_rank, comm.allreduce_obj(1))': '',
    'comm.alreduce(1)': '"CommunicatorBase" has no attribute "alreduce"; maybe "allreduce',
    "chainermn.create_communicator('nave')": 'incompatible type "Literal[\'nave\']"',
    "comm.gather_obj({}, root='0')": 'incompatible type "str"; expected "int"',
    'comm.mpi_comm.Barier()': 'has no attribute "Barier"',
    'try:': '',
    '    comm.allreduce(np.ones(comm.rank))': '',
    'except chainermn.CollectiveMismatchError as error:': '',
    '    reveal_type(error.calls)': 'str, ...]',
    'from chainer import optimizers as O': '',
    'optimizer = chainermn.create_multi_node_optimizer(O.SGD(), comm)': '',
    'reveal_type(optimizer)': 'MultiNodeOptimizer',
    'optimizer.update()': '',
    "optimizer.add_hook('l2')": 'expected "Callable',
    'print(optimizer.t + 1, optimizer.hyperparam)': '',
    'reveal_type(comm.allgather_obj(comm.rank))': 'list[int]',
    'reveal_type(comm.allreduce(np.ones(3)))': 'ndarray',
    'reveal_type(comm.reduce(np.ones(3)))': 'None',
    'reveal_type(comm.allgather(np.ones(3))[0])': 'ndarray',
    'reveal_type(comm.bcast_obj(3))': 'int',
    'reveal_type(comm.bcast_obj([1] if comm.rank == 0 else None))': 'list[int]',
    'reveal_type(comm.bcast(np.ones(3) if comm.rank == 0 else None))': 'ndarray',
    "reveal_type(comm.scatter_obj(['a', 'b'] if comm.rank == 0 else None))": 'str',
    'received = comm.bcast_obj(None)': '',
    "chainermn.create_communicator('naive', timeuot=3)": 'Unexpected keyword argument "timeuot"',
    'part = chainermn.scatter_dataset([1, 2, 3], comm, shuffle=True)': '',
    'part = chainermn.scatter_dataset([1, 2] if comm.rank == 0 else None, comm)': '',
    'chainermn.functions.recv(comm, 0).backward()': '',
    'reveal_type(part)': 'SubDataset',
    'reveal_type(chainermn.scatter_index(10, comm))': 'tuple[int, int]',
    'from chainer.iterators import SerialIterator': '',
    'batches = SerialIterator(part, 2)': '',
    'iterator = chainermn.iterators.create_multi_node_iterator(batches, comm)': '',
    'reveal_type(iterator)': '_MultiNodeIterator',
    'reveal_type(iterator.epoch)': 'int',
    'from chainer.training import extensions as E': '',
    'evaluator = chainermn.create_multi_node_evaluator(E.Evaluator(iterator, None), comm)': '',
    'reveal_type(evaluator)': 'Evaluator',
    "checkpointer = chainermn.create_multi_node_checkpointer('run', comm)": '',
    'reveal_type(checkpointer)': 'MultiNodeCheckpointer',
    "checkpointer = chainermn.create_multi_node_checkpointer(0, comm)": '"str',
    'report = chainermn.extensions.create_multi_node_report(E.LogReport(), comm)': '',
    'reveal_type(report)': 'LogReport',
    'def work(comm: chainermn.CommunicatorBase, n: int) -> float: return n / comm.size': '',
    'reveal_type(chainermn.launch(work, 2, 3))': 'list[float]',
    "reveal_type(chainermn.kvstore.create('dist_sync', comm).pull)": 'ndarray',
    'received = comm.recv(0, 0)': '',
    'reveal_type(received)': 'ndarray',
    'print(received.sum() + received[0] + 1)': '',
    'received.summ()': 'has no attribute "summ"',
    'first, second = comm.recv(0, 0)': '',
    'reveal_type(comm.irecv(0).wait())': 'ndarray',
    'requests = [comm.isend(first, 1)]': '',
    'requests.append(comm.irecv(0))': '',
    'comm.waitall(requests)[1].sum()': '',
    'reveal_type(comm.waitall([comm.irecv(0), comm.irecv(1)])[0])': 'ndarray',
    'reveal_type(comm.scatter([first, second]))': 'ndarray',
    'reveal_type(comm.reduce_scatter([first, second]))': 'ndarray',
    'def pick(x: int | str | None) -> None: reveal_type(comm.bcast_obj(x))': 'object',
    'from chainer import links as L': '',
    'model = L.Linear(3, 2)': '',
    'comm.bcast_data(model)': '',
    'comm.bcast_data([1])': 'expected "Link"',
    'reveal_type(chainermn.links.create_mnbn_model(model, comm))': 'Linear',
    'optimizer.setup(model).update(lambda: model(received))': '',
    'class Sign:': '',
    '    def compress(self, x, key): return np.signbit(x)': '',
    '    def decompress(self, y, size, dtype): return 1 - 2 * y.astype(dtype)': '',
    'comm.multi_node_mean_grad(model, compression=Sign())': '',
    'comm.multi_node_mean_grad(model, compression=3)': 'incompatible type "int"',
    'from chainermn.communicators import compression': '',
    "reveal_type(compression.get('fp16'))": 'Compressor | ',
    'service = comm.serve(lambda source, request: [request, b"end"])': '',
    'reveal_type(service.ask({1: [b"start"]})[1])': 'ndarray',
    'comm.finalize()': '',
}
#: Messages of pyright that differ from mypy's.
PYRIGHT = {
    'comm.alreduce(1)': 'Cannot access attribute "alreduce" for class "CommunicatorBase"',
    "chainermn.create_communicator('nave')": 'is not assignable to type "CommunicatorName"',
    "comm.gather_obj({}, root='0')": 'is not assignable to "int"',
    'comm.mpi_comm.Barier()': 'Cannot access attribute "Barier"',
    "optimizer.add_hook('l2')": 'is not assignable to type "(Optimizer) -> object"',
    "chainermn.create_communicator('naive', timeuot=3)": 'No parameter named "timeuot"',
    'def pick(x: int | str | None) -> None: reveal_type(comm.bcast_obj(x))': 'int | str',
    'received.summ()': 'Cannot access attribute "summ"',
    'comm.bcast_data([1])': 'is not assignable to "Link"',
    'comm.multi_node_mean_grad(model, compression=3)': 'is not assignable to type "Compression"',
}


def check(messages, expected_by_line, output):
    """Compare messages by line number with the expected ones."""
    for number, (line, expected) in enumerate(expected_by_line.items(), 1):
        found = messages.pop(number, '')
        assert expected in found and bool(expected) == bool(found), f'{line}: {found!r}'
    assert not messages, output


@pytest.mark.slow
def test_mypy_finds_mistakes_and_nothing_else(tmp_path):
    pytest.importorskip('mypy')
    (tmp_path / 'script.py').write_text('\n'.join(SCRIPT))
    done = subprocess.run(
        [sys.executable, '-m', 'mypy', '--config-file=', '--ignore-missing-imports',
         '--follow-imports=silent', 'script.py'], cwd=tmp_path, text=True, capture_output=True,
        env={**os.environ, 'MYPYPATH': str(ROOT)})
    lines = re.findall(r'^script.py:(\d+): (?:error|note): (.*)$', done.stdout, re.MULTILINE)
    messages = {int(number): text for number, text in reversed(lines)}  # the first of each line
    check(messages, SCRIPT, done.stdout + done.stderr)


@pytest.mark.full
def test_pyright_finds_mistakes_and_nothing_else(tmp_path):
    pyright = shutil.which('pyright')
    if pyright is None:
        pytest.skip('needs pyright')
    version = subprocess.run([pyright, '--version'], text=True, capture_output=True)
    if version.returncode:  # PyPI's package downloads it on first use
        pytest.skip(f'pyright does not start: {version.stdout}{version.stderr}')
    (tmp_path / 'script.py').write_text('\n'.join(SCRIPT))
    # Chainer declares that it is typed, but does not declare its exports.
    (tmp_path / 'pyrightconfig.json').write_text(json.dumps({
        'extraPaths': [str(ROOT)], 'reportPrivateImportUsage': False}))
    done = subprocess.run([pyright, '--outputjson', '--pythonpath', sys.executable], cwd=tmp_path,
                          text=True, capture_output=True)
    diagnostics = json.loads(done.stdout)['generalDiagnostics']
    messages = {each['range']['start']['line'] + 1: each['message']
                for each in reversed(diagnostics)}
    check(messages, SCRIPT | PYRIGHT, done.stdout)
