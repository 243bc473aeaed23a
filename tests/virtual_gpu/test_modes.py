"""The modes of the virtual GPU expose errors in programs, each in a separate process."""

import os
import signal
import subprocess
import sys

import pytest
from time_limits import seconds
from virtual_gpu import sanitizer

pytestmark = [pytest.mark.gpu, pytest.mark.mpi_skip, pytest.mark.limit(200)]

WITHOUT_SYNCHRONIZATION = '''
import cupy
import numpy as np

first, second = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
x = cupy.zeros(1000, 'f')
cupy.cuda.Device().synchronize()
with first:
    x += 1
if fixed:
    second.wait_event(first.record())
with second:
    y = x * 2
second.synchronize()
print(float(y.get()[0]))

memory = cupy.cuda.alloc_pinned_memory(4000)
on_host = np.frombuffer(memory, 'f', 1000)
on_host[:] = 7
with first:
    x.fill(5)
    x.data.copy_to_host_async(memory.ptr, 4000, first)
if fixed:
    first.synchronize()
print(on_host[0])
first.synchronize()
'''


def run(code, before=(), **variables):
    env = os.environ | {f'VGPU_{name.upper()}': value for name, value in variables.items()}
    return subprocess.run([*before, sys.executable, '-c', code], env=env, capture_output=True,
                          text=True, timeout=seconds(150))


@pytest.mark.parametrize(('fixed', 'printed'), [(False, ['0.0', '7.0']), (True, ['2.0', '5.0'])])
def test_lazy_mode_shows_missing_synchronization(fixed, printed):
    done = run(f'fixed = {fixed}\n{WITHOUT_SYNCHRONIZATION}', mode='lazy', protect='0')
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == printed


def test_the_host_cannot_access_protected_memory():
    code = '''
import ctypes
import cupy

x = cupy.arange(10, dtype='f')
print(float(x[3]), flush=True)
ctypes.c_float.from_address(x.data.ptr).value
'''
    done = run(code, protect='1')
    assert done.stdout.split() == ['3.0'] and done.returncode == -signal.SIGSEGV


@pytest.mark.parametrize(('error', 'report'), [
    ('', ''), ('out_of_bounds', 'heap-buffer-overflow'), ('freed', 'heap-use-after-free')])
def test_the_address_sanitizer(error, report):
    try:
        sanitizer.variables()
    except FileNotFoundError:
        pytest.skip("g++ lacks the address sanitizer's library")
    code = f'''
import cupy

cupy.cuda.set_allocator(None)
kernel = cupy.RawKernel('extern "C" __global__ void set(float* x, int i) {{ x[i] = 7; }}', 'set')
x = cupy.zeros(10, 'f')
pointer = x.data.ptr
if {error!r} == 'freed':
    del x
kernel((1,), (1,), (pointer, 10 if {error!r} == 'out_of_bounds' else 9))
cupy.cuda.Device().synchronize()
print('end')
'''
    done = run(code, before=[sys.executable, sanitizer.__file__])
    assert (done.stdout == 'end\n') == (done.returncode == 0) == (not error), done.stderr
    assert report in done.stderr
    assert ('vgpu: in kernel set' in done.stderr) == bool(error)

