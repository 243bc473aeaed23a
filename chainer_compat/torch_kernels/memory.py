"""Freed memory stays in the process, for the next step.

A training step frees all of its arrays, and allocates the same ones again.  Without this, glibc
returns large blocks to the kernel, which then has to provide and clear each page anew: up to a
quarter of the time of a step.
"""

from __future__ import annotations

import ctypes
import os

# Of glibc's malloc.h.
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3

TRIM_THRESHOLD = 1 << 30  # bytes: at most this much stays
MMAP_THRESHOLD = 1 << 25  # bytes; glibc's maximum: larger blocks are returned


def keep() -> None:
    """Set these limits, unless glibc's environment variables do, or there is no glibc."""
    if 'GLIBC_TUNABLES' in os.environ or any(name.startswith('MALLOC_') for name in os.environ):
        return
    mallopt = getattr(ctypes.CDLL(None), 'mallopt', None)
    if mallopt is not None:
        mallopt(M_TRIM_THRESHOLD, TRIM_THRESHOLD)
        mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD)
