"""Checks that the loss depends on the model and, in debug mode, that all replicas are the same."""
from __future__ import annotations

import chainer

from chainermn._operations.call_signature import Caller
from chainermn._process import environment
from chainermn._types import FunctionNode, Model, Variable
from chainermn.communicators.communicator_base import CommunicatorBase

_DEBUG_MODE = Caller('the comparison of the models in debug mode', if_missing=(
    f'Enable debug mode ({environment.DEBUG}=1 or chainer.set_debug(True)) on all ranks, with the '
    f'same {environment.DEBUG_EVERY}, or on none. All ranks must also run the same number of '
    'updates.'))


class ModelChecks:
    """The checks of one model.

    Args:
        communicator: Communicator of the ranks that train the model.

    Attributes:
        has_gradients: Whether backward has ever computed a gradient of the model.
    """

    def __init__(self, communicator: CommunicatorBase) -> None:
        self.has_gradients = False
        self._communicator = communicator
        self._has_debug_variable = environment.flag(environment.DEBUG)
        self._n_updates = 0

    def after_backward(self, loss: Variable, model: Model) -> None:
        """Raise ValueError on all ranks if the loss depends only on parameters of another model."""
        self.has_gradients = any(param.grad is not None for param in model.params())
        if not self.has_gradients and _depends_on_parameters(loss):
            self._communicator.refuse('the multi-node optimizer', ValueError(
                'the loss of update(lossfun, ...) depends on no parameter of the '
                f'{type(model).__name__} passed to setup(), but on parameters of another model. '
                'Pass the same model to setup() and update().'))

    def after_update(self, model: Model) -> None:
        """In debug mode, compare the models of all ranks after every k-th update."""
        if self._has_debug_variable or chainer.is_debug():
            self._n_updates += 1
            if self._n_updates % environment.debug_interval() == 0:
                with self._communicator.called_by(_DEBUG_MODE):
                    self._communicator.check_replicas(model)


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
