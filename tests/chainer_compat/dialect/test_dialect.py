"""CHAINER_COMPAT_DIALECT=1 to 6 gives the results of that version, and no variable those of 7.

``write_values.py`` recorded them with the old versions.
"""

import json
import os
import pathlib
import runpy
import subprocess
import sys
import types
import zipfile

import numpy as np
import pytest
from time_limits import seconds

from chainer_compat.dialect import silent_changes
from chainer_compat.patching import registry

pytestmark = [pytest.mark.mpi_skip, pytest.mark.filterwarnings('ignore')]

HERE = pathlib.Path(__file__).parent
SNAPSHOTS = HERE / 'old_snapshots'
VERSIONS = [path.stem for path in sorted(HERE.glob('*.npz'))]
script = types.SimpleNamespace(**runpy.run_path(str(HERE / 'write_values.py')))

# Version 4 has its own generator of random numbers in MultiprocessIterator.
DIFFERENT = {('4.5.0', 'multiprocess')}

#: A saved iterator, a sampler with its own generator, and a variable that is no result.
PARTS = '''
import chainer, numpy as np, pickle
from chainer.iterators import serial_iterator
iterator = chainer.iterators.SerialIterator([1, 2, 3], 2)
loaded = pickle.loads(pickle.dumps(iterator))
assert [iterator.next() for _ in range(6)] == [loaded.next() for _ in range(6)]
sampler = serial_iterator.ShuffleOrderSampler(np.random.RandomState(0))
assert isinstance(sampler, chainer.iterators.ShuffleOrderSampler)
assert sampler(np.arange(4), 0).tolist() == np.random.RandomState(0).permutation(4).tolist()
variable = chainer.Variable(np.ones((), 'f'))
variable.backward()
exec("import chainer; length = len(chainer.Variable(variable.array.reshape(1, 1)))", globals())
exec("import chainer.functions as F; y = F.matmul(x, x, transb=True)",
     {'x': chainer.Variable(np.ones(3, 'f'))})
print(variable.grad)
'''

RUN = '''
import json, pathlib, runpy, sys
values = runpy.run_path({values!r})['results']()
resumed = runpy.run_path({snapshots!r})['resume']('trainer.npz')
pathlib.Path('result').write_text(json.dumps(
    [{{name: value.tolist() for name, value in values.items()}}, resumed]))
'''


def load(path):
    with np.load(path) as file:
        return dict(file)


def python(code, folder, version):
    return subprocess.run(
        [sys.executable, '-W', 'ignore', '-c', code], cwd=folder, capture_output=True, text=True,
        timeout=seconds(60), env={**os.environ, silent_changes.VARIABLE: version})


def equal(value, old):
    return np.shape(value) == old.shape and np.allclose(value, old, 1e-5, 1e-6)


@pytest.mark.parametrize('version', [
    pytest.param(version, marks=pytest.mark.slow if k else ())
    for k, version in enumerate(VERSIONS)])
def test_values_of_old_versions(tmp_path, version):
    with zipfile.ZipFile(SNAPSHOTS / f'{version}.zip') as archive:
        archive.extractall(tmp_path)
    code = PARTS + RUN.format(values=str(HERE / 'write_values.py'),
                      snapshots=str(SNAPSHOTS / 'write_snapshots.py'))
    process = python(code, tmp_path, version[0])
    assert process.returncode == 0, process.stderr
    # As Chainer 1.24, 2.1, 3.5, 4.5, 5.4 and 6.7 print.
    assert process.stdout.strip() == ('1.0' if version > '6' else 'None'), process.stdout
    values, resumed = json.loads((tmp_path / 'result').read_text())
    old = load(HERE / f'{version}.npz')
    wrong = [name for name, array in old.items() if (version, name) not in DIFFERENT
             and not name.startswith('signature') and not equal(values[name], array)]
    assert not wrong
    reference = load(tmp_path / 'reference.npz')
    for name in ('losses', 'validation', 'lr', 'epoch'):
        np.testing.assert_allclose(resumed[name], reference[f'trainer/{name}'], 1e-4, err_msg=name)


def test_values_without_the_variable():
    values = script.results()
    for version in VERSIONS:
        old = load(HERE / f'{version}.npz')
        for name, (last, _) in script.CASES.items():
            if name in old and (version, name) not in DIFFERENT:
                is_modern = last == 7 or int(version[0]) > last
                assert equal(values[name], old[name]) == is_modern, (version, name)


def test_positions_are_those_of_version_1():
    old = load(HERE / '1.24.0.npz')
    functions = {path.split('.')[0]: (first, list(names))
                 for (_, path), (first, *names) in silent_changes.POSITIONS.items()}
    assert {f'signature {name}' for name in functions} == {
        name for name in old if name.startswith('signature')}
    for name, (first, names) in functions.items():
        assert list(old[f'signature {name}'][first:])[:len(names)] == names, name


def test_wrong_values(monkeypatch):
    for value in ('0', '8', '1.24', '12', 'x'):
        monkeypatch.setenv(silent_changes.VARIABLE, value)
        message = f"{silent_changes.VARIABLE} must be the major version.*not '{value}'"
        with pytest.raises(ValueError, match=message):
            silent_changes.version()
    for value in ('', '7'):  # nothing to restore
        monkeypatch.setenv(silent_changes.VARIABLE, value)
        before = dict(registry.patches)
        silent_changes.register()
        assert registry.patches == before
