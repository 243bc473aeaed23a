"""Gradients with fewer passes over memory, on CPUs. Results are bitwise identical."""

import functools
from types import ModuleType
from typing import Any

from chainer_compat.patching.registry import edit, patch


@patch('chainer.functions.loss.softmax_cross_entropy')
def softmax_gradient(module: ModuleType) -> None:
    """All versions: the gradient of F.softmax_cross_entropy made three passes over memory.

    Results are bitwise identical.
    """
    np: Any = module.numpy
    node: Any = module._SoftmaxCrossEntropyGrad_NoDoubleBackprop
    original = node.forward_cpu

    @functools.wraps(original)
    def forward_cpu(self: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        _, t, gloss = inputs
        y = self.y
        if (y is None or y.ndim != 2 or y.size == 0 or self.soft_target or np.ndim(gloss)
                or t.shape != y.shape[:1] or self.class_weight is not None or self.coeff is None):
            return original(self, inputs)
        scale = gloss * self.coeff
        gx = np.multiply(y, scale, out=np.empty(y.shape, y.dtype), casting='same_kind')
        rows = np.arange(len(t))
        is_valid = t != self.ignore_label
        labels = t * is_valid
        gx[rows, labels] = _scaled(y[rows, labels] - y.dtype.type(1), True, scale)
        if not is_valid.all():
            ignored = y[~is_valid]
            ignored[:, 0] -= 1
            gx[~is_valid] = _scaled(ignored, False, scale)
        return gx,

    node.forward_cpu = forward_cpu


def _scaled(array: Any, is_valid: bool, scale: Any) -> Any:
    array *= is_valid  # like Chainer: infinity becomes NaN
    array *= scale
    return array


@edit('chainer.functions.array.get_item')
def slice_gradient() -> dict[str, str]:
    """All versions: the gradient of slices such as ``x[:, 1]`` was slow, due to ``numpy.add.at``.

    Only index arrays need it, because they can contain an index twice.
    """
    add = 'numpy.add.at(gx, slices, gy)'
    is_basic = ('all([type(s) in (int, slice, type(None), type(...)) or isinstance(s, '
                'numpy.integer) for s in slices])')
    # With add.at, negative zeros also become zero.
    is_basic += ' and gx[slices].shape == gy.shape'
    return {f'    {add}\n': f'    gx.__setitem__(slices, gy + 0) if {is_basic} else {add}\n'}
