"""Runs a command with the address sanitizer: ``python tests/virtual_gpu/sanitizer.py COMMAND ...``.

If a kernel accesses memory outside of an array, or after it was freed, the process ends and prints
the location and the name of the kernel. CuPy's memory pool hides such errors from the sanitizer.
Therefore, the GPU tests do not use the pool; other programs can call
``cupy.cuda.set_allocator(None)``.
"""

import os
import subprocess
import sys


def variables() -> dict[str, str]:
    """Return the environment variables. Raises FileNotFoundError if g++ has no sanitizer."""
    library = subprocess.check_output(['g++', '-print-file-name=libasan.so'], text=True).strip()
    if not os.path.isabs(library):
        raise FileNotFoundError(library)
    return {
        'VGPU_CXXFLAGS': '-fsanitize=address',
        'LD_PRELOAD': library,
        'ASAN_OPTIONS': 'detect_leaks=0',  # Python does not free all memory at exit
        'VGPU_PROTECT': '0',  # arrays come from malloc, which the sanitizer replaces
        'CUPY_CACHE_IN_MEMORY': '1',  # the file cache ignores the compiler's options
    }


if __name__ == '__main__':
    os.environ.update(variables())
    os.execvp(sys.argv[1], sys.argv[1:])
