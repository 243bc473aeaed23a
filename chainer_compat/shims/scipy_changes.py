"""What SciPy refuses since Chainer 7.8.1."""

from typing import Any

from chainer_compat._mend import patch


@patch('chainer.functions.math.sparse_matmul')
def sparse_float16(sparse_matmul: Any) -> None:
    """Serves every version: SciPy refuses sparse float16, so it is given float32.

    The result of F.sparse_matmul is rounded once, to the type that it had.
    """
    multiply = sparse_matmul._coo_matmul_cpu

    def multiply_in_float32(data: Any, *args: Any) -> Any:
        return multiply(data.astype('f') if data.dtype == 'e' else data, *args)

    sparse_matmul._coo_matmul_cpu = multiply_in_float32
