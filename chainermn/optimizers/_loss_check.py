"""A loss that only depends on the parameters of another model is an error."""
from __future__ import annotations

import chainer

from chainermn._types import FunctionNode, Model, Variable
from chainermn.communicators.communicator_base import CommunicatorBase


def check_loss(loss: Variable, model: Model, communicator: CommunicatorBase) -> bool:
    """Raise ValueError on all ranks if a loss only depends on parameters of another model.

    Args:
        loss: The loss, after backward.
        model: The model of the optimizer.
        communicator: The ranks.

    Returns:
        Whether the loss depends on the model.
    """
    has_gradients = any(param.grad is not None for param in model.params())
    if not has_gradients and _depends_on_parameters(loss):
        communicator.refuse('the multi-node optimizer', ValueError(
            'the loss of update(lossfun, ...) depends on no parameter of the '
            f'{type(model).__name__} passed to setup(), but on those of another model. '
            'Pass the same model to setup() and update().'))
    return has_gradients


def _depends_on_parameters(loss: Variable) -> bool:
    """Return whether a parameter of any model needs the gradient of a loss."""
    found, seen = [loss.creator_node], set[FunctionNode | None]()
    while found:
        function = found.pop()
        if function is None or function in seen:
            continue
        seen.add(function)
        for node in function.inputs:
            if isinstance(node.get_variable_or_none(), chainer.Parameter) and node.requires_grad:
                return True
            found.append(node.creator_node)
    return False
