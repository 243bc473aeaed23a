"""Programs for Chainer 1.5 to 6 run unchanged, with the losses that the old version computed."""

import importlib.util
import json
import pathlib
import sys

import numpy as np
import pytest

pytestmark = pytest.mark.mpi_skip

path = pathlib.Path(__file__).with_name('record.py')
spec = importlib.util.spec_from_file_location('record', path)
record = importlib.util.module_from_spec(spec)
spec.loader.exec_module(record)

LOSSES = json.loads(record.LOSSES.read_text(encoding='utf-8'))
DIALECTS = sorted({name.split('/')[0] for name in record.DIALECT})


def check(paths, *command, **variables):
    results = record.run(paths, *command, sys.executable, **variables)
    assert sorted(results) == [record.name_of(path) for path in paths]
    for name, result in results.items():
        assert isinstance(result, list), f'{name} failed:\n{result}'
        np.testing.assert_allclose(result, LOSSES[name], rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.parametrize('version', [
    pytest.param(version, marks=pytest.mark.slow if k % 3 else ())
    for k, version in enumerate(sorted({*record.programs()} - {record.CHAINERMN}))])
def test_losses(version):
    check([path for path in record.programs()[version]
           if record.name_of(path) not in record.DIALECT])


@pytest.mark.slow
@pytest.mark.parametrize('version', DIALECTS)
def test_losses_that_need_the_dialect(version):
    check([path for path in record.programs()[version] if record.name_of(path) in record.DIALECT],
          CHAINER_COMPAT_DIALECT=version.split('.')[0])


def test_losses_on_two_ranks():
    check(record.programs()[record.CHAINERMN], 'mpiexec', '-n', '2')


def test_table():
    assert record.table() in record.PAGE.read_text(encoding='utf-8'), (
        'run tests/chainer_compat/dialect/old_programs/record.py')
