"""Changes in NumPy since Chainer 7.8.1."""

import sys
from types import ModuleType
from typing import Any

from chainer_compat.names import numpy_aliases
from chainer_compat.patching.registry import edit, patch, version


@edit('chainer.functions.array.as_strided')
def sctypes() -> dict[str, str]:
    """NumPy >= 2.0 removed ``numpy.sctypes``, which as_strided used at import time."""
    if version('numpy') < (2, 0):
        return {}
    return {
        "np.sctypes['int']": '(np.int8, np.int16, np.int32, np.int64)',
        "np.sctypes['float']": '(np.float16, np.float32, np.float64, np.longdouble)',
    }


@edit('chainer.utils.walker_alias')
def alias_table() -> dict[str, str]:
    """NumPy >= 2.0 computes the table of WalkerAlias in float32, so different samples are drawn.

    Older versions of NumPy used float64. NegativeSampling and BlackOut use WalkerAlias.
    """
    if version('numpy') < (2, 0):
        return {}
    return {
        'p = prob * len(probs)': 'p = float(prob) * len(probs)',
        'p -= 1.0 - threshold[ir]': 'p -= 1.0 - float(threshold[ir])',
    }


def number(value: Any) -> Any:
    """Return NumPy scalars and scalar Variables as Python numbers, which are summed in float64."""
    import numpy

    value = getattr(value, 'array', value)
    is_number = isinstance(value, (numpy.generic, numpy.ndarray)) and (
        value.ndim == 0 and value.dtype.kind in 'biuf')
    return value.item() if is_number else value


@patch('chainer.reporter')
def sums_of_observed_numbers(reporter: Any) -> None:
    """NumPy >= 2.0 sums observed numbers in their own dtype, so means of float16 were wrong.

    Older versions used float64. LogReport, PlotReport, Evaluator and triggers compute such means.
    """
    if version('numpy') < (2, 0):
        return
    add = reporter.Summary.add

    def add_numbers(self: Any, value: Any, weight: Any = 1) -> None:
        add(self, number(value), number(weight))

    reporter.Summary.add = add_numbers


@edit('chainer.training.extensions.micro_average')
def sums_of_micro_average() -> dict[str, str]:
    """NumPy >= 2.0 sums the terms of MicroAverage in their own dtype, in which they can overflow.

    All versions: the sum of Variables, such as losses, was a Variable, which kept their graphs in
    memory and could not be saved.
    """
    return {
        f'self._{key} += observation[self._{key}_key]':
            'from chainer_compat.fixes.numpy_changes import number; '
            f'self._{key} += number(observation[self._{key}_key])'
        for key in ('numerator', 'denominator')}


@edit('chainer._environment_check')
def distutils() -> dict[str, str]:
    """Python >= 3.12 has no ``numpy.distutils``; on older versions importing it warns.

    Chainer used it to warn about Apple's vecLib, which current NumPy versions do not use.
    """
    return {
        'import numpy.distutils.system_info': '',
        '    _check_osx_numpy_backend()': '',
    }


@edit('chainer.functions.array.resize_images')
def float_alias() -> dict[str, str]:
    """NumPy >= 1.24 removed ``numpy.float``: resize_images raised AttributeError."""
    return {'numpy.float)': 'numpy.float64)'}


@edit('chainer.distributions.categorical')
def meshgrid_tuple() -> dict[str, str]:
    """NumPy >= 2.0 returns a tuple from ``meshgrid``; Categorical.log_prob expected a list."""
    if version('numpy') < (2, 0):
        return {}
    return {
        'mg + [x.data.astype(numpy.int32)]': '(*mg, x.data.astype(numpy.int32))',
        'mg + [x.astype(numpy.int32)]': '(*mg, x.astype(numpy.int32))',
    }


@edit('chainer.functions.array.pad_sequence', 'chainer.dataset.convert')
def negative_padding() -> dict[str, str]:
    """NumPy >= 2.0 cannot store -1 in unsigned arrays; NumPy 1.24 to 1.26 warn.

    Padding with -1 gives the largest value of the type, as it did before. CuPy >= 14 on a GPU
    behaves like NumPy 2.
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
    """NumPy >= 2.4 deprecates ``maximum(x, y, out)``, which concat_examples uses for padding."""
    if version('numpy') < (2, 4):
        return {}
    return {'numpy.maximum(shape, array.shape, shape)':
            'numpy.maximum(shape, array.shape, out=shape)'}


@edit('chainer.functions.math.fix')
def fix() -> dict[str, str]:
    """NumPy >= 2.5 deprecates ``numpy.fix``, used by F.fix and the gradient of F.fmod."""
    return {} if version('numpy') < (2, 5) else {'xp.fix(x)': 'xp.trunc(x)'}


@edit(
    'chainer.functions.activation.clipped_relu',
    'chainer.functions.normalization.batch_normalization',
    'chainer.functions.normalization.batch_renormalization',
    'chainer.functions.normalization.layer_normalization',
    'chainer.functions.normalization.local_response_normalization',
)
def scalar_options() -> dict[str, str]:
    """All versions: options such as ``eps`` can be NumPy scalars, such as ``np.float64(1e-5)``.

    With NumPy >= 2, NumPy scalars changed the dtypes of results and gradients, or raised an error.
    """
    return {
        **{f'self.{name} = {name}\n': f'self.{name} = float({name})\n'
           for name in ['eps', 'rmax', 'dmax', 'k', 'alpha', 'beta']},
        'isinstance(z, float)': 'isinstance(z, (float, numpy.floating))',
        'self.cap = z\n': 'self.cap = float(z)\n',
    }


@patch('chainer.optimizer')
def scalar_hyperparameters(optimizer: Any) -> None:
    """All versions: hyperparameters can be NumPy scalars, such as ``lr=np.float64(.1)``.

    With NumPy >= 2, updates were computed in the dtype of the scalar, which was slower, and SMORMS3
    changed the dtype of its states.
    """
    numpy = sys.modules['numpy']

    def store(self: Any, name: str, value: Any) -> None:
        if isinstance(value, (numpy.generic, numpy.ndarray)) and value.ndim == 0:
            value = value.item()
        object.__setattr__(self, name, value)

    optimizer.Hyperparameter.__setattr__ = store


@patch('chainer')
def removed_aliases(chainer: ModuleType) -> None:
    """NumPy >= 1.24 removed names such as ``np.float``; errors mention the option for them."""
    numpy_aliases.extend_error(sys.modules['numpy'])


_POOLING = 'chainer.functions.pooling.roi_'


@edit(*(f'{_POOLING}{name}_2d' for name in (
    'average_align', 'max_align', 'average_pooling', 'max_pooling', 'pooling')))
def coordinates_of_regions() -> dict[str, str]:
    """NumPy >= 2.0 computes coordinates of regions of interest in float32.

    Some coordinates between two pixels were rounded to a different pixel than before. Older
    versions of NumPy multiplied a float32 scalar by a Python float in float64.
    """
    aligned = {f'bottom_rois[n, {i}] *': f'numpy.float64(bottom_rois[n, {i}]) *' for i in range(4)}
    return {**aligned, '= bottom_rois[i_roi]': '= bottom_rois[i_roi].astype(float)'}
