"""What NumPy removed or changed since Chainer 7.8.1."""

from chainer_compat._mend import edit, version


@edit('chainer.functions.array.as_strided')
def sctypes() -> dict[str, str]:
    """NumPy >= 2.0 has no ``numpy.sctypes``, which as_strided reads when it is imported."""
    if version('numpy') < (2, 0):
        return {}
    return {
        "np.sctypes['int']": '(np.int8, np.int16, np.int32, np.int64)',
        "np.sctypes['float']": '(np.float16, np.float32, np.float64, np.longdouble)',
    }


@edit('chainer._environment_check')
def distutils() -> dict[str, str]:
    """Python >= 3.12 has no ``numpy.distutils``; before, importing it warns.

    It served to warn of Apple's vecLib under Python 2's NumPy; no NumPy of today uses that.
    """
    return {
        'import numpy.distutils.system_info': '',
        '    _check_osx_numpy_backend()': '',
    }


@edit('chainer.functions.array.resize_images')
def float_alias() -> dict[str, str]:
    """NumPy >= 1.24 has no ``numpy.float``: resize_images raised AttributeError."""
    return {'numpy.float)': 'numpy.float64)'}


@edit('chainer.distributions.categorical')
def meshgrid_tuple() -> dict[str, str]:
    """NumPy >= 2.0 returns a tuple from ``meshgrid``: Categorical.log_prob added a list to it."""
    if version('numpy') < (2, 0):
        return {}
    return {
        'mg + [x.data.astype(numpy.int32)]': '(*mg, x.data.astype(numpy.int32))',
        'mg + [x.astype(numpy.int32)]': '(*mg, x.astype(numpy.int32))',
    }


@edit('chainer.functions.array.pad_sequence', 'chainer.dataset.convert')
def negative_padding() -> dict[str, str]:
    """NumPy >= 2.0 refuses to store -1 in unsigned arrays, NumPy 1.24-1.26 warns of it.

    Padding with -1 gave the largest value of the type, and does so again; on a GPU CuPy >= 14
    refuses it likewise.
    """
    padding = 'numpy.asarray(self.padding).astype(y.dtype).item()'
    return {
        'y[i, l:] = self.padding': f'y[i, l:] = {padding}',
        'lengths, self.padding, base': f'lengths, {padding}, base',
        'full(shape, padding, dtype':
        'full(shape, numpy.asarray(padding).astype(arrays[0].dtype).item(), dtype',
    }


@edit('chainer.dataset.convert')
def third_argument_of_maximum() -> dict[str, str]:
    """NumPy >= 2.4 warns of ``maximum(x, y, out)``: concat_examples with padding calls it so."""
    if version('numpy') < (2, 4):
        return {}
    return {'numpy.maximum(shape, array.shape, shape)':
            'numpy.maximum(shape, array.shape, out=shape)'}


@edit('chainer.functions.math.fix')
def fix() -> dict[str, str]:
    """NumPy >= 2.5 warns of ``numpy.fix``, which F.fix and the gradient of F.fmod call."""
    return {} if version('numpy') < (2, 5) else {'xp.fix(x)': 'xp.trunc(x)'}
