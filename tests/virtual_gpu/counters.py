"""Reads what the virtual GPU counts: kernel launches, bytes copied, NCCL calls and others.

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
    """Give a dict that contains what was counted within the block, after it."""
    before, result = counts(), {}
    yield result
    result.update((name, value - before[name]) for name, value in counts().items())
