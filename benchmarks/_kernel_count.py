"""Counts the kernels that a GPU runs, with NVIDIA's profiling library CUPTI."""

import ctypes
import ctypes.util
import pathlib
import sys
from collections.abc import Callable

_CONCURRENT_KERNEL = 10  # of CUpti_ActivityKind
_BUFFER_BYTES = 1 << 20

_REQUESTED = ctypes.CFUNCTYPE(None, ctypes.POINTER(ctypes.c_void_p),
                              ctypes.POINTER(ctypes.c_size_t), ctypes.POINTER(ctypes.c_size_t))
_COMPLETED = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p,
                              ctypes.c_size_t, ctypes.c_size_t)


class KernelCount:
    """Counts kernels of this process: ``KernelCount()(function)``."""

    def __init__(self) -> None:
        self._buffers: dict[int, ctypes.Array] = {}  # buffers that CUPTI is using, by address
        self._count = 0
        self._callbacks = _REQUESTED(self._requested), _COMPLETED(self._completed)
        path = library()
        self._cupti = ctypes.CDLL(path) if path else None
        self._call('RegisterCallbacks', *self._callbacks)

    def __call__(self, function: Callable[[], object]) -> int | None:
        """Return how many kernels a function launches; ``None`` if CUPTI does not work."""
        import cupy

        cupy.cuda.Device().synchronize()
        self._count = 0
        works = self._call('Enable', _CONCURRENT_KERNEL)
        function()
        cupy.cuda.Device().synchronize()
        works = works and self._call('FlushAll', 0) and self._call('Disable', _CONCURRENT_KERNEL)
        return self._count if works else None

    def _call(self, name: str, *args: object) -> bool:
        return self._cupti is not None and not getattr(self._cupti, f'cuptiActivity{name}')(*args)

    def _requested(self, buffer, size, max_records) -> None:
        memory = (ctypes.c_uint64 * (_BUFFER_BYTES // 8))()  # aligned to 8 bytes
        address = ctypes.addressof(memory)
        self._buffers[address] = memory
        buffer[0], size[0], max_records[0] = address, _BUFFER_BYTES, 0

    def _completed(self, context, stream, buffer, size, valid_size) -> None:
        record = ctypes.c_void_p()
        while not self._cupti.cuptiActivityGetNextRecord(
                ctypes.c_void_p(buffer), ctypes.c_size_t(valid_size), ctypes.byref(record)):
            kind = ctypes.c_uint32.from_address(record.value).value  # the first field of a record
            self._count += kind == _CONCURRENT_KERNEL
        del self._buffers[buffer]


def library() -> str | None:
    """Return the path of CUPTI: from NVIDIA's wheel, or from a CUDA installation."""
    for folder in sys.path:
        for path in sorted(pathlib.Path(folder, 'nvidia').glob('*/lib/libcupti.so.*')):
            return str(path)
    installed = pathlib.Path('/usr/local/cuda/extras/CUPTI/lib64/libcupti.so')
    return str(installed) if installed.exists() else ctypes.util.find_library('cupti')
