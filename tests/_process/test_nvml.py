"""The use of a GPU, from a library with the functions of NVML."""

import shutil
import subprocess

import pytest

from chainermn._process import nvml

pytestmark = pytest.mark.mpi_skip

#: Declared as in nvml.h of CUDA 12.
LIBRARY = '''
#include <string.h>
typedef struct device *nvmlDevice_t;
typedef struct { unsigned int gpu, memory; } nvmlUtilization_t;
typedef struct { unsigned long long total, free, used; } nvmlMemory_t;
static int calls;
int nvmlInit_v2(void) { return calls++; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *id, nvmlDevice_t *device) {
    *device = (nvmlDevice_t)0x123456789abcL;
    return strcmp(id, "0000:0A:00.0") ? 6 : 0;
}
int nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *result) {
    result->gpu = 87; result->memory = 13;
    return device == (nvmlDevice_t)0x123456789abcL ? 0 : 2;
}
int nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *result) {
    result->total = 1ULL << 37; result->free = 1ULL << 36; result->used = (1ULL << 36) - 5;
    return device == (nvmlDevice_t)0x123456789abcL ? 0 : 2;
}
'''


@pytest.fixture
def library(monkeypatch):
    """Sets the name of the library."""
    nvml._library.cache_clear()
    yield lambda name: monkeypatch.setattr(nvml, '_LIBRARY', str(name))
    nvml._library.cache_clear()


def test_a_gpu(tmp_path, library):
    if not shutil.which('cc'):
        pytest.skip('needs a C compiler')
    (tmp_path / 'nvml.c').write_text(LIBRARY)
    subprocess.run(['cc', '-shared', '-fPIC', '-o', 'libnvml.so', 'nvml.c'], cwd=tmp_path,
                   check=True)
    library(tmp_path / 'libnvml.so')
    for _ in range(2):
        assert nvml.gpu_use('0000:0A:00.0') == (.87, 2**36 - 5, 2**37)
    assert nvml.gpu_use('0000:0B:00.0') is None  # such as a MIG device
    assert nvml.gpu_use('') is None  # CuPy is not used


@pytest.mark.parametrize('name', ['libnone.so', 'libc.so.6'])
def test_without_nvml(library, name):
    library(name)
    assert nvml.gpu_use('0000:0A:00.0') is None
