"""What SciPy refuses since Chainer 7.8.1, and how long it takes to import."""

import importlib.util
from typing import Any

from chainer_compat._mend import edit, patch

LATER = 'from chainer_compat.scipy_later import '


@edit('chainer.datasets.svhn', 'chainer.distributions.multivariate_normal',
      'chainer.functions.math.erfcinv', 'chainer.functions.math.erfcx',
      'chainer.functions.math.erfinv', 'chainer.functions.math.ndtri',
      'chainer.functions.math.sparse_matmul')
def scipy_later() -> dict[str, str]:
    """Serves every version: SciPy is imported when it is first used, not with Chainer.

    It was half of the time of ``import chainer``.
    """
    if importlib.util.find_spec('scipy') is None:
        return {}
    return {
        'from scipy import special\n': f'{LATER}special\n',
        'from scipy import sparse\n': f'{LATER}sparse\n',
        'from scipy import io\n': f'{LATER}io\n',
        'import scipy.linalg\n': f'{LATER}scipy\n'}


@patch('chainer.functions.math.sparse_matmul')
def sparse_float16(sparse_matmul: Any) -> None:
    """Serves every version: SciPy refuses sparse float16, so it is given float32.

    The result of F.sparse_matmul is rounded once, to the type that it had.
    """
    multiply = sparse_matmul._coo_matmul_cpu

    def multiply_in_float32(data: Any, *args: Any) -> Any:
        return multiply(data.astype('f') if data.dtype == 'e' else data, *args)

    sparse_matmul._coo_matmul_cpu = multiply_in_float32
