"""The loader changes only the patched modules: no files, no other packages, no tools."""

import importlib.util
import pathlib
import sys
import types
from importlib.machinery import SourceFileLoader

import chainer
import pytest

from chainer_compat import shims
from chainer_compat.patching import registry
from chainer_compat.patching.loader import PatchingLoader, find_spec

pytestmark = pytest.mark.mpi_skip

CHAINER = pathlib.Path(chainer.__file__).parent.parent


def file_of(name):
    return CHAINER.joinpath(*name.split('.')).with_suffix('.py')


def sources(shim):
    return [file_of(name).read_text(encoding='utf-8')
            for name in registry.edits if shim in registry.edits[name]]


@pytest.mark.parametrize('cupy', ['13.6.0', '14.2.0'])
def test_every_text_is_in_chainer(monkeypatch, cupy):
    monkeypatch.setitem(sys.modules, 'cupy', types.SimpleNamespace(__version__=cupy))
    for shim in registry.find_shims():
        texts = sources(shim)
        for old, new in (shim() if texts else {}).items():
            assert any(old in text for text in texts), (shim.__name__, old)
            assert old.count('\n') == new.count('\n'), 'line numbers must not change'


def edited(name, text):
    for shim in registry.edits[name]:
        for old, new in shim().items():
            text = text.replace(old, new)
    return text


def known(code):
    # Not the columns of the module's own statements: an edit moves where a function ends.
    return code.co_consts, code.co_code, code.co_names, list(code.co_lines())


@pytest.mark.parametrize('name', registry.edits)
def test_compiled_code_is_the_edited_file(monkeypatch, name):
    """Python's cache keeps the original."""
    path = str(file_of(name))
    original = file_of(name).read_text(encoding='utf-8')
    texts = set()
    for cupy in '13.6.0', '14.2.0':
        monkeypatch.setitem(sys.modules, 'cupy', types.SimpleNamespace(__version__=cupy))
        text = edited(name, original)
        if text not in texts:
            texts.add(text)
            patched = PatchingLoader(name, path).get_code(name)
            assert known(patched) == known(compile(text, path, 'exec', dont_inherit=True))
    assert SourceFileLoader(name, path).get_code(name) == compile(
        original, path, 'exec', dont_inherit=True)


@pytest.fixture
def loader(monkeypatch, tmp_path):
    """A loader of an edited module, whose cache is in ``tmp_path``."""
    monkeypatch.setattr(sys, 'pycache_prefix', str(tmp_path))
    monkeypatch.setattr(sys, 'dont_write_bytecode', False)
    name = 'chainer.functions.array.as_strided'
    return PatchingLoader(name, str(file_of(name)))


def compilations(monkeypatch, loader):
    found = []
    compiled = PatchingLoader._compiled
    monkeypatch.setattr(PatchingLoader, '_compiled',
                        lambda self, blocks: found.append(0) or compiled(self, blocks))
    code = loader.get_code(loader.name)
    return len(found), code


def caches(folder):
    return [*folder.rglob('chainer.functions.array.as_strided*.pyc')]


def test_edited_code_is_compiled_once(monkeypatch, loader, tmp_path):
    assert compilations(monkeypatch, loader)[0] == 1
    assert len(caches(tmp_path)) == 1
    n, code = compilations(monkeypatch, loader)
    assert n == 0
    text = edited(loader.name, file_of(loader.name).read_text(encoding='utf-8'))
    assert known(code) == known(compile(text, loader.path, 'exec', dont_inherit=True))


@pytest.mark.parametrize('change', [
    lambda data: b'', lambda data: data[:30], lambda data: data[:12] + b'N',
    lambda data: data[:4] + b'x' + data[5:], lambda data: b'x' + data[1:]],
    ids=['empty', 'cut off', 'no code', 'other texts', 'other Python'])
def test_a_cache_that_does_not_fit_is_replaced(monkeypatch, loader, tmp_path, change):
    loader.get_code(loader.name)
    cache, = caches(tmp_path)
    right = cache.read_bytes()
    cache.write_bytes(change(right))
    assert compilations(monkeypatch, loader)[0] == 1
    assert cache.read_bytes() == right


def test_another_edit_is_compiled(monkeypatch, loader):
    loader.get_code(loader.name)
    monkeypatch.setitem(registry.edits, loader.name, [lambda: {'import numpy': 'import  numpy'}])
    assert compilations(monkeypatch, loader)[0] == 1


def test_no_cache_is_written_if_python_may_not(monkeypatch, loader, tmp_path):
    monkeypatch.setattr(sys, 'dont_write_bytecode', True)
    assert compilations(monkeypatch, loader)[0] == 1
    monkeypatch.setattr(sys, 'dont_write_bytecode', False)
    tmp_path.joinpath('file').touch()
    monkeypatch.setattr(sys, 'pycache_prefix', str(tmp_path / 'file'))  # no folder
    assert compilations(monkeypatch, loader)[0] == 1
    assert not caches(tmp_path)


def test_missing_text_is_ignored():
    @registry.edit('chainer.functions.array.as_strided')
    def nothing():
        return {'no such text': 'x'}

    try:
        path = chainer.functions.array.__path__
        spec = find_spec(None, 'chainer.functions.array.as_strided', path, None)
        assert spec.loader.get_code(spec.name) is not None
    finally:
        registry.edits['chainer.functions.array.as_strided'].remove(nothing)


def test_every_shim_names_its_versions():
    for shim in registry.find_shims():
        assert shim.__module__.removeprefix('chainer_compat.') in shims.MODULES
        assert any(word in shim.__doc__ for word in ('>=', 'All versions')), shim


def test_import_is_silent_and_leaves_no_trace(python):
    python('''
import sys
import chainer, chainer.testing
import numpy
assert not hasattr(numpy, 'float') or numpy.__version__ < '1.24'
assert ('sctypes' in vars(numpy)) == (numpy.__version__ < '2')
assert 'pkg_resources' not in sys.modules
assert 'numpy.distutils' not in sys.modules
assert 'setuptools' not in sys.modules
''')


def test_import_without_setuptools(python):
    python('import sys; sys.modules["pkg_resources"] = sys.modules["setuptools"] = None; '
           'import chainer, chainer.testing, chainer.testing.doctest_helper')


def test_files_and_caches_are_unchanged(python):
    def state():
        modules = [file_of(name) for name in registry.edits]
        caches = [pathlib.Path(importlib.util.cache_from_source(f)) for f in modules]
        return [(f.exists() and f.stat().st_mtime_ns) for f in modules + caches]

    python('import chainer, chainer.testing')  # compiles what nobody had compiled
    before = state()
    python(TOOLS)
    assert state() == before


#: What tools see is the original file; and a patched module can run as the main program.
TOOLS = '''
import importlib, inspect, pickle, pkgutil, runpy, traceback
import chainer
runpy.run_module('chainer.testing.doctest_helper', run_name='__main__')
from chainer.functions.array import as_strided, resize_images
assert 'numpy.float)' in inspect.getsource(resize_images.compute_indices_and_weights)
assert inspect.getsourcefile(as_strided).endswith('as_strided.py')
function = resize_images.compute_indices_and_weights
assert inspect.getsourcelines(function)[1] == function.__code__.co_firstlineno
assert pickle.loads(pickle.dumps(as_strided.AsStrided)) is as_strided.AsStrided
assert pkgutil.get_data('chainer.functions.array', 'as_strided.py')
importlib.reload(as_strided)
try:
    resize_images.compute_indices_and_weights(None, None, 'bilinear', True, None)
except TypeError:
    assert 'out_H, out_W = out_size' in traceback.format_exc()
'''


def test_threads_may_import_chainer_first(python):
    python('''
import threading
errors = []
def work():
    try:
        import chainer.functions as F
        F.resize_images
    except BaseException as e:
        errors.append(e)
threads = [threading.Thread(target=work) for _ in range(8)]
[t.start() for t in threads]
[t.join() for t in threads]
assert not errors, errors
''')
