"""A function node that can be called, as those of ChainerMN 7 could."""
from __future__ import annotations

from typing import Any

import chainer
import numpy as np


class Node(chainer.FunctionNode):
    """Base of the function nodes of this package."""

    def __call__(self, *inputs: Any) -> Any:
        """Applies the node; returns a Variable, or a tuple if there are several outputs."""
        outputs = self.apply(inputs or (placeholder(),))
        return outputs[0] if len(outputs) == 1 else outputs


def placeholder() -> chainer.Variable:
    """An input for a rank that gives nothing: without one, Chainer would not run its backward."""
    return chainer.Variable(np.empty(0, np.float32))
