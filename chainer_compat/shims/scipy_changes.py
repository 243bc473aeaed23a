"""What SciPy refuses since Chainer 7.8.1."""

from chainer_compat._mend import edit


@edit('chainer.functions.math.sparse_matmul')
def sparse_float16() -> dict[str, str]:
    """Serves every version: SciPy refuses sparse float16, so it is given float32.

    The result of F.sparse_matmul is rounded once, to the type that it had.
    """
    return {
        '_coo_matmul_cpu(A_data, A_row, A_col, A_shape, B, dtype)\n':
        "_coo_matmul_cpu(A_data.astype(numpy.promote_types(A_data.dtype, 'f')), "
        'A_row, A_col, A_shape, B, dtype)\n',
    }
