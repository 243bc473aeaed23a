"""CuPy's NCCL, or the reason why it is not available; only this module imports ``cupy.cuda.nccl``.

Without NCCL this module can still be imported; then ``_available`` is false, and ``_reason`` is the
error.
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
        warnings.simplefilter('ignore')  # without NCCL, CuPy warns; see _reason
        import cupy.cuda.nccl
    if not getattr(cupy.cuda.nccl, 'available', True):
        importlib.import_module('cupy_backends.cuda.libs.nccl')  # raises the cause
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

    get_version()  # raises if the library does not work
    _available = True
except Exception as error:  # loading a library can fail in any way
    _reason = f'{type(error).__name__}: {error}'


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(f'chainermn.nccl has no {name}'
                         + ('' if _available else f'; NCCL is not available: {_reason}'))
