"""A function node that can be called, as in ChainerMN 7."""
from __future__ import annotations

from collections.abc import Sequence

import chainer
import numpy as np

from chainermn._types import Variable, VariableOrArray

#: Numbers of the inputs that need gradients.
Indexes = tuple[int, ...]
#: Gradients of outputs or inputs; ``None`` if there is none.
Gradients = tuple[Variable | None, ...]


class Node(chainer.FunctionNode):
    """Base of the function nodes of this package."""

    def __call__(self, *inputs: VariableOrArray) -> Variable | tuple[Variable, ...]:
        """Apply the node.

        Args:
            inputs: Variables or arrays.

        Returns:
            A Variable, or a tuple if there are several outputs.
        """
        outputs = self.apply(inputs or (placeholder(),))
        return outputs[0] if len(outputs) == 1 else outputs


def placeholder() -> chainer.Variable:
    """Return an input for a rank without one; otherwise Chainer would not run its backward."""
    return chainer.Variable(np.empty(0, np.float32))


def are_arrays(inputs: Sequence[VariableOrArray | None]) -> bool:
    """Return whether all inputs are Variables or arrays; ``None`` is left to the operation."""
    types = chainer.Variable, *chainer.get_array_types()
    return all(x is None or isinstance(x, types) for x in inputs)
