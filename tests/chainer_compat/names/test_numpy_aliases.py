"""``CHAINER_COMPAT_NUMPY_ALIASES=1`` restores the names that NumPy removed; errors mention it."""

import pytest

import chainer_compat
from chainer_compat.names import numpy_aliases

pytestmark = pytest.mark.mpi_skip

ON = {'CHAINER_COMPAT_NUMPY_ALIASES': '1'}

NAMES = '''
import builtins, numpy as np
assert (np.float, np.int, np.complex, np.object, np.str) == (float, int, complex, object, str)
assert np.unicode is str
one = np.lib.NumpyVersion(np.__version__) < '2.0.0'
assert (np.bool, np.long) == ((bool, int) if one else (np.bool_, type(np.array(0, 'l')[()])))
assert np.zeros(2, np.bool).dtype == bool and np.array([0, 2]).astype(np.bool).tolist() == [0, 1]
assert np.float_ is np.float64 and np.unicode_ is np.str_ and np.Inf == np.inf == -np.NINF
a = np.array([[3, 1], [2, 4]])
assert np.product(a) == 24 and np.cumproduct(a).tolist() == [3, 3, 6, 24]
assert np.alltrue(a, axis=0).tolist() == [True] * 2 and not np.sometrue(a > 4)
assert np.in1d(a, [1, 2]).tolist() == [False, True, True, False]
assert np.in1d([1, 2], [2], invert=True).tolist() == [True, False]
assert np.asfarray(a).dtype == np.asfarray(a, int).dtype == 'd'
assert np.asfarray(a, np.float32).dtype == 'f'
assert np.row_stack([a, a]).shape == (4, 2) and np.trapz([1, 2]) == 1.5
assert np.asscalar(a[:1, :1]) == 3 and np.alen(a) == 2 and np.alen(1) == 1 and np.rank(a) == 2
assert np.msort(a).tolist() == [[2, 1], [3, 4]] and np.round_(1.6) == 2
import chainer_compat.names.numpy_aliases as aliases
assert all(hasattr(np, name) for name in aliases.NAMES)
'''


def test_names(python):
    python(f'import sys\nassert "numpy" not in sys.modules{NAMES}', **ON)


def test_names_restored_by_the_function(python):
    python('import numpy, chainer_compat\nchainer_compat.restore_numpy_aliases()' + NAMES,
           CHAINER_COMPAT='0')


def test_error(python):
    *_, before, last = python('''
import chainer, numpy
assert getattr(numpy, 'product_', None) is None and not hasattr(numpy, 'asscalar')
assert numpy.fft.fft and numpy.linalg.norm
try:
    numpy.sin_
except AttributeError as e:
    assert (str(e), e.name) == ("module 'numpy' has no attribute 'sin_'", 'sin_')
numpy.float
''', check=False).splitlines()
    assert 'numpy.org' in before
    assert last.startswith('CHAINER_COMPAT_NAMES=all restores names that NumPy and Python removed')


def test_every_target_exists():
    import numpy

    missing = {new for new in numpy_aliases.RENAMED.values() if not hasattr(numpy, new)}
    assert missing <= {'trapezoid'}
    assert chainer_compat.ALIASES_VARIABLE in ON
