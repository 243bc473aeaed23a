"""Gives the tests of chainer_compat a fresh Python each, with warnings as errors."""

import os
import pathlib
import subprocess
import sys
from collections.abc import Callable

import pytest


@pytest.fixture
def python(tmp_path: pathlib.Path) -> Callable[..., str]:
    """``python(code, VARIABLE='value')`` runs the code in a new process; returns what it says."""

    def run(code: str, *options: str, check: bool = True, **variables: str) -> str:
        env = {k: v for k, v in os.environ.items() if not k.startswith(('CHAINER', 'PYTHON'))}
        result = subprocess.run(
            [sys.executable, '-W', 'error', *options, '-c', code],
            cwd=tmp_path, env=env | variables, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        if check:
            assert result.returncode == 0, result.stdout
        return result.stdout.strip() if check else f'{result.returncode} {result.stdout}'

    return run
