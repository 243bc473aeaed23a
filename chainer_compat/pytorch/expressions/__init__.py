"""PyTorch expressions of Chainer's functions: one entry per class, in tables by family.

The export to PyTorch and ONNX calls an entry of ``EXPRESSIONS`` with the function and its inputs.
The function has the attributes of Chainer's object. Its integers can be expressions of the batch
size, and its arrays are tensors. ``f.in_shapes``, ``f.out_shapes`` and ``f.in_dtypes`` describe its
arrays, and ``f.training`` is the mode of the module. Entries add no names of this package to the
graph, so the module runs without the package.

Training on the CPU records runs of functions (``recording``). A family has two tables for runs. If
the expression of the export can be used, ``RETAINED`` lists what Chainer's ``backward`` reads.
``RECORDED`` has separate expressions, which are faster or do more of the work of ``forward``. A run
saves the arrays that Chainer saves, because user code may change them before the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from chainer_compat.pytorch.expressions import (
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
from chainer_compat.pytorch.expressions.running import retaining
from chainer_compat.pytorch.tensors.arrays import Expression

_FAMILIES = (activation, arrays, connection, distributions, indexing, loss, math, noise,
             normalization, pooling, rnn, rois)


def _of_families(table: str) -> dict[str, Any]:
    return {name: entry for family in _FAMILIES
            for name, entry in getattr(family, table, {}).items()}


#: The expressions for export, by the class below ``chainer.functions``.
EXPRESSIONS: dict[str, Callable[..., Any]] = _of_families('EXPRESSIONS')

#: The expressions for runs, by the same classes.
RECORDED: dict[str, Expression] = {
    name: retaining(EXPRESSIONS[name], retained)
    for name, retained in _of_families('RETAINED').items()} | _of_families('RECORDED')

#: The expressions of NumPy functions and array methods, by name.
NUMPY: dict[str, Callable[..., Any]] = numpy_functions.EXPRESSIONS

#: The reasons why functions have no expression, by class.
NOT_EXPRESSIBLE: dict[str, str] = {
    'math.einsum.DiagEinSum': 'PyTorch has no einsum with repeated output subscripts',
    'theano.theano_function.TheanoFunction': 'it runs a Theano function',
}
