"""A type checker, and so an editor, knows what scripts use and finds their mistakes."""

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

#: Each line with what mypy says of it.
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
    'comm.finalize()': '',
}


def test_mistakes_are_found_and_nothing_else(tmp_path):
    (tmp_path / 'script.py').write_text('\n'.join(SCRIPT))
    done = subprocess.run(
        [sys.executable, '-m', 'mypy', '--config-file=', '--ignore-missing-imports',
         '--follow-imports=silent', 'script.py'], cwd=tmp_path, text=True, capture_output=True,
        env={**os.environ, 'MYPYPATH': str(pathlib.Path(chainermn.__file__).parents[1])})
    said = {int(number): text for number, text in re.findall(
        r'^script.py:(\d+): (?:error|note): (.*)$', done.stdout, re.MULTILINE)}
    for number, (line, expected) in enumerate(SCRIPT.items(), 1):
        found = said.pop(number, '')
        assert expected in found and bool(expected) == bool(found), f'{line}: {found!r}'
    assert not said, done.stdout + done.stderr
