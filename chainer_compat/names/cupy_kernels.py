"""Kernels written for old versions of CuPy: functions that compile them, and source fixes."""

from __future__ import annotations

import functools
import importlib
import os
import re
import sys
from collections.abc import Callable, Iterable
from typing import Any


def compile_with_cache(source: str, options: Iterable[str] = (), arch: str | None = None,
                       cache_dir: str | None = None, extra_source: str | None = None,
                       backend: str = 'nvrtc', **others: Any) -> Any:
    """Compile CUDA source code. ``cache_dir`` is ignored: CuPy chooses the folder of its cache."""
    options = tuple(options)
    if '#include' in source:
        core: Any = importlib.import_module('cupy._core.core')
        options = core.assemble_cupy_compiler_options(options)
    compiler: Any = importlib.import_module('cupy.cuda.compiler')
    return compiler._compile_module_with_cache(
        source, options, arch=arch, extra_source=extra_source, backend=backend, **others)


def headers_differ() -> bool:
    """Return whether this is CuPy >= 14, whose headers do not compile some old sources."""
    return os.path.exists(f'{sys.modules["cupy"].__path__[0]}/_core/include/cupy/float16.cuh')


def get_cache_dir() -> str:
    """Return the folder in which CuPy caches compiled kernels."""
    return os.environ.get('CUPY_CACHE_DIR', os.path.expanduser('~/.cupy/kernel_cache'))


def with_old_sources(compile_source: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function with which CuPy >= 14 also compiles kernels written for CuPy < 14.

    In CuPy >= 14, carray.cuh only declares ``float16``, so the header that defines it is added.
    CuPy's headers require C++17, in which the keyword ``register`` is an error, so it is removed.
    """

    @functools.wraps(compile_source)
    def compile_old(source: str, options: tuple[str, ...] = (), *args: Any, **others: Any) -> Any:
        if 'cupy/carray.cuh' in source and 'cupy/float16.cuh' not in source and re.search(
                r'\bfloat16\b', source):
            source = f'#include <cupy/float16.cuh>\n{source}'
        source = re.sub(r'\bregister\s+(?=[A-Za-z_])', '', source)
        options = tuple(re.sub(r'^(--?std=c\+\+)(03|11|14)$', r'\g<1>17', each) for each in options)
        return compile_source(source, options, *args, **others)

    return compile_old
