"""Optimizers of Chainer 1: removed methods, and user classes that define updates."""

import functools
from types import ModuleType
from typing import Any

from chainer_compat.dialect.old_arguments import warn
from chainer_compat.patching.registry import patch


@patch('chainer.optimizer')
def old_optimizers(module: ModuleType) -> None:
    """All versions: ``zero_grads``, ``weight_decay`` and other methods of Chainer 1 work again.

    So do optimizers that define ``init_state`` and ``update_one`` instead of an update rule.
    """
    methods: list[Any] = [zero_grads, compute_grads_norm, clip_grads, weight_decay,
                          accumulate_grads, create_update_rule, init_state, update_one]
    for function in methods:
        owner = module.Optimizer if function in methods[:5] else module.GradientMethod
        setattr(owner, function.__name__, function)
    # Old user classes do not call the base constructor.
    module.GradientMethod._use_fp32_update = False


def zero_grads(self: Any) -> None:
    """Fill all gradients with zeros."""
    warn('zero_grads is a method of Chainer 1: use optimizer.target.cleargrads().')
    for param in self.target.params():
        param.zerograd()


def compute_grads_norm(self: Any) -> float:
    """Return the norm of all gradients."""
    warn('compute_grads_norm is a method of Chainer 1: use numpy.linalg.norm.')
    squares = (param.grad.ravel().dot(param.grad.ravel()) for param in self.target.params())
    return float(sum(map(float, squares)) ** .5)


def clip_grads(self: Any, maxnorm: float) -> None:
    """Scale all gradients if their norm is larger than ``maxnorm``."""
    from chainer.optimizer_hooks import GradientClipping

    warn('clip_grads is a method of Chainer 1: use the hook GradientClipping.')
    self.call_hook(GradientClipping(maxnorm))


def weight_decay(self: Any, decay: float) -> None:
    """Add ``decay`` times the parameters to the gradients."""
    from chainer.optimizer_hooks import WeightDecay

    warn('weight_decay is a method of Chainer 1: use the hook WeightDecay.')
    self.call_hook(WeightDecay(decay))


def accumulate_grads(self: Any, grads: Any) -> None:
    """Add arrays from any device to the gradients."""
    warn('accumulate_grads is a method of Chainer 1: use Link.addgrads.')
    for param, grad in zip(self.target.params(), grads, strict=False):
        param.grad += param.device.send(grad)


def create_update_rule(self: Any) -> Any:
    """Return a rule that calls ``update_one`` of an optimizer that has no update rule."""
    from chainer.optimizer import UpdateRule

    if type(self).update_one is update_one and not hasattr(self, 'update_one_cpu'):
        raise NotImplementedError
    warn('update_one is a method of Chainer 1: use chainer.optimizer.UpdateRule.')

    rule = UpdateRule()
    rule.init_state = functools.partial(_with_state, self.init_state, rule)
    rule.update_core = functools.partial(_with_state, self.update_one, rule)
    return rule


def _with_state(method: Any, rule: Any, param: Any) -> None:
    method(param, rule.state)


def init_state(self: Any, param: Any, state: dict[str, Any]) -> None:
    """Call the method for the device of ``param``, if the optimizer has it."""
    getattr(self, f'init_state_{_device(param)}', lambda param, state: None)(param, state)


def update_one(self: Any, param: Any, state: dict[str, Any]) -> None:
    """Call the method for the device of ``param``."""
    getattr(self, f'update_one_{_device(param)}')(param, state)


def _device(param: Any) -> str:
    return 'cpu' if param.device.xp.__name__ == 'numpy' else 'gpu'
