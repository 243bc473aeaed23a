"""PyTorch expressions of Chainer's functions: one entry per class, in tables by family.

The export to PyTorch and ONNX calls an entry of ``EXPRESSIONS`` with the function and its inputs.
The function has the attributes of Chainer's object. Its integers can be expressions of the batch
size, and its arrays are tensors. ``f.in_shapes``, ``f.out_shapes`` and ``f.in_dtypes`` describe its
arrays. ``f.training`` is the mode of the module, ``f.batch`` the batch size if a shape depends on
it. Entries use no name of this package in the graph, so the module runs without it.

Training on the CPU records runs of functions (``recording``). A family has two tables
for these: ``RETAINED`` says what Chainer's ``backward`` reads, if the entry of the export can be
used; ``RECORDED`` has expressions that are faster, or that do more of what ``forward`` does. A run
saves the arrays that Chainer saves: a program may change them before the backward pass.
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


#: By the class below ``chainer.functions``.
EXPRESSIONS: dict[str, Callable[..., Any]] = _of_families('EXPRESSIONS')

#: The same as runs record them.
RECORDED: dict[str, Expression] = {
    name: retaining(EXPRESSIONS[name], retained)
    for name, retained in _of_families('RETAINED').items()} | _of_families('RECORDED')

#: By the name of the function in NumPy, or of the method of arrays.
NUMPY: dict[str, Callable[..., Any]] = numpy_functions.EXPRESSIONS

#: Functions without an entry, by class, and the reason.
NOT_EXPRESSIBLE: dict[str, str] = {
    'math.einsum.DiagEinSum': 'PyTorch has no einsum with repeated output subscripts',
    'theano.theano_function.TheanoFunction': 'runs a Theano function',
}
