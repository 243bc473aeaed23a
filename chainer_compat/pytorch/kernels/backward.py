"""``backward`` of functions, without calling other functions, if gradients need no graph.

The kernels of a family compute the gradients; this module finds their arrays.
"""

from __future__ import annotations

import chainer
import numpy as np
import torch
from chainer import FunctionNode, Variable

from chainer_compat.graph.nodes import is_gradient_only, variable
from chainer_compat.pytorch.tensors import memory_format
from chainer_compat.pytorch.tensors.arrays import array, product, tensor
from chainer_compat.pytorch.unsupported import Unsupported

Gradients = tuple[Variable | None, ...]


def arrays(f: FunctionNode, grad_outputs: Gradients, is_of_output: bool = False
           ) -> list[np.ndarray]:
    """Return the arrays that a function has retained, and the gradient of its only output.

    Args:
        f: The function.
        grad_outputs: The gradients that its ``backward`` got.
        is_of_output: Whether it has retained its output rather than its inputs.

    Raises:
        Unsupported: If gradients are part of a graph, or functions are watched by hooks.
    """
    if not is_gradient_only():
        raise Unsupported
    retained = f.get_retained_outputs() if is_of_output else f.get_retained_inputs()
    variables = *retained, *grad_outputs
    if any([each is None or each.layout is not None for each in variables]):
        raise Unsupported
    found = [each.array for each in variables]
    # Older versions of CuPy have cuDNN, which Chainer prefers to PyTorch.
    if type(found[0]) is not np.ndarray and chainer.should_use_cudnn('>=auto'):
        raise Unsupported
    return found


def variables(*gradients: np.ndarray | None) -> tuple[Variable, ...]:
    """Return gradients as variables that are not part of the graph."""
    return tuple([variable(each, False) for each in gradients])


def with_bias(gx: torch.Tensor | None, gW: torch.Tensor | None, gy: Variable | None,
              x: np.ndarray, indexes: tuple[int, ...]) -> list[Variable]:
    """Return the requested gradients of input, weight and bias.

    Args:
        gx: The gradient of the input; ``None`` if not requested.
        gW: The gradient of the weight; ``None`` if not requested.
        gy: The gradient of the output, whose second axis has the channels.
        x: The input; ``gx`` is returned in its memory format.
        indexes: The indexes of the requested gradients; 2 is the bias.
    """
    found = []
    if gx is not None:
        is_last = memory_format.is_channels_last(x)
        gx = memory_format.preferred(gx) if is_last else gx.contiguous()
        found.append(variable(product(gx), False))
    if gW is not None:
        found.append(variable(product(gW.contiguous()), False))
    if gy is not None and 2 in indexes:
        gb = tensor(gy.array, channels_last=True).sum((0, *range(2, gy.ndim)))
        found.append(variable(array(gb), False))
    return found
