"""Fast steps for optimizers that only update parameters, in the same way as in the last step."""

from __future__ import annotations

from typing import Any

from chainer.optimizer import GradientMethod, _OptimizerHookable

from chainer_compat.graph import link_parameters
from chainer_compat.updates import one_pass

#: Methods that a step calls. If none is overridden, an ordinary step only needs the update.
_METHODS = {name: getattr(GradientMethod, name) for name in (
    '_check_set_up', 'call_hook', 'call_hooks', 'check_nan_in_grads', 'is_safe_to_update',
    'reallocate_cleared_grads', 'update_loss_scale')}


def begin(optimizer: Any) -> bool:
    """Begin a step after the backward pass; return whether the step is complete.

    This does what ``GradientMethod.update`` does before it calls hooks. If the optimizer has no
    hooks, every parameter has a gradient, and nothing else has changed, it does the whole step.
    """
    optimizer._check_set_up()
    found = None
    if _is_ordinary(optimizer):
        params = link_parameters.parameters(optimizer.target)
        found = one_pass.update_as_before(params) if params else None
    if not found:
        optimizer.reallocate_cleared_grads()
        optimizer.check_nan_in_grads()
        return False
    optimizer._loss_scaling_isnan = False
    optimizer.t += 1
    found()
    return True


def _is_ordinary(optimizer: Any) -> bool:
    """Return whether a step has no hooks, overridden methods or dynamic loss scale."""
    cls, attributes = type(optimizer), vars(optimizer)
    hooks = attributes.get('_hookable')
    return (type(hooks) is _OptimizerHookable
            and not hooks._pre_update_hooks and not hooks._post_update_hooks
            and not optimizer._loss_scaling_is_dynamic
            and all([getattr(cls, name) is method for name, method in _METHODS.items()])
            and _METHODS.keys().isdisjoint(attributes))
