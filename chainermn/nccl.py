"""CuPy's NCCL bindings, or the reason why they are not available.

Only this module imports ``cupy.cuda.nccl``. It can be imported without NCCL; then, ``_available``
is false and ``_reason`` is the error.
"""
from __future__ import annotations

import importlib
import warnings
from typing import NoReturn

__all__ = [
    'NCCL_BFLOAT16', 'NCCL_FLOAT', 'NCCL_FLOAT16', 'NCCL_FLOAT32', 'NCCL_FLOAT64', 'NCCL_INT8',
    'NCCL_INT32', 'NCCL_INT64', 'NCCL_MAX', 'NCCL_MIN', 'NCCL_PROD', 'NCCL_SUM', 'NCCL_UINT8',
    'NCCL_UINT32', 'NCCL_UINT64', 'NcclCommunicator', 'NcclError', 'get_build_version',
    'get_unique_id', 'get_version', 'groupEnd', 'groupStart',
]

_available = False
_reason = ''

try:
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # CuPy warns if NCCL is missing; _reason is enough
        import cupy.cuda.nccl
    if not getattr(cupy.cuda.nccl, 'available', True):
        importlib.import_module('cupy_backends.cuda.libs.nccl')  # raises the actual error
    from cupy.cuda.nccl import (
        NCCL_BFLOAT16,
        NCCL_FLOAT,
        NCCL_FLOAT16,
        NCCL_FLOAT32,
        NCCL_FLOAT64,
        NCCL_INT8,
        NCCL_INT32,
        NCCL_INT64,
        NCCL_MAX,
        NCCL_MIN,
        NCCL_PROD,
        NCCL_SUM,
        NCCL_UINT8,
        NCCL_UINT32,
        NCCL_UINT64,
        NcclCommunicator,
        NcclError,
        get_build_version,
        get_unique_id,
        get_version,
        groupEnd,
        groupStart,
    )

    get_version()  # raises an error if the library does not work
    _available = True
except Exception as error:  # loading a library can fail in any way
    _reason = f'{type(error).__name__}: {error}'


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(f'chainermn.nccl has no attribute {name!r}'
                         + ('' if _available else f'; NCCL is not available: {_reason}'))
