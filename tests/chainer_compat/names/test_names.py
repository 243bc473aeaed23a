"""``CHAINER_COMPAT_NAMES=all`` restores what NumPy and Python removed."""

import pytest

pytestmark = pytest.mark.mpi_skip

ON = {'CHAINER_COMPAT_NAMES': 'all'}

PYTHON = '''
import sys, warnings
if sys.version_info < (3, 12):  # it has some of the names, which are deprecated
    warnings.simplefilter('ignore', DeprecationWarning)
import imp
import base64, collections, collections.abc, fractions, inspect, pathlib, time
assert collections.Iterable is collections.abc.Iterable
assert issubclass(collections.OrderedDict, collections.MutableMapping)
spec = inspect.getargspec(lambda a, b=2, *c, **d: 0)
assert spec == (['a', 'b'], 'c', 'd', (2,)) and spec.keywords == 'd'
assert fractions.gcd(12, 18) == 6 and 0 <= time.clock() <= time.process_time()
assert base64.decodestring(base64.encodestring(b'abc')) == b'abc'

pathlib.Path('conf.py').write_text('x = 1')
conf = imp.load_source('conf', 'conf.py')
assert conf.x == 1 and sys.modules['conf'] is conf
pathlib.Path('conf.py').write_text('x = 20')
assert imp.reload(conf).x == 20
pathlib.Path('other').write_text('y = 3')  # no suffix
assert imp.load_source('other', 'other').y == 3
pathlib.Path('package').mkdir()
pathlib.Path('package/__init__.py').write_text('z = 4')
for name in 'conf', 'package':
    file, path, details = imp.find_module(name, ['.'])
    module = imp.load_module(name, file, path, details)
    assert module.__name__ == name and hasattr(module, 'x') == (name == 'conf')
    if file:
        file.close()
assert imp.find_module('sys') == (None, None, ('', '', imp.C_BUILTIN))
assert imp.new_module('m').__name__ == 'm'
try:
    imp.find_module('absent_module')
except ImportError as error:
    assert error.name == 'absent_module'
else:
    assert False
'''

NUMPY = '''
import numpy as np
import warnings
warnings.simplefilter('ignore', PendingDeprecationWarning)  # of matrix
warnings.simplefilter('ignore' if np.__version__ < '2.4' else 'error', DeprecationWarning)

# Conversions to numbers, also in subclasses, in C functions, and their errors
import math
for a in np.full(1, 2.5), np.full((1, 1), 2.5, 'f'), np.asmatrix([2.5]), np.ma.array([2.5]):
    assert float(a) == 2.5 and int(a) == 2 and complex(a) == 2.5 and math.floor(float(a)) == 2
assert math.sqrt(np.full(1, 4.)) == 2 and '%d %.1f' % (np.ones(1), np.ones(1)) == '1 1.0'
assert float(np.array(3)) == 3 and int(np.array(['7'])) == 7
class Mine(np.ndarray):
    pass
assert float(np.ones(1).view(Mine)) == 1
for bad in np.ones(2), np.ones(0), np.array(['x']):
    try:
        float(bad)
    except (TypeError, ValueError):
        pass
    else:
        assert False, bad
try:
    np.ndarray.anything = 1
except TypeError:
    pass  # the type is immutable again
else:
    assert False

# Methods
a = np.arange(6, dtype='i2').reshape(2, 3)
assert a.tostring() == a.tobytes() and a[0, 0].tostring() == bytes(2)
a.itemset(4, 9)
a.itemset((0, 0), 7)
a.itemset(0, 1, 8)
assert a.tolist() == [[7, 8, 2], [3, 9, 5]] and a.ptp() == 7 and a.ptp(0).tolist() == [4, 1, 3]
assert a.ptp(axis=1, keepdims=True).tolist() == [[6], [6]]
assert a.newbyteorder().dtype == '>i2' and a.newbyteorder()[0, 0] == 7 * 256
one_element = np.zeros(1)
one_element.itemset(5)
assert one_element[0] == 5

# Functions
ragged = np.array([[1, 2], [3]])
assert ragged.dtype == object and ragged.shape == (2,) and ragged[0] == [1, 2]
assert np.asarray([[1], [2, 3]], None).dtype == np.array(object=[[1], [2, 3]]).dtype == object
try:
    np.array([[1, 2], [3]], dtype='f')
except ValueError:
    pass
else:
    assert False
x = np.ones(2)
assert np.array(x, copy=False) is x and np.array(x) is not x and np.array([1], copy=False)[0] == 1
assert np.array([1, 2], np.float32, ndmin=2).shape == (1, 2)
data = np.fromstring(b'abcd', dtype=np.uint8)
data[0] = 0  # a copy
assert data.tolist() == [0, 98, 99, 100] and np.fromstring('ab', np.uint8).tolist() == [97, 98]
assert np.fromstring('1 2', sep=' ').tolist() == [1, 2]
assert np.percentile([1, 2, 3, 4], 50, interpolation='lower') == 2

# Names
assert np.float is float and np.cast[np.int32]([1.7]).tolist() == [1]
assert np.find_common_type([np.float32], [np.int64, np.float64]) == 'f4'
assert np.find_common_type([np.int8], [np.float64]) == np.find_common_type([], ['d']) == 'f8'
types = '?bBhHiIlLqQefdgFDGO'
assert ' '.join(''.join(np.find_common_type([a], [b]).char for b in types) for a in types) == (
    '?bBhHiIlLqQefdgFDGO bbbbbbbbbbbefdgFDGO BhBhBiBlBqBefdgFDGO hhhhhhhhhhhffdgFDGO '
    'HiHiHiHlHqHffdgFDGO iiiiiiiiiiidddgDDGO IlIlIlIlIqIdddgDDGO llllllllllldddgDDGO '
    'LdLdLdLdLdLdddgDDGO qqqqqqqqqqqdddgDDGO QdQdQdQdQdQdddgDDGO eeeeeeeeeeeeeeeFDGO '
    'fffffffffffffffFDGO dddddddddddddddDDGO gggggggggggggggGGGO FFFFFFFFFFFFFFFFFFO '
    'DDDDDDDDDDDDDDDDDDO GGGGGGGGGGGGGGGGGGO OOOOOOOOOOOOOOOOOOO')  # NumPy 1.26
assert np.find_common_type(['f4', 'i8'], ['i4']) == 'f8'
assert np.find_common_type(['S'], ['M8']) is None
assert np.issubsctype(np.ones(2, 'f'), np.floating) and not np.issubsctype('O', np.number)
assert np.isnan(np.NAN) and np.issctype(np.int8) and not np.issubclass_(3, int)
assert np.float16 in np.sctypes['float'] and np.uint8 in np.sctypes['uint']
assert np.obj2sctype('f4') is np.obj2sctype(np.float32) is np.float32
assert np.sctype2char(np.int64) == 'l' and np.issubsctype(np.int32, np.integer)
assert issubclass(np.ComplexWarning, Warning) and issubclass(np.AxisError, Exception)
'''


def test_everything_is_restored(python):
    python(PYTHON + NUMPY, **ON)


def test_everything_is_restored_by_the_function(python):
    python('import numpy, chainer_compat\nchainer_compat.restore_names()\n'
           'chainer_compat.restore_names()\n' + PYTHON + NUMPY + '''
import subprocess
subprocess.run([sys.executable, '-c', 'import numpy; numpy.float, numpy.array([[1], [2, 3]])'],
               check=True)
''')


def test_chainer_trains_with_all_names(python):
    python('''
import chainer, chainer.functions as F, chainer.links as L, collections, numpy as np, warnings
assert issubclass(dict, collections.Mapping)
# NumPy 1.25 to 2.3 convert arrays of one element, with a warning.
warnings.filterwarnings('ignore', 'Conversion of an array', DeprecationWarning)
model = L.Classifier(L.Linear(4, 3))
optimizer = chainer.optimizers.Adam().setup(model)
x, t = np.ones((8, 4), 'f'), np.zeros(8, 'i')
losses = []
for _ in range(5):
    optimizer.update(model, x, t)
    losses.append(float(model.loss.data.reshape(1)))
assert losses == sorted(losses, reverse=True)
''', **ON)


@pytest.mark.parametrize('variables', [
    {'CHAINER_COMPAT_NAMES': '0', 'CHAINER_COMPAT_NUMPY_ALIASES': '0'},
    {**ON, 'CHAINER_COMPAT_NUMPY_ALIASES': '1', 'CHAINER_COMPAT': '0'}])
def test_nothing_changes_without_the_option(python, variables):
    python('''
import collections, numpy, sys, warnings
warnings.simplefilter('ignore')
assert not hasattr(collections, 'Mapping')
assert not hasattr(numpy, 'float') and not hasattr(numpy, 'asscalar')
assert numpy.__getattr__.__module__ == 'numpy'
assert type(numpy.array) is type(len) and numpy.sum.__module__ == 'numpy'
assert 'chainer_compat.names.numpy_behavior' not in sys.modules and 'imp' not in sys.modules
''', **variables)


def test_a_wrong_value(python):
    assert "CHAINER_COMPAT_NAMES must be 'all', '0' or unset, not 'most'." in python(
        'import chainer', check=False, CHAINER_COMPAT_NAMES='most')
