"""Skips the tests of the virtual GPU itself on other devices."""

import pytest


@pytest.fixture(autouse=True)
def virtual_gpu():
    import cupy

    if cupy.cuda.runtime.getDeviceProperties(0)['name'] != b'Virtual GPU':
        pytest.skip('needs the virtual GPU (build.py)')
    return cupy
