"""NVML, the management library of NVIDIA's driver: the utilization and the memory of a GPU."""
from __future__ import annotations

import ctypes
import functools
from typing import NamedTuple

_LIBRARY = 'libnvidia-ml.so.1'


class GpuUse(NamedTuple):
    """The use of a GPU by all processes."""

    utilization: float  # fraction of the last sampling period (up to 1 s) in which a kernel ran
    used_bytes: int
    total_bytes: int


class _Utilization(ctypes.Structure):
    _fields_ = [('gpu', ctypes.c_uint), ('memory', ctypes.c_uint)]


class _MemoryInfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ('total', 'free', 'used')]


def gpu_use(bus_id: str) -> GpuUse | None:
    """Return the use of a GPU; ``None`` if NVML is missing or does not report this GPU.

    Args:
        bus_id: The address of the GPU on the PCI bus, as CUDA returns it.
    """
    library = _library()
    handle, utilization, memory = ctypes.c_void_p(), _Utilization(), _MemoryInfo()
    if library is None or not bus_id or (
            library.nvmlDeviceGetHandleByPciBusId_v2(bus_id.encode(), ctypes.byref(handle))
            or library.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(utilization))
            or library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))):
        return None
    return GpuUse(utilization.gpu / 100, memory.used, memory.total)


@functools.cache
def _library() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(_LIBRARY)
        return None if library.nvmlInit_v2() else library
    except (OSError, AttributeError):
        return None
