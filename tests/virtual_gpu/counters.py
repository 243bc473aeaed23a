"""Reads the counters of the virtual GPU: kernel launches, copied bytes, NCCL calls and others.

``cuda/virtual_gpu.h`` lists the counters.
"""

import contextlib
import ctypes
from collections.abc import Iterator


def counts() -> dict[str, int]:
    """Return the values of all counters of this process."""
    cuda = ctypes.CDLL('libcuda.so.1')
    cuda.virtual_gpu_counter_names.restype = ctypes.c_char_p
    names = cuda.virtual_gpu_counter_names().decode().split()
    values = (ctypes.c_uint64 * len(names))()
    cuda.virtual_gpu_counts(values)
    return dict(zip(names, values, strict=True))


@contextlib.contextmanager
def counting() -> Iterator[dict[str, int]]:
    """Yield a dict, which contains the counts of the block when the block has ended."""
    before, result = counts(), {}
    yield result
    result.update((name, value - before[name]) for name, value in counts().items())
