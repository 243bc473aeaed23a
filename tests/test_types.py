"""Type checkers and editors know the public interface, and find mistakes in scripts."""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import pytest

import chainermn

pytestmark = [
    pytest.mark.mpi_skip,
    pytest.mark.skipif(importlib.util.find_spec('mypy') is None, reason='needs mypy'),
    pytest.mark.limit(180)]

#: Lines of a script, with the message of mypy.
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
    "comm.bcast_obj({}, root='0')": 'incompatible type "str"; expected "int"',
    'comm.mpi_comm.Barier()': 'has no attribute "Barier"',
    'try:': '',
    '    comm.allreduce(np.ones(comm.rank))': '',
    'except chainermn.CollectiveMismatchError as error:': '',
    '    reveal_type(error.calls)': 'str, ...]',
    'from chainer import optimizers as O': '',
    'optimizer = chainermn.create_multi_node_optimizer(O.SGD(), comm)': '',
    'reveal_type(optimizer)': '_MultiNodeOptimizer',
    'optimizer.update()': '',
    "optimizer.add_hook('l2')": 'expected "Callable',
    'print(optimizer.t + 1, optimizer.hyperparam)': '',
    'reveal_type(comm.allgather_obj(comm.rank))': 'list[int]',
    "chainermn.create_communicator('naive', timeuot=3)": 'Unexpected keyword argument "timeuot"',
    'comm.finalize()': '',
}


def test_mistakes_are_found_and_nothing_else(tmp_path):
    (tmp_path / 'script.py').write_text('\n'.join(SCRIPT))
    done = subprocess.run(
        [sys.executable, '-m', 'mypy', '--config-file=', '--ignore-missing-imports',
         '--follow-imports=silent', 'script.py'], cwd=tmp_path, text=True, capture_output=True,
        env={**os.environ, 'MYPYPATH': str(pathlib.Path(chainermn.__file__).parents[1])})
    lines = re.findall(r'^script.py:(\d+): (?:error|note): (.*)$', done.stdout, re.MULTILINE)
    messages = {int(number): text for number, text in reversed(lines)}  # the first of each line
    for number, (line, expected) in enumerate(SCRIPT.items(), 1):
        found = messages.pop(number, '')
        assert expected in found and bool(expected) == bool(found), f'{line}: {found!r}'
    assert not messages, done.stdout + done.stderr
