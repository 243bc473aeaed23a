"""NCCL as CuPy offers it, or the reason why there is none.  No other file names ``cupy.cuda.nccl``.

Without NCCL this module can be imported all the same; then ``_available`` is false and
``_reason`` says why.
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
        warnings.simplefilter('ignore')  # CuPy warns where it finds no NCCL; _reason tells it
        import cupy.cuda.nccl
    if not getattr(cupy.cuda.nccl, 'available', True):
        importlib.import_module('cupy_backends.cuda.libs.nccl')  # raises what CuPy warned of
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

    get_version()  # a library that is there but does not work is found now
    _available = True
except Exception as error:  # loading a library can fail in any way
    _reason = f'{type(error).__name__}: {error}'


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(f'chainermn.nccl has no {name}'
                         + ('' if _available else f'; NCCL is not available: {_reason}'))
