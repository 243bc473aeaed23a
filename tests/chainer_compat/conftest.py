"""Gives the tests of chainer_compat a fresh Python each, with warnings as errors."""

import contextlib
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable

import pytest

#: Code of the fixture ``python`` runs without the shim that the variable WITHOUT_SHIM names.
FORGET = '''
from chainer_compat.patching import registry
from chainer_compat import shims
for table in (registry.edits, registry.patches):
    for names in table.values():
        names[:] = [shim for shim in names if shim.__name__ != {!r}]
'''


@pytest.fixture
def python(tmp_path: pathlib.Path) -> Callable[..., str]:
    """``python(code, VARIABLE='value')`` runs the code in a new process; returns what it says."""

    def run(code: str, *options: str, check: bool = True, **variables: str) -> str:
        env = {k: v for k, v in os.environ.items() if not k.startswith(('CHAINER', 'PYTHON'))}
        env |= variables
        if 'WITHOUT_SHIM' in env:
            code = FORGET.format(env['WITHOUT_SHIM']) + code
        result = subprocess.run(
            [sys.executable, '-W', 'error', *options, '-c', code], cwd=tmp_path, env=env, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        if check:
            assert result.returncode == 0, result.stdout
        return result.stdout.strip() if check else f'{result.returncode} {result.stdout}'

    return run


@pytest.fixture
def operators():
    """Return a context that fills a set with the names of the operators that PyTorch runs."""
    dispatch = pytest.importorskip('torch.utils._python_dispatch')

    class Recorder(dispatch.TorchDispatchMode):
        def __init__(self, names):
            super().__init__()
            self.names = names

        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            self.names.add(operator.overloadpacket.__name__)
            return operator(*args, **(kwargs or {}))

    @contextlib.contextmanager
    def record():
        names = set()
        with Recorder(names):
            yield names

    return record


@pytest.fixture
def sizes(monkeypatch):
    """The number of elements of each block."""
    from chainer_compat.updates import block_updates

    seen = []

    class Block(block_updates.Block):
        def __init__(self, data, grad):
            super().__init__(data, grad)
            seen.append(data.size)

    monkeypatch.setattr(block_updates, 'Block', Block)
    return seen


@pytest.fixture(params=['torch', 'numpy'])
def kernels(request, monkeypatch):
    """Optimizers update by PyTorch's kernels, and by NumPy."""
    import chainer

    if request.param == 'torch':
        pytest.importorskip('torch')
        monkeypatch.setattr(chainer.global_config, 'fused_updates', True)
    else:
        monkeypatch.setattr(chainer.global_config, 'use_torch', 'never')
    return request.param
