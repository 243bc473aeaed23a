"""Changes in SciPy since Chainer 7.8.1, and its import time."""

import importlib.util
from typing import Any

from chainer_compat.patching.registry import edit, patch

LAZY = 'from chainer_compat.fixes.lazy_scipy import '


@edit('chainer.datasets.svhn', 'chainer.distributions.multivariate_normal',
      'chainer.functions.math.erfcinv', 'chainer.functions.math.erfcx',
      'chainer.functions.math.erfinv', 'chainer.functions.math.ndtri',
      'chainer.functions.math.sparse_matmul')
def lazy_scipy() -> dict[str, str]:
    """All versions: Chainer imported SciPy immediately, which took half of its import time.

    Now SciPy is imported on first use.
    """
    if importlib.util.find_spec('scipy') is None:
        return {}
    return {
        'from scipy import special\n': f'{LAZY}special\n',
        'from scipy import sparse\n': f'{LAZY}sparse\n',
        'from scipy import io\n': f'{LAZY}io\n',
        'import scipy.linalg\n': f'{LAZY}scipy\n'}


@patch('chainer.functions.math.sparse_matmul')
def sparse_float16(sparse_matmul: Any) -> None:
    """All versions: SciPy does not support sparse float16, so F.sparse_matmul failed.

    Now it computes in float32 and rounds the result to float16 once.
    """
    multiply = sparse_matmul._coo_matmul_cpu

    def multiply_in_float32(data: Any, *args: Any) -> Any:
        return multiply(data.astype('f') if data.dtype == 'e' else data, *args)

    sparse_matmul._coo_matmul_cpu = multiply_in_float32
