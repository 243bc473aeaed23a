"""``CHAINER_COMPAT_NAMES=all`` restores what CuPy removed since its first version.

``record_cupy_names.py`` has read the old names in the sources of old versions.
"""

import os
import pathlib
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.mpi_skip]

CHECK = pathlib.Path(__file__).parents[1] / 'chainer_compat/names/check_cupy_names.py'


@pytest.fixture
def python(tmp_path):
    """``python(code, VARIABLE='value')`` runs a program; warnings of CuPy are ignored."""

    def run(code, check=True, **variables):
        env = {k: v for k, v in os.environ.items() if k == 'CHAINER_CUDNN' or not k.startswith(
            ('CHAINER', 'PYTHON', 'PMI', 'OMPI', 'MPI'))}
        done = subprocess.run([sys.executable, '-W', 'ignore', '-c', code], cwd=tmp_path, text=True,
                              env=env | variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert not check or done.returncode == 0, done.stdout
        return done.stdout

    return run


@pytest.fixture
def old_program(python):
    """Run a program with the old names."""
    return lambda code, **variables: python(code, CHAINER_COMPAT_NAMES='all', **variables)


def test_every_recorded_name_is_restored_or_explained(old_program):
    n_restored, n_explained, *unknown = old_program(
        CHECK.read_text(), RECORD=str(CHECK.with_name('old_cupy_names.txt'))).split()
    assert unknown == ['cupy.exc_info', 'cupy.msg']  # variables of loops
    assert int(n_restored) > 1500 and int(n_explained) < 300


def test_what_a_user_tries_first(old_program):
    old_program('''
import warnings
import cupy
import numpy as np
x = cupy.arange(6, dtype='f').reshape(2, 3)
assert isinstance(x, cupy.core.core.ndarray) and isinstance(x, cupy.core.ndarray)
assert cupy.core.core.ndarray is cupy.ndarray
from cupy.core import core
from cupy.core.core import ndarray
from cupy import util
import cupy.core.core as renamed
assert ndarray is renamed.ndarray is core.ndarray is cupy.ndarray and util is cupy.util

calls = []
@cupy.util.memoize(for_each_device=True)
def f(x):
    calls.append(x)
    return x + 1
assert f(3) == f(3) == 4 and calls == [3]
util.clear_memo()

assert (cupy.int, cupy.float, cupy.complex) == (int, float, complex) and cupy.bool8 is np.bool_
assert cupy.zeros(2, cupy.bool).dtype == bool and cupy.empty(1, cupy.int).dtype == 'l'
a, i, v = np.zeros(4), [0, 2, 2], [1., 2, 3]
b = cupy.asarray(a)
cupy.scatter_add(b, cupy.array(i), cupy.array(v))
np.add.at(a, i, v)
np.testing.assert_array_equal(b.get(), a)

@cupy.fuse(input_num=2)
def g(x, y):
    return cupy.core.fusion.where(x > y, x, y) * 2
np.testing.assert_array_equal(g(x, 5 - x).get(), np.maximum(x.get(), 5 - x.get()) * 2)
@cupy.core.fusion.fuse()
def h(x):
    return x + 1
np.testing.assert_array_equal(h(x).get(), x.get() + 1)
k = cupy.core.elementwise.ElementwiseKernel('T x', 'T y', 'y = x * x', 'square', no_return=False)
np.testing.assert_array_equal(k(x).get(), x.get() ** 2)
np.testing.assert_allclose(cupy.core.dot(x, x.T).get(), x.get() @ x.get().T)
np.testing.assert_array_equal(cupy.core.core.add(x, 1).get(), x.get() + 1)
total = cupy.reduction.ReductionKernel('T x', 'T y', 'x', 'a + b', 'y = a', '0', 'total')
assert total(x) == 15
assert type(cupy.cuda.memory.MemoryPool()) is cupy.cuda.MemoryPool
assert cupy.get_default_memory_pool().used_bytes() > 0
with cupy.cuda.memory.using_allocator(cupy.cuda.MemoryPool().malloc):
    cupy.zeros(3)
with cupy.prof.time_range('range', color_id=0):
    @cupy.prof.TimeRangeDecorator()
    def in_range():
        return 1
    assert in_range() == 1
cupy.cuda.nvtx.RangePush('a')
cupy.cuda.nvtx.RangePop()
assert cupy.cuda.nvtx_enabled and cupy.cuda.cusolver_enabled and cupy.cuda.nccl_enabled
with warnings.catch_warnings():
    warnings.simplefilter('error')  # of CuPy, if there is no cuTENSOR
    assert cupy.cuda.cutensor_enabled in (True, False)
assert cupy.cuda.device.cusolver_enabled and cupy.cuda.nccl.get_version() > 0
assert cupy.random.generator.get_random_state() is cupy.random.get_random_state()
assert cupy.statistics.order.percentile is cupy.percentile
assert cupy.manipulation.shape.reshape is cupy.reshape and cupy.indexing.indexing.take is cupy.take
assert cupy.internal.prod([2, 3]) == 6
from cupy.testing import helper
import cupy.testing.array
cupy.testing.array.assert_allclose(x, x.get())
assert helper.for_all_dtypes is cupy.testing.for_all_dtypes
@cupy.testing.gpu
def test():
    pass
for module in 'cublas', 'cusolver', 'curand', 'cusparse', 'nvrtc', 'driver', 'runtime', 'nvtx':
    exec(f'import cupy.cuda.{module}; from cupy.cuda import {module}')
assert cupy.cuda.runtime.errorMemoryAllocation == 2
assert cupy.packbits(myarray=cupy.array([1, 0, 1], 'u1')).get() == np.packbits([1, 0, 1])
for y in x.max(axis=0, dtype='d'), cupy.amax(x, 0, dtype='d'):
    assert y.dtype == 'd' and y.tolist() == [3, 4, 5]
assert x.max(dtype=None) == x.max() == 5 and x.min(0).dtype == 'f' and x.min(1, None).shape == (2,)
assert sorted(cupy.random.RandomState(0).permutation(num=3).tolist()) == [0, 1, 2]
assert cupy.isscalar(num=3) and cupy.empty_like(a=x).shape == (2, 3)
try:
    cupy.packbits(nothing=3)
except TypeError as error:
    assert 'nothing' in str(error)
else:
    assert False
import cupyx.scipy.sparse.linalg
a, b = cupy.array([[4., 1], [1, 3]]), cupy.array([1., 2])
for solve in 'cg', 'cgs', 'gmres':
    x, info = getattr(cupyx.scipy.sparse.linalg, solve)(a, b, tol=1e-8)
    np.testing.assert_allclose(x.get(), np.linalg.solve(a.get(), b.get()), rtol=1e-6)
''')


def test_functions_remain_where_a_module_has_their_name(old_program):
    old_program('''
import importlib, numpy as np, cupy, cupyx, cupyx.scipy.special, cupyx.scipy.fft
for function in ('cupy.fft.fft', 'cupy.random.sample', 'cupyx.rsqrt', 'cupyx.scipy.fft.fft',
                 'cupyx.scipy.special.erf', 'cupyx.scipy.special.gamma', 'cupy.prof.time_range'):
    package, _, name = function.rpartition('.')
    package = importlib.import_module(package)
    before = getattr(package, name)
    module = importlib.import_module(function)
    assert type(module) is type(cupy), function
    assert getattr(package, name) is before and callable(before), function
    assert name == 'sample' or getattr(module, name) is before, function
from cupy.fft.fft import fftn
x = np.arange(8.)
np.testing.assert_allclose(cupy.fft.fft(cupy.asarray(x)).get(), np.fft.fft(x), atol=1e-12)
''')


def test_sparse_matrices(old_program):
    old_program('''
import cupy, cupyx, numpy as np
from cupy.sparse.csr import csr_matrix
from cupyx.scipy.sparse import csr
import cupy.sparse.linalg
assert cupy.sparse.csr_matrix is csr_matrix is csr.csr_matrix is cupyx.scipy.sparse.csr_matrix
assert cupy.sparse.linalg.lsqr is cupyx.scipy.sparse.linalg.lsqr
m = cupy.sparse.coo_matrix(cupy.array([[0, 1., 0], [0, 0, 2]]))
assert cupy.sparse.issparse(m) and cupy.sparse.isspmatrix_coo(m) and m.nnz == 2
''')


def test_kernels_of_old_programs(old_program):
    """Old options and headers: ``float16`` was in carray.cuh until CuPy 14."""
    old_program(r"""
import os, cupy, numpy as np
source = '''
#include <cupy/carray.cuh>
#include <cupy/complex.cuh>
typedef unsigned long long uint64_t;
typedef int int32_t;
extern "C" __global__ void scale(const float16* x, float* y, int32_t n) {
    register uint64_t unused = 0;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
        y[i] = float(x[i]) * FACTOR;
}'''
old_include = os.path.join(os.path.dirname(cupy.__file__), 'core', 'include')
x = cupy.arange(10, dtype='e')
for compile_source in (
        cupy.cuda.compile_with_cache, cupy.cuda.compiler.compile_with_cache):
    for options in (('-DFACTOR=3', '--std=c++11', '-I' + old_include), ['-D', 'FACTOR=3']):
        module = compile_source(source, options, cache_dir=None)
        y = cupy.zeros(10, 'f')
        module.get_function('scale')((2,), (4,), (x, y, 10))
        np.testing.assert_array_equal(y.get(), np.arange(10) * 3)
module = cupy.core.core.compile_with_cache(source, ('-DFACTOR=3',))
assert module.get_function('scale')
new_include = os.path.join(os.path.dirname(cupy.__file__), '_core', 'include')
for raw in (cupy.RawModule(code=source, options=('-DFACTOR=2', '-I' + new_include)),):
    y = cupy.zeros(10, 'f')
    raw.get_function('scale')((1,), (10,), (x, y, 10))
    np.testing.assert_array_equal(y.get(), np.arange(10) * 2)
doubled = cupy.ElementwiseKernel('T x', 'T y', 'y = twice(x)', 'doubled', preamble='''
__device__ float16 twice(float x) { return float16(x * 2); }''')
np.testing.assert_array_equal(doubled(x).get(), np.arange(10) * 2)
""")


def test_inverse_by_cusolver(old_program):
    """As K-FAC for ChainerMN computes inverses."""
    old_program('''
import cupy, numpy as np
from cupy.cuda import cublas, cusolver, device
a = np.random.RandomState(0).rand(5, 5).astype('f')
a = a @ a.T + np.eye(5, dtype='f')
x, b = cupy.asarray(a), cupy.eye(5, dtype='f')
assert cupy.cuda.cusolver_enabled
cupy.linalg.util._assert_cupy_array(x)
cupy.linalg.util._assert_rank2(x)
cupy.linalg.util._assert_nd_squareness(x)
try:
    cupy.linalg.util._assert_nd_squareness(x[:2])
except np.linalg.LinAlgError:
    pass
else:
    assert False
handle, info = device.get_cusolver_handle(), cupy.empty(1, dtype=cupy.int)
upper = cublas.CUBLAS_FILL_MODE_UPPER
size = cusolver.spotrf_bufferSize(handle, upper, 5, x.data.ptr, 5)
work = cupy.empty(size, 'f')
cusolver.spotrf(handle, upper, 5, x.data.ptr, 5, work.data.ptr, size, info.data.ptr)
cusolver.spotrs(handle, upper, 5, 5, x.data.ptr, 5, b.data.ptr, 5, info.data.ptr)
np.testing.assert_allclose(b.get(), np.linalg.inv(a), rtol=1e-3, atol=1e-5)
''')


def test_pickles_of_old_arrays(old_program):
    old_program('''
import pickle
import numpy as np
array = pickle.dumps(np.arange(3), 2)[2:-1]
# Until CuPy 8, arrays were pickled as a call of cupy.core.core.array.
old = b'\\x80\\x02ccupy.core.core\\narray\\n' + array + b'\\x85R.'
x = pickle.loads(old)
import cupy
assert type(x) is cupy.ndarray and x.tolist() == [0, 1, 2]
assert b'cupy.core.core' not in pickle.dumps(x)
''')


OFF = '''
import sys
import cupy
assert 'cupy.core' not in sys.modules and 'core' not in vars(cupy)
assert type(cupy.cuda.compiler._compile_module_with_cache.__code__.co_filename) is str
assert 'cupy_names' not in cupy.cuda.compiler._compile_module_with_cache.__code__.co_filename
hint = 'CHAINER_COMPAT_NAMES=all restores names that CuPy removed'
def error(code):
    try:
        exec(code)
    except (AttributeError, ImportError) as e:
        return f'{type(e).__name__} {e}'
    assert False, code
for code in ('cupy.core', 'cupy.scatter_add', 'cupy.cuda.compile_with_cache', 'cupy.linalg.util',
             'import cupy.core.core', 'from cupy import util', 'from cupy.core import core',
             'cupy.cuda.nccl_enabled', 'import cupy.linalg.util'):
    assert hint in error(code), error(code)
assert 'AttributeError' in error('cupy.core') and 'ModuleNotFound' in error('import cupy.core')
assert error('cupy.nothing') == "AttributeError module 'cupy' has no attribute 'nothing'"
assert error('import cupy.nothing') == "ModuleNotFoundError No module named 'cupy.nothing'"
assert not hasattr(cupy, 'int') and not hasattr(cupy.random, 'generator')
assert 'Use cupy.finfo' in error('cupy.MachAr')
import importlib.util
assert importlib.util.find_spec('cupy.core') is importlib.util.find_spec('cupy.util') is None
if cupy.__version__ >= '14':
    for code in 'import cupy.cudnn', 'cupy.cudnn', 'from cupy.cuda import cudnn':
        assert 'CuPy 14 does not support cuDNN' in error(code), error(code)
'''


def test_errors_explain_the_option(python):
    python(OFF)


def test_old_names_are_restored_by_the_function(python):
    code = OFF + '''
import chainer_compat
chainer_compat.restore_names()
chainer_compat.restore_names()
assert cupy.core.core.ndarray is cupy.ndarray and cupy.linalg.util._assert_rank2
import cupy.fft.fft
assert type(cupy.fft.fft) is type(cupy.linalg.norm)
import subprocess
subprocess.run([sys.executable, '-c', 'import cupy; cupy.core'], check=True)
'''
    python(code)
    restored = code.rpartition("cupy.cudnn', 'from")[2].partition('import chainer_compat')[2]
    python('import chainer_compat' + restored.replace(
        'assert cupy.core', 'import sys, cupy\nassert cupy.core', 1).replace(
        "'import cupy; cupy.core'", "'print()'"), CHAINER_COMPAT='0')


def test_nothing_changes_without_chainer_compat(python):
    error = python('''
import cupy
assert 'MissingName' not in str(vars(cupy).get('__getattr__'))
try:
    import cupy.core
except ImportError as error:
    print(error)
''', CHAINER_COMPAT='0', CHAINER_COMPAT_NAMES='all')
    assert error == "No module named 'cupy.core'\n"


def test_names_of_a_program_are_listed(tmp_path):
    tmp_path.joinpath('helper.py').write_text('x = 1')
    program = tmp_path / 'program.py'
    program.write_text('''
import sys
import cupy, helper
from cupy.core import core
assert __name__ == '__main__' and sys.argv[1:] == ['--epoch', '3'] and helper.x == 1
isinstance(3, core.ndarray), cupy.core.core.ndarray, cupy.zeros(2, cupy.float)
cupy.scatter_add, cupy.util.memoize, cupy.core.core.dot
sys.exit(3)
''')
    env = {k: v for k, v in os.environ.items() if not k.startswith('CHAINER_COMPAT')}
    done = subprocess.run(
        [sys.executable, '-m', 'chainer_compat', 'names', str(program), '--epoch', '3'],
        env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 3, done.stdout
    lines = done.stdout.splitlines()
    assert [line.split() for line in lines[lines.index('Old CuPy names:') + 1:]] == [
        ['cupy._core.core.dot', 'cupy._core.dot'], ['cupy.core', 'cupy._core'],
        ['cupy.float', 'builtins.float'], ['cupy.scatter_add', 'cupyx.scatter_add'],
        ['cupy.util', 'cupy._util']]
