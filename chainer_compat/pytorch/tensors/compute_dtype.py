"""The dtype in which kernels multiply matrices: ``chainer.config.torch_compute_dtype``.

With ``'bfloat16'``, they round float32 operands to bfloat16 and accumulate products in float32.
``arrays.operands`` casts the operands, ``arrays.product`` the result. With ``'tf32'``, GPUs round
the operands to TF32 (``gpu_arrays.precision``); it has no effect on the CPU.

On processors without bfloat16 instructions, PyTorch's bfloat16 kernels take many times as long as
its float32 kernels, and some accumulate in bfloat16. There, the float32 kernels multiply the
rounded operands: each product of two such numbers is exact in float32.
"""

from __future__ import annotations

import functools
import os
import re
import warnings

from chainer_compat.graph.settings import OptionError, OptionWarning

VARIABLE = 'CHAINER_TORCH_COMPUTE_DTYPE'
BFLOAT16 = 'bfloat16'
TF32 = 'tf32'

CPUINFO = '/proc/cpuinfo'
#: Processor flags for bfloat16 multiplication: two for x86, one for ARM.
_INSTRUCTIONS = frozenset({'avx512_bf16', 'amx_bf16', 'bf16'})


def default() -> str | None:
    """Return the initial value of ``chainer.config.torch_compute_dtype``.

    Raises:
        ValueError: If the environment variable has an invalid value.
    """
    value = os.environ.get(VARIABLE) or None
    if value not in (None, BFLOAT16, TF32):
        raise ValueError(f'{VARIABLE} is {value!r}. Use {BFLOAT16} or {TF32}, or unset it.')
    return value


def is_bfloat16(value: object) -> bool:
    """Return whether a value of the option selects bfloat16.

    Raises:
        OptionError: If the value is invalid.
    """
    if value is None:
        return False
    if isinstance(value, str) and value in (BFLOAT16, TF32):
        return value == BFLOAT16
    raise OptionError(f'chainer.config.torch_compute_dtype is {value!r}. '
                      f'Use {BFLOAT16!r}, {TF32!r} or None.')


@functools.cache
def has_instructions() -> bool:
    """Return whether this processor has bfloat16 instructions; true if that is unknown."""
    try:
        with open(CPUINFO, encoding='ascii', errors='replace') as file:
            first = file.read(1 << 13)  # of the first core; the whole file is slow on large nodes
    except OSError:
        return True
    flags = re.search(r'^(?:flags|Features)\s*:(.*)$', first, re.MULTILINE)
    return flags is None or not _INSTRUCTIONS.isdisjoint(flags[1].split())


@functools.cache
def warn_once() -> None:
    """Warn that bfloat16 is slow, at the first call in this process."""
    warnings.warn(
        'This processor has no bfloat16 instructions, so computing in bfloat16 is slower than in '
        f'float32. Set chainer.config.torch_compute_dtype = None, or unset {VARIABLE}.',
        OptionWarning, stacklevel=3)
