"""chainermn.nccl with and without NCCL, and what the code here takes from CuPy's."""

import subprocess
import sys

import pytest

from chainermn import nccl

pytestmark = pytest.mark.mpi_skip

# Imports chainermn.nccl where importing CuPy, or CuPy's module for NCCL, goes as in `prepare`.
SCRIPT = '''
import sys, types
def fail(error):
    raise error
cupy, nccl = types.ModuleType('cupy'), types.ModuleType('cupy.cuda.nccl')
cupy.cuda = types.ModuleType('cupy.cuda')
cupy.cuda.nccl = nccl
{prepare}
import warnings
warnings.simplefilter('error')
from chainermn import nccl
print(nccl._available, nccl._reason, sep='|')
try:
    nccl.get_version
except AttributeError as error:
    print(error)
'''
STAND_IN = f'''
sys.modules.update({{'cupy': cupy, 'cupy.cuda': cupy.cuda, 'cupy.cuda.nccl': nccl}})
vars(nccl).update(dict.fromkeys({nccl.__all__}), available=True,
                  NCCL_UINT8=1, get_version=lambda: 22703)
'''


def import_with(prepare):
    # Not in this process: what is imported once stays.
    return subprocess.run([sys.executable, '-c', SCRIPT.format(prepare=prepare)],
                          check=True, capture_output=True, text=True).stdout.splitlines()


def test_without_cupy():
    available, error = import_with("sys.modules['cupy'] = None")
    assert available.startswith('False|ModuleNotFoundError: ')
    assert 'cupy' in available
    assert error.startswith('chainermn.nccl has no get_version; NCCL is not available: Module')


def test_with_nccl():
    assert import_with(STAND_IN) == ['True|']


def test_cupy_without_the_library():
    # CuPy 13 and 14 warn, define nothing and set `available`.
    available, error = import_with(
        STAND_IN + 'nccl.__dict__.clear(); nccl.available = False\n'
        "sys.modules['cupy_backends'] = None")
    assert available.startswith('False|ModuleNotFoundError: ')
    assert 'cupy_backends' in available
    assert 'NCCL is not available' in error


def test_a_library_that_does_not_work():
    assert import_with(
        STAND_IN + "nccl.get_version = lambda: fail(RuntimeError('no symbol ncclGetVersion'))"
    ) == ['False|RuntimeError: no symbol ncclGetVersion']


def test_here():
    assert nccl._available == (not nccl._reason)
    if not nccl._available:
        pytest.skip(f'no NCCL: {nccl._reason}')
    assert [name for name in nccl.__all__ if not hasattr(nccl, name)] == []
    assert nccl.get_version() >= 2000


def test_signatures_of_cupy():
    """The arguments that _nccl_group passes, in CuPy's own words."""
    if not nccl._available:
        pytest.skip(f'no NCCL: {nccl._reason}')
    found = {name: getattr(nccl.NcclCommunicator, name).__doc__.splitlines()[0]
             for name in ('allReduce', 'reduce', 'reduceScatter', 'allGather', 'bcast', 'send',
                          'recv', 'destroy')}
    assert found['allReduce'].endswith(
        '(self, intptr_t sendbuf, intptr_t recvbuf, size_t count, int datatype, int op, '
        'intptr_t stream)')
    assert found['reduce'].endswith(
        '(self, intptr_t sendbuf, intptr_t recvbuf, size_t count, int datatype, int op, int root, '
        'intptr_t stream)')
    assert found['reduceScatter'].endswith(
        '(self, intptr_t sendbuf, intptr_t recvbuf, size_t recvcount, int datatype, int op, '
        'intptr_t stream)')
    assert found['allGather'].endswith(
        '(self, intptr_t sendbuf, intptr_t recvbuf, size_t count, int datatype, intptr_t stream)')
    assert found['bcast'].endswith(
        '(self, intptr_t buff, size_t count, int datatype, int root, intptr_t stream)')
    for name in ('send', 'recv'):
        assert found[name].endswith(
            f'(self, intptr_t {name}buf, size_t count, int datatype, int peer, intptr_t stream)')
    assert found['destroy'].endswith('(self)')
    assert 'commId, int rank' in nccl.NcclCommunicator.__doc__.splitlines()[0]
    assert (nccl.NCCL_SUM, nccl.NCCL_UINT8, nccl.NCCL_FLOAT16, nccl.NCCL_FLOAT32,
            nccl.NCCL_FLOAT64, nccl.NCCL_BFLOAT16) == (0, 1, 6, 7, 8, 9)
