"""Compiles C++ for the host, once for all ranks and workers of a run."""

import ctypes
import functools
import hashlib
import os
import pathlib
import shutil
import subprocess
import tempfile

import filelock
import pytest

#: A folder that the processes of a run share, set by run_ranks.py.
VARIABLE = 'CHAINERMN_TEST_COMPILED'


@functools.cache
def library(source: str, *options: str) -> ctypes.CDLL:
    """Compile C++ source and return the library. Skip the test if there is no compiler."""
    compiler = shutil.which('g++')
    if compiler is None:
        pytest.skip('needs g++')
    command = [compiler, '-O1', '-shared', '-fPIC', *options]
    name = hashlib.sha256('\0'.join([*command, source]).encode()).hexdigest()
    with tempfile.TemporaryDirectory() as own:
        path = pathlib.Path(os.environ.get(VARIABLE, own), name)
        with filelock.FileLock(f'{path}.lock'):
            if not path.exists():
                subprocess.run([*command, '-x', 'c++', '-', '-o', path], input=source, text=True,
                               check=True)
        return ctypes.CDLL(str(path))
