"""Who computes: the configuration, the environment, threads, forked processes, and debug mode."""

import contextlib
import importlib.util
import platform

import chainer
import chainer.functions as F
import numpy as np
import pytest

from chainer_compat.pytorch import dispatch
from chainer_compat.pytorch.unsupported import Unsupported
from chainer_compat.updates import fused_option

pytestmark = pytest.mark.mpi_skip

needs_torch = pytest.mark.skipif(importlib.util.find_spec('torch') is None, reason='no PyTorch')

X = np.random.RandomState(0).standard_normal((2, 3, 8, 8))
W = np.random.RandomState(1).standard_normal((4, 3, 3, 3))

CONVOLUTION = '''
import os, sys
import chainer, numpy as np
import chainer.functions as F
x, W = np.ones((8, 16, 64, 64), 'f'), np.ones((16, 16, 3, 3), 'f')
'''

# Chainer, and functions that PyTorch does not compute, do not import it. Then a forked process
# computes after this one, which has several threads.
FORK = CONVOLUTION + '''
with chainer.using_config('use_torch', 'never'):
    F.relu(x[:1, :, :8, :8])
    F.convolution_2d(x[:1, :, :8, :8], W)
assert 'torch' not in sys.modules
y = F.convolution_2d(x, W).array
import torch
assert torch.get_num_threads() == 2
child = os.fork()
if not child:
    try:
        same = np.allclose(F.convolution_2d(x, W).array, y)
        os._exit(0 if same and torch.get_num_threads() == 1 else 3)
    finally:
        os._exit(4)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert (F.convolution_2d(x, W).array == y).all()
'''

# Prints the page faults of some steps: how often the kernel had to provide memory.
STEPS = CONVOLUTION + '''
import resource
def step():
    v = chainer.Variable(x)
    F.sum(F.relu(F.convolution_2d(F.relu(F.convolution_2d(v, W, pad=1)), W, pad=1))).backward()
for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
'''

THREADS = CONVOLUTION + '''
F.relu(x)
assert sys.modules['torch'].get_num_threads() == 1
'''

# A missing or a broken PyTorch: Chainer computes.
MISSING = 'import sys; sys.modules["torch"] = None' + CONVOLUTION + '''
from chainer_compat.pytorch import availability
assert F.convolution_2d(x[:1], W).shape == (1, 16, 62, 62)
why = availability.why_unavailable()
assert why.startswith('ModuleNotFoundError: '), why
'''
BROKEN = CONVOLUTION + '''
from chainer_compat.pytorch import availability
assert F.relu(x[:1]).shape == (1, 16, 64, 64)
assert availability.why_unavailable() == 'OSError: libc10.so: cannot open'
'''


@needs_torch
def test_import_and_fork(python):
    # Python 3.12 warns of a fork while there are threads.
    python(FORK, '-W', 'ignore::DeprecationWarning', OMP_NUM_THREADS='2', MKL_NUM_THREADS='2')


@needs_torch
def test_threads(python, monkeypatch):
    from chainer_compat.pytorch.tensors import process

    monkeypatch.delenv('OMP_NUM_THREADS', raising=False)
    for name in process.LOCAL_RANKS:
        monkeypatch.delenv(name, raising=False)
    alone = process.cores_of_rank()
    assert alone >= 1
    for value, cores in ('1000000', (1, alone)), ('1', (alone,)), ('', (alone,)), ('x', (alone,)):
        monkeypatch.setenv('MPI_LOCALNRANKS', value)
        assert process.cores_of_rank() in cores  # all of them if the launcher bound the rank
    monkeypatch.setattr('os.cpu_count', lambda: alone)
    monkeypatch.setenv('MPI_LOCALNRANKS', '1000000')
    assert process.cores_of_rank() == 1
    python(THREADS, OMP_NUM_THREADS='1')


@needs_torch
@pytest.mark.skipif(platform.libc_ver()[0] != 'glibc', reason='other allocators')
def test_freed_memory_stays_in_the_process(python):
    """The variable has glibc's default, and means that the program sets limits itself."""
    faults, faults_by_default = (int(python(STEPS, OMP_NUM_THREADS='1', **variables)) for variables
                                 in ({}, {'MALLOC_TRIM_THRESHOLD_': '131072'}))
    assert 10 * faults < faults_by_default


def test_without_pytorch(python, tmp_path):
    python(MISSING)
    tmp_path.joinpath('torch.py').write_text('raise OSError("libc10.so: cannot open")')
    python(BROKEN)


def test_values_of_the_options(python):
    said = python('import chainer', check=False, CHAINER_USE_TORCH='yes')
    assert "ValueError: CHAINER_USE_TORCH is 'yes'. Use one of auto, always, never." in said
    said = python('import chainer; print(chainer.config.use_torch, chainer.config.fused_updates)',
                  CHAINER_USE_TORCH='never', CHAINER_FUSED_UPDATES='0')
    assert said == 'never False'
    with chainer.using_config('use_torch', True), pytest.raises(
            ValueError, match=r'use_torch is True\. Use one of auto, always, never'):
        F.relu(X)


def test_values_of_fused_updates(monkeypatch):
    monkeypatch.setenv('CHAINER_FUSED_UPDATES', 'of')
    with pytest.raises(ValueError, match=r"UPDATES is 'of'\. Use auto; 1, "):
        fused_option.default_fused_updates()
    for value, expected in [
            ('', 'auto'), ('Auto', 'auto'), ('0', False), ('off', False), ('1', True)]:
        monkeypatch.setenv('CHAINER_FUSED_UPDATES', value)
        assert fused_option.default_fused_updates() == expected
    optimizer = chainer.optimizers.SGD().setup(chainer.links.Linear(2, 2))
    x = np.ones((1, 2), 'f')
    for value in 'off', 'never', 'always', '0', None:
        with chainer.using_config('fused_updates', value), pytest.raises(
                ValueError, match=rf"fused_updates is {value!r}\. Use True, False or 'auto'"):
            optimizer.update(lambda x: F.sum(optimizer.target(x)), x)
    for value in True, False, 'auto':
        with chainer.using_config('fused_updates', value):
            optimizer.update(lambda x: F.sum(optimizer.target(x)), x)


@needs_torch
def test_the_configuration(operators):
    for mode, is_used in ('never', False), ('auto', True), ('always', True):
        for ideep in 'never', 'auto', 'always':  # Chainer's switch for ideep4py has no effect
            with chainer.using_config('use_torch', mode), operators() as names, \
                    chainer.using_config('use_ideep', ideep):
                F.relu(F.convolution_2d(X, W))
            assert bool(names) == is_used
    assert chainer.config.use_torch == dispatch.default_mode()


@needs_torch
def test_arrays():
    from chainer_compat.pytorch.tensors import arrays

    assert arrays.tensor(X).data_ptr() == X.ctypes.data  # no copy
    assert arrays.array(arrays.tensor(X)).ctypes.data == X.ctypes.data

    class Other:  # such as an array on a GPU
        dtype = X.dtype

    for mode in 'auto', 'always':
        with chainer.using_config('use_torch', mode), pytest.raises(Unsupported):
            arrays.tensor(Other())
    for dtype in 'e', 'i', '?':
        with pytest.raises(Unsupported):
            arrays.tensor(X.astype(dtype))
    with pytest.raises(Unsupported):
        arrays.tensors(X, X.astype('f'))


@needs_torch
def test_debug_mode_hooks_and_timers():
    with chainer.using_config('debug', True), pytest.raises(RuntimeError, match='NaN is detected'):
        F.convolution_2d(X * np.nan, W)
    hook = chainer.function_hooks.TimerHook()
    with chainer.using_config('debug', True), hook:
        x = chainer.Variable(X)
        F.sum(F.convolution_2d(x, W)).backward()
    names = [name for name, _ in hook.call_history]
    assert names[0] == 'Convolution2DFunction' and 'Deconvolution2DFunction' in names


FIRST = '''
import chainer, chainer.functions as F, chainer.links as L, numpy as np

def step():
    np.random.seed(0)
    model = chainer.Sequential(L.Linear(5, 8), F.tanh, L.Linear(8, 3))
    h = F.tanh(chainer.Variable(np.random.rand(4, 5).astype('f')) * 2)
    loss = F.sum(F.sigmoid(model(h)))
    loss.backward()
    return [loss.array.tobytes(), *(p.grad.tobytes() for p in model.params())]

assert step() == step()
'''


@needs_torch
def test_the_first_call_rounds_as_later_ones(python):
    """Otherwise, resumed training would not be bitwise identical to uninterrupted training."""
    python(FIRST)


@needs_torch
def test_autocast_has_no_effect():
    import torch

    results = []
    for context in contextlib.nullcontext(), torch.autocast('cpu'):
        with context:
            x, w = chainer.Variable(X.astype('f')), chainer.Variable(W.astype('f'))
            F.sum(F.tanh(F.convolution_2d(x, w))).backward()
            results.append(w.grad)
    w.cleargrad()
    y = F.sum(F.tanh(F.convolution_2d(x, w)))
    with torch.autocast('cpu'):
        y.backward()
    for grad in *results, w.grad:
        np.testing.assert_allclose(grad, results[0], rtol=1e-4, atol=1e-4)
