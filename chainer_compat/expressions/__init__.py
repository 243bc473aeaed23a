"""PyTorch expressions of Chainer's functions: one entry per class, in tables by family.

An entry is called with the function and its inputs. The function has the attributes of Chainer's
object. Its integers can be expressions of the batch size, and its arrays are tensors.
``f.in_shapes``, ``f.out_shapes`` and ``f.in_dtypes`` describe its arrays. ``f.training`` is the
mode of the module, ``f.batch`` the batch size if a shape depends on it. Entries use no name of this
package in the graph, so the module runs without it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from chainer_compat.expressions import (
    activation,
    arrays,
    connection,
    distributions,
    indexing,
    loss,
    math,
    noise,
    normalization,
    numpy_functions,
    pooling,
    rnn,
    rois,
)
from chainer_compat.expressions.running import keeping
from chainer_compat.torch_kernels.arrays import Expression

_FAMILIES = (activation, arrays, connection, distributions, indexing, loss, math, noise,
             normalization, pooling, rnn, rois)

#: By the class below ``chainer.functions``.
EXPRESSIONS: dict[str, Callable[..., Any]] = {
    name: expression for family in _FAMILIES for name, expression in family.EXPRESSIONS.items()}

#: The same as runs record them: with what Chainer's ``backward`` reads.
RECORDED: dict[str, Expression] = {
    name: expression for family in _FAMILIES for name, expression in {
        **{name: keeping(family.EXPRESSIONS[name], kept)
           for name, kept in getattr(family, 'KEPT', {}).items()},
        **getattr(family, 'RECORDED', {})}.items()}

#: By the name of the function in NumPy, or of the method of arrays.
NUMPY: dict[str, Callable[..., Any]] = numpy_functions.EXPRESSIONS

#: Functions without an entry, by class, and the reason.
NOT_EXPRESSIBLE: dict[str, str] = {
    'math.einsum.DiagEinSum': 'PyTorch has no einsum with repeated output subscripts',
    'theano.theano_function.TheanoFunction': 'is a program of Theano',
}
