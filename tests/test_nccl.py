"""chainermn.nccl with and without NCCL, and the parts of CuPy's NCCL module that it relies on."""

import runpy
import sys
import types

import pytest

from chainermn import nccl

pytestmark = pytest.mark.mpi_skip


@pytest.fixture
def of_cupy(monkeypatch):
    """Replace CuPy's NCCL module by a stand-in that is available; return the stand-in."""
    cupy, cuda, found = map(types.ModuleType, ('cupy', 'cupy.cuda', 'cupy.cuda.nccl'))
    cupy.cuda, cuda.nccl = cuda, found
    for module in (cupy, cuda, found):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    vars(found).update(dict.fromkeys(nccl.__all__), available=True, get_version=lambda: 22703)
    return found


def import_again():
    """Return whether NCCL is available in another import of the module, and the reason."""
    module = runpy.run_path(nccl.__file__)
    if not module['_available']:
        with pytest.raises(AttributeError) as error:
            module['__getattr__']('get_version')
        assert str(error.value) == ("chainermn.nccl has no attribute 'get_version'; NCCL is not "
                                    f"available: {module['_reason']}")
    return module['_available'], module['_reason']


@pytest.mark.parametrize('missing', ['cupy', 'cupy_backends'])
def test_without_cupy_or_its_library(monkeypatch, of_cupy, missing):
    # CuPy 13 and 14 warn, define nothing and set `available`.
    of_cupy.__dict__.clear()
    of_cupy.available = False
    monkeypatch.setitem(sys.modules, missing, None)
    is_available, reason = import_again()
    assert not is_available and reason.startswith('ModuleNotFoundError: ') and missing in reason


def test_with_nccl(of_cupy):
    assert import_again() == (True, '')


def test_a_library_that_does_not_work(of_cupy):
    def fail():
        raise RuntimeError('no symbol ncclGetVersion')

    of_cupy.get_version = fail
    assert import_again() == (False, 'RuntimeError: no symbol ncclGetVersion')


def test_here():
    assert nccl._available == (not nccl._reason)
    if not nccl._available:
        pytest.skip(f'no NCCL: {nccl._reason}')
    assert [name for name in nccl.__all__ if not hasattr(nccl, name)] == []
    assert nccl.get_version() >= 2000


def test_signatures_of_cupy():
    """The signatures in CuPy's docstrings have the arguments that _nccl_group passes."""
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
