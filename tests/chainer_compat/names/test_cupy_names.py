"""The table of CuPy's old names, and what needs no GPU.

``tests/gpu/test_old_cupy_names_on_gpu.py`` runs programs that use the names.
"""

import pathlib
import re

import nvrtc
import pytest

from chainer_compat.names import cupy_kernels, cupy_names, cupy_table

pytestmark = pytest.mark.mpi_skip

PAGE = pathlib.Path(__file__).parents[3] / 'docs/chainer_compat.md'
RECORD = pathlib.Path(__file__).with_name('old_cupy_names.txt')


def test_without_cupy(python):
    python('''
import sys
import chainer_compat
class NoCupy:
    def find_spec(name, path=None, target=None):
        if name == 'cupy':
            raise ModuleNotFoundError("No module named 'cupy'", name='cupy')
sys.meta_path.append(NoCupy)  # also where CuPy is installed
sys.meta_path.insert(1, NoCupy)
for restore in False, True:
    if restore:
        chainer_compat.restore_names()
    for name in 'cupy', 'cupy.core', 'cupy.core.core':
        try:
            __import__(name)
        except ModuleNotFoundError as error:
            assert (str(error), error.name) == ("No module named 'cupy'", 'cupy')
        else:
            assert False, name
assert not [name for name in sys.modules if name.split('.')[0] in ('cupy', 'cupyx')]
''')


def test_modules_of_users_whose_names_begin_with_cupy(python, tmp_path):
    tmp_path.joinpath('cupy_tools.py').write_text('x = 1')
    python('''
import cupy_tools
assert cupy_tools.x == 1 and '__getattr__' not in vars(cupy_tools)
''', CHAINER_COMPAT_NAMES='all')


@pytest.mark.parametrize('old, new', [
    ('cupy.core', 'cupy._core'), ('cupy.core.core', 'cupy._core.core'),
    ('cupy.core.elementwise', 'cupy._core._kernel'), ('cupy.util', 'cupy._util'),
    ('cupy.sparse.csr', 'cupyx.scipy.sparse._csr'), ('cupy.linalg.util', 'cupy.linalg._util'),
    ('cupy.sparse.linalg.solve', 'cupyx.scipy.sparse.linalg._solve'),
    ('cupy.logic.type_test', 'cupy._logic.type_testing'),
    ('cupy.prof.time_range', 'cupyx.profiler._time_range'), ('cupy.ext.scatter', 'cupyx._scatter'),
    ('cupy.cuda.cublas', 'cupy_backends.cuda.libs.cublas'), ('cupy', None), ('cupy.linalg', None),
    ('cupy._core.core', None), ('cupyx.scipy.sparse', None), ('cupy.nothing', None),
    ('numpy.core', None)])
def test_current_name(old, new):
    assert cupy_names.current(old) == new
    assert new is None or cupy_names.current(new) is None


def test_the_table():
    assert not any(map(cupy_names.current, cupy_table.NAMES))  # keys are current names
    assert all(advice.endswith('.') for advice in cupy_table.REMOVED.values())
    recorded = dict(line.partition(':')[::2] for line in RECORD.read_text().splitlines())
    names = {f'{cupy_names.current(module) or module}.{name}'
             for module, names in recorded.items() for name in names.split()}
    mine = {f'{module}.{name}' for module, names in cupy_table.NAMES.items() for name in names
            if not name.startswith('_')}  # private ones are not recorded
    # The record does not read enumerations; and this module had another name.
    assert not [name for name in mine - names if 'COMPUTE_TYPE' not in name
                and not name.startswith('cupy_backends.cuda.api.runtime.')]


def test_the_page_lists_them():
    text = PAGE.read_text()
    for old in cupy_table.MODULES:
        if not old.startswith(('cupy._', 'cupy_backends')):
            assert re.search(rf'`{re.escape(old)}`', text), old
    for module, names in cupy_table.NAMES.items():
        if '._' not in module and not module.startswith('cupy_backends'):
            shown = 'cupy.prof' if module == 'cupyx.profiler' else module
            assert all(f'`{shown}.{name}`' in text for name in names), module


def test_sources_for_older_compilers():
    sources = []

    def compile_source(source, options=(), arch=None):
        sources.append(source)
        return options, arch

    compile_old = cupy_kernels.with_old_sources(compile_source)
    for option in '-std=c++11', '--std=c++14', '-std=c++03':
        name = option.rpartition('=')[0]
        assert compile_old('', (option, '-DX'), arch='90') == ((f'{name}=c++17', '-DX'), '90')
    assert compile_old('', ('--std=c++20', '-DSTD=c++11')) == (('--std=c++20', '-DSTD=c++11'), None)
    compile_old('register int i; int registers, register_a; // the register')
    assert sources[-1] == 'int i; int registers, register_a; // the register'
    for unchanged in (
            'struct float16 { float values[16]; };', '#include <cupy/carray.cuh>\nfloat x;',
            '#include <cupy/carray.cuh>\n#include <cupy/float16.cuh>\nfloat16 x;'):
        compile_old(unchanged)
        assert sources[-1] == unchanged


SOURCE = '''
#include <cupy/carray.cuh>
#include <cupy/complex.cuh>
extern "C" __global__ void scale(const float16* x, const complex<float>* z, float* y) {
    register float factor = z[0].real();
    y[0] = float(x[0]) * factor;
}'''


def test_an_old_kernel_compiles():
    """``--std=c++11``, float16 of carray.cuh, and ``register``: each fails with CuPy 14."""
    compile_for_h100 = nvrtc.compiler()
    from cupy._core import core
    from cupy.cuda import compiler

    cupy_names.complete(compiler)
    options = core.assemble_cupy_compiler_options(('--std=c++11',))
    if hasattr(compiler, '_get_extra_include_dir_opts'):  # CuPy 13
        options += compiler._get_extra_include_dir_opts()
    sources = [SOURCE, options]
    if hasattr(core, 'use_default_std'):  # CuPy 14
        cpp_17 = core.assemble_cupy_compiler_options(())
        simple = SOURCE.replace('float16', 'float').replace('register', '')
        assert compile_for_h100(simple, options=cpp_17)
        for source, given in [(simple, options), (SOURCE.replace('float16', 'float'), cpp_17),
                              (SOURCE.replace('register', ''), cpp_17)]:
            with pytest.raises(compiler.CompileException):
                compile_for_h100(source, options=given)
        cupy_kernels.with_old_sources(lambda *args: sources.__setitem__(slice(2), args))(*sources)
    assert compile_for_h100(sources[0], options=sources[1])


def test_every_recorded_name_without_a_gpu(python):
    pytest.importorskip('cupy')
    said = python(RECORD.with_name('check_cupy_names.py').read_text(), RECORD=str(RECORD),
                  CHAINER_COMPAT_NAMES='all')
    n_restored, n_explained, *unknown = said.split()
    assert unknown == ['cupy.exc_info', 'cupy.msg']  # variables of loops
    assert int(n_restored) > 1000 and int(n_explained) < 300


def test_a_program_that_does_not_exist(python):
    said = python("""
import runpy, sys
sys.argv = ['chainer_compat', 'names', 'none.py']
runpy.run_module('chainer_compat', run_name='__main__')
""", check=False)
    assert said.startswith('2 usage:') and 'error: no such file: none.py' in said
