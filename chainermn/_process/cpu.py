"""The vector instructions of this processor, which determine the kernels that libraries select."""
from __future__ import annotations

import functools
import os

#: Flags in /proc/cpuinfo that PyTorch's kernels depend on: x86, ARM, POWER.
_FLAGS = frozenset({'avx2', 'avx512bw', 'avx512dq', 'avx512f', 'avx512vl', 'fma', 'asimd', 'sve',
                    'sve2'})


@functools.cache
def vector_instructions() -> str:
    """Return the names of the instructions; ``''`` if they are unknown."""
    try:
        with open('/proc/cpuinfo', encoding='ascii', errors='replace') as file:
            first = file.read(1 << 13)  # the first core; reading all of it is slow on large nodes
    except OSError:
        first = ''
    found = _FLAGS.intersection(first.split())
    return ' '.join(sorted(found | {os.environ.get('ATEN_CPU_CAPABILITY', '')}))
