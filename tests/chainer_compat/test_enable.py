"""Starting Python imports nothing slow, and enables only the requested features."""

import ast
import pathlib
import re
import subprocess
import venv

import chainer
import pytest
from time_limits import seconds

import chainer_compat
from chainer_compat.patching import variables

pytestmark = pytest.mark.mpi_skip  # nothing here knows of MPI


def test_start_imports_one_module(python):
    code = 'import sys; print(*sorted(sys.modules))'
    bare = python(code, '-I', CHAINER_COMPAT='0', CHAINERMN_OVERLAY='0').split()
    assert python(code).split() == bare
    assert [name for name in bare if name.startswith('chainer')] == ['chainer_compat']
    assert not {'numpy', 'importlib.metadata', 'typing', 'chainer_compat.patching'} & {*bare}


def test_a_program(python):
    """Nothing is imported before it is used, and enabling twice changes nothing."""
    python('''
import sys
import chainer_compat
before = sys.path[:], sys.meta_path[:]
assert any('chainer' in repr(finder) for finder in sys.meta_path)
chainer_compat.enable()
assert before == (sys.path, sys.meta_path)
import chainer_compat.patching.registry, chainer_compat.shims
assert 'numpy' not in sys.modules
import chainer, chainermn
assert chainermn.__version__.startswith('8.')
for name in 'chainer_compat.pytorch.conversion', 'torch', 'onnx':
    assert name not in sys.modules
''', '-I')


def test_overlay_comes_after_pythonpath_and_before_site_packages(python, tmp_path):
    code = 'import sys; print(*sys.path, sep="\\n")'
    path = python(code, PYTHONPATH=str(tmp_path)).splitlines()
    overlay = str(pathlib.Path(chainer_compat._overlay()))
    site = next(p for p in path if p.endswith('site-packages'))
    assert path.index(str(tmp_path)) < path.index(overlay) < path.index(site)


def test_overlay_comes_first_in_a_new_virtual_environment(tmp_path):
    """Python reads the ``.pth`` files of a virtual environment before it knows its folders."""
    root = pathlib.Path(__file__).parents[2]
    enable = next(ast.literal_eval(node.value) for node in ast.parse(
        root.joinpath('setup.py').read_text(encoding='utf-8')).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == 'ENABLE')
    venv.create(tmp_path, symlinks=True)
    site = next(tmp_path.glob('lib/python*/site-packages'))
    site.joinpath('chainer_compat.pth').write_text(f'{root}\n{enable}')
    path = subprocess.run(
        [tmp_path / 'bin' / 'python', '-c', 'import sys; print(*sys.path, sep="\\n")'],
        check=True, text=True, stdout=subprocess.PIPE).stdout.splitlines()
    assert path.index(str(root)) < path.index(str(site))


def test_without_overlay_the_old_chainermn_is_found(python):
    origin = python('import importlib.util as u; print(u.find_spec("chainermn").origin); '
                    'import chainermn; assert chainermn.__version__ == "7.8.1"',
                    CHAINERMN_OVERLAY='0')
    folder, *rest = pathlib.Path(origin).parts[-3:]
    assert folder in ('chainer-7.8.1', 'site-packages')  # Chainer can be installed in both
    assert rest == ['chainermn', '__init__.py']


def test_without_compat_chainer_is_left_alone(python):
    code = 'import sys; print(any("chainer" in repr(f) for f in sys.meta_path))'
    assert python(code, CHAINER_COMPAT='0') == 'False'


@pytest.mark.parametrize('value', ['false', 'Off', ' no '])
def test_values_that_turn_it_off(python, value):
    code = ('import sys; print(any("chainer" in repr(f) for f in sys.meta_path), '
            '[path for path in sys.path if "chainermn" in path and "site" not in path])')
    assert python(code, CHAINER_COMPAT=value, CHAINERMN_OVERLAY=value) == python(
        code, CHAINER_COMPAT='0', CHAINERMN_OVERLAY='0')


@pytest.mark.parametrize('name', [
    'CHAINER_COMPAT', 'CHAINERMN_OVERLAY', 'CHAINER_COMPAT_NUMPY_ALIASES'])
def test_importing_chainer_reports_a_misspelled_value(python, name):
    said = python('import chainer', check=False, **{name: 'flase'})
    assert said.startswith('1 ') and said.endswith(
        f"ValueError: {name} is 'flase'. Use 1, true, yes or on; 0, false, no or off; or unset it."
        '\n')
    assert python('', **{name: 'flase'}) == ''


@pytest.mark.parametrize('name, value, advice', [
    ('CHAINER_TYPE_CHECK', 'x', '1 or 0, or unset it'), ('CHAINER_DEBUG', '', '1 or 0, or unset'),
    ('CHAINER_DTYPE', 'float31', 'one of float16, float32, float64, mixed16')])
def test_importing_chainer_reports_values_that_it_does_not_accept(python, name, value, advice):
    said = python('import chainer', check=False, **{name: value})
    assert f'\nValueError: {name} is {value!r}. Use {advice}' in said
    assert 'During handling' not in said


def test_variables_that_chainer_reads_as_integers_and_dtypes():
    source = pathlib.Path(chainer.__file__).read_text('utf-8')
    names = {*re.findall(r"int\(\s*os\.environ\.get\('(\w+)', '[01]'\)", source)}
    assert names == {*variables._INTEGERS}
    assert {*re.findall(r"'(float\d\d|mixed16)'", source)} == {*variables._DTYPES}


@pytest.mark.slow
@pytest.mark.parametrize('method', ['fork', 'spawn', 'forkserver'])
def test_child_processes(python, tmp_path, method):
    tmp_path.joinpath('main.py').write_text(f'''
import multiprocessing as mp

def child(queue):
    import chainer, chainermn
    queue.put((chainer.__version__, chainermn.__version__))

if __name__ == '__main__':
    context = mp.get_context({method!r})
    queue = context.Queue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    print(*queue.get(timeout={seconds(50)}))
    process.join()
''')
    code = 'import runpy; runpy.run_path("main.py", run_name="__main__")'
    if method != 'fork':
        code = 'import subprocess, sys; subprocess.run([sys.executable, "main.py"], check=True)'
    old, ours = python(code).split()
    assert old == '7.8.1'
    assert ours.startswith('8.')


def test_finder_leaves_other_modules_alone():
    for name in ['numpy', 'chainerx', 'chainer_compat', 'chainermn.communicators', 'chain']:
        assert chainer_compat.ChainerFinder.find_spec(name) is None
