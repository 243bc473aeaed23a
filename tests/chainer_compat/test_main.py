"""``python -m chainer_compat`` shows what is installed, and why parts are missing."""

import importlib.util
import re

import pytest

from chainer_compat.__main__ import main

pytestmark = pytest.mark.mpi_skip

MAIN = 'import runpy; runpy.run_module("chainer_compat", run_name="__main__")'
NAMES = ['Python', 'Chainer', 'NumPy', 'SciPy', 'CuPy', 'CUDA', 'NCCL', 'cuDNN', 'PyTorch']
WITHOUT_CUPY = 'import sys; sys.modules["cupy"] = None\n'


def lines(said):
    return dict(re.findall(r'^(?!Shims|Active)(\w+): +(.*)$', said, re.MULTILINE))


def test_without_cupy(python):
    said = python(WITHOUT_CUPY + MAIN, CHAINER_COMPAT_DIALECT='4')
    found = lines(said)
    assert found.pop('Dialect').startswith('Chainer 4 ')
    assert list(found) == NAMES
    assert re.fullmatch(r'3\.\d+\.\d+', found['Python'])
    assert found['Chainer'] == '7.8.1'
    assert re.fullmatch(r'\d+\.\d+\.\d+', found['NumPy'])
    for name in NAMES[4:-1]:
        assert found[name].startswith('none (ModuleNotFoundError: '), name
    if importlib.util.find_spec('torch'):
        assert re.fullmatch(r'2\.\d+\S* computes convolutions .* on the CPU', found['PyTorch'])
        assert 'is \'never\'' in lines(python(WITHOUT_CUPY + MAIN, CHAINER_USE_TORCH='never'))[
            'PyTorch']
        assert lines(python(WITHOUT_CUPY + MAIN, CHAINER_TORCH_COMPUTE_DTYPE='bfloat16'))[
            'PyTorch'].endswith(' on the CPU, matrix multiplications in bfloat16')
    else:
        assert found['PyTorch'].startswith('none (ModuleNotFoundError: ')
    assert re.search(r'^  negative_padding +chainer\.dataset\.convert, ', said, re.M)
    assert 'float16_header' not in said
    assert "GPU backend is not available: ModuleNotFoundError: import of cupy" in said
    assert 'Dialect: Chainer 4 (CHAINER_COMPAT_DIALECT=4)' in said
    assert re.search(r'^  gradient_of_clip +chainer\.functions\.math\.clip', said, re.M)
    assert 'fan_out' not in said  # of version 1


@pytest.mark.skipif(importlib.util.find_spec('cupy') is None, reason='needs CuPy')
def test_with_cupy(python):
    found = lines(said := python(MAIN))
    assert re.fullmatch(r'1[34]\.\d+\.\d+', found['CuPy'])
    assert found['CUDA'].startswith('runtime 1')
    assert re.search(r"GPU backend is (available|not available: \w+)", said)
    assert ('float16_header' in said) == found['CuPy'].startswith('14')


def test_a_cupy_that_cannot_be_loaded(python, tmp_path):
    tmp_path.joinpath('cupy.py').write_text('raise ImportError("libcublas.so.12: cannot open")')
    said = python(MAIN)
    assert "GPU backend is not available: ImportError: libcublas.so.12: cannot open" in said


def test_without_compat(python):
    said = python(WITHOUT_CUPY + MAIN, '-W', 'ignore', CHAINER_COMPAT='0')
    assert list(lines(said)) == NAMES
    assert 'Shims: disabled by CHAINER_COMPAT=0' in said


def test_options(monkeypatch, capsys):
    for option, status in [('--help', 0), ('--json', 2)]:
        monkeypatch.setattr('sys.argv', ['__main__.py', option])
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code == status
    out, err = capsys.readouterr()
    assert out.startswith('usage: python -m chainer_compat')
    assert 'unrecognized arguments: --json' in err


def test_names_of_a_program_without_old_ones(python, tmp_path):
    tmp_path.joinpath('program.py').write_text(
        'import sys, numpy\nassert numpy.float is float\nprint(sys.argv)')
    said = python('import sys; sys.argv[1:] = ["names", "program.py", "--epoch", "3"]\n' + MAIN)
    assert said.splitlines() == ["['program.py', '--epoch', '3']", 'Old CuPy names: none']


def test_old_names_are_mentioned(python):
    said = python(WITHOUT_CUPY + MAIN, CHAINER_COMPAT_NAMES='all')
    assert 'are restored (CHAINER_COMPAT_NAMES=all)' in said
