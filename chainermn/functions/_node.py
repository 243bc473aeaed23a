"""Function nodes that can be called, as in ChainerMN 7."""
from __future__ import annotations

from collections.abc import Sequence

import chainer
import numpy as np

from chainermn._types import Variable, VariableOrArray

#: Indexes of the inputs that need gradients.
Indexes = tuple[int, ...]
#: Gradients of outputs or inputs; ``None`` for a missing gradient.
Gradients = tuple[Variable | None, ...]


class Node(chainer.FunctionNode):
    """Base class of the function nodes of this package."""

    def __call__(self, *inputs: VariableOrArray) -> Variable | tuple[Variable, ...]:
        """Apply the node.

        Args:
            inputs: Variables or arrays.

        Returns:
            A Variable, or a tuple of Variables if the node has several outputs.
        """
        outputs = self.apply(inputs or (placeholder(),))
        return outputs[0] if len(outputs) == 1 else outputs


class Communication(Node):
    """Base class of nodes that communicate.

    In the backward pass, Chainer visits the nodes in descending order of their graph ranks. By
    default, the graph rank of a node is the number of nodes before it, so a node that gets its
    input from another MPI rank would come last, in a different order than on that rank. Here, each
    call gets a larger graph rank than the calls before it, so on every MPI rank, the backward pass
    runs in the reverse order of the calls.
    """

    _newest = 0  # the largest graph rank so far

    def apply(self, inputs: Sequence[VariableOrArray]) -> tuple[Variable, ...]:
        outputs = super().apply(inputs)
        if outputs[0].creator_node is self:
            Communication._newest = self.rank = max(self.rank, Communication._newest + 1)
            for y in outputs:
                y.node._rank = self.rank + 1
        return outputs


def placeholder() -> chainer.Variable:
    """Return an input for a node without one; otherwise Chainer would not run its backward."""
    return chainer.Variable(np.empty(0, np.float32))


def are_arrays(inputs: Sequence[VariableOrArray | None]) -> bool:
    """Return whether all inputs are Variables, arrays or ``None``, which the operation checks."""
    types = chainer.Variable, *chainer.get_array_types()
    return all(x is None or isinstance(x, types) for x in inputs)
