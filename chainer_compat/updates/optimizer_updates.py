"""Shims that update all parameters in one pass, with few kernel launches on a GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from chainer_compat.patching.registry import edit, patch

#: Elementwise update rules that change their state in place.
RULES = {
    'chainer.optimizers.ada_delta': 'AdaDeltaRule',
    'chainer.optimizers.ada_grad': 'AdaGradRule',
    'chainer.optimizers.adam': 'AdamRule',
    'chainer.optimizers.corrected_momentum_sgd': 'CorrectedMomentumSGDRule',
    'chainer.optimizers.momentum_sgd': 'MomentumSGDRule',
    'chainer.optimizers.nesterov_ag': 'NesterovAGRule',
    'chainer.optimizers.rmsprop': 'RMSpropRule',
    'chainer.optimizers.rmsprop_graves': 'RMSpropGravesRule',
    'chainer.optimizers.sgd': 'SGDRule',
}


@edit('chainer.optimizer')
def updates_in_one_pass() -> dict[str, str]:
    """All versions: an update called the rule of each parameter separately.

    For small parameters, most of the time was spent in calls; large parameters were memory-bound.
    Without PyTorch, results are bitwise identical.
    """
    return {
        'self.reallocate_cleared_grads()\n        self.check_nan_in_grads()':
            'from chainer_compat.updates.optimizer_steps import begin\n'
            '        if begin(self): return',
        'for param in self.target.params():\n                param.update()':
            'from chainer_compat.updates.one_pass import update\n'
            '            update(self.target.params(), is_repeated=True)',
        'for param in self.target.params():\n                hook(param.update_rule, param)':
            'from chainer_compat.updates.update_hooks import call_hook\n'
            '            call_hook(hook, self.target.params())',
        'for name, param in self.target.namedparams():\n            xp = param.device.xp':
            'from chainer_compat.updates.update_hooks import not_finite\n'
            '        for name, param in not_finite(self.target):',
        'if not xp.all(xp.isfinite(param.grad)):': 'if True:',
        'for name, param in self.target.namedparams(False):':
            'for _, param in (x for x in self.target.namedparams(False) '
            'if gradient_memory.gradient_of(x[1]) is None):',
    }


@patch('chainer.optimizer')
def owned_gradients(module: Any) -> None:
    """All versions: in-place changes to a gradient changed everything that shares its memory.

    The backward pass of ``W + V`` gives both parameters the same array, so hooks and the loss scale
    were applied twice. The gradient of an input, or an array in user code, can also share that
    memory. Now gradients that share memory are copied first. A read-only gradient, such as one from
    F.sum, raised an error.
    """
    from chainer_compat.updates import gradient_memory

    module.gradient_memory = gradient_memory


@edit('chainer.optimizer')
def hooks_without_loss_scale() -> dict[str, str]:
    """All versions: with loss scaling, hooks got scaled gradients.

    Therefore, they clipped too early; Lasso and GradientNoise had too little effect, and
    WeightDecay of an update rule too much. Now gradients are unscaled before hooks that ignore the
    scale.
    """
    return {
        '            hook(self)\n':
            '            import chainer_compat.updates.update_hooks as hooks; '
            'hooks.prepare(hook, self.target.params(False)); hook(self)\n',
        'loss_scale = param._loss_scale\n':
            'loss_scale = gradient_memory.begin_update(self, param)\n',
        'param_.grad /= loss_scale\n':
            'param_.grad /= loss_scale; gradient_memory.forget_scale(param_)\n',
    }


@edit('chainer.optimizer_hooks.lasso', 'chainer.optimizer_hooks.gradient_lars',
      'chainer.optimizer_hooks.gradient_clipping', 'chainer.optimizer_hooks.gradient_hard_clipping')
def hooks_of_scaled_gradients() -> dict[str, str]:
    """All versions: these hooks ignored the loss scale, which WeightDecay takes into account."""
    scale = '(param._loss_scale or 1)'
    bound = 'update_hooks.scaled(self.{0}_bound, param)'
    return {
        # Lasso
        'kernel(sign, self.rate, g)': f'kernel(sign, self.rate * {scale}, g)',
        'self.rate * sign': f'self.rate * {scale} * sign',
        # GradientLARS
        'self.eps + g_norm': f'self.eps + g_norm / {scale}',
        'kernel(p, rate, self.weight_decay, g)':
            f'kernel(p, rate, self.weight_decay * {scale}, g)',
        'g += self.weight_decay * p\n': f'g += self.weight_decay * {scale} * p\n',
        # GradientClipping
        'rate = self.threshold / norm': 'rate = update_hooks.scaled_threshold(self, opt) / norm',
        # GradientHardClipping
        'self.lower_bound, self.upper_bound)': f'{bound.format("lower")}, {bound.format("upper")})',
        'self.lower_bound, self.upper_bound, out':
            f'{bound.format("lower")}, {bound.format("upper")}, out',
    }


@patch('chainer.optimizer_hooks')
def hooks_that_know_the_scale(module: Any) -> None:
    """All versions: marks Chainer's hooks that take the loss scale into account.

    They can handle scaled gradients, so gradients need not be unscaled first.
    """
    from chainer_compat.updates import update_hooks

    for hook in (module.GradientClipping, module.GradientHardClipping, module.GradientLARS,
                 module.Lasso, module.WeightDecay):
        update_hooks.accept_scaled(hook)
    for name in module.gradient_clipping, module.gradient_hard_clipping:
        name.update_hooks = update_hooks


@patch('chainer.backends.cuda')
def elementwise_updates(module: Any) -> None:
    """All versions: an update on a GPU launched a kernel for each parameter.

    Provides ``cuda.elementwise_update``, which can launch one kernel for many parameters.
    """
    from chainer_compat.updates import elementwise

    module.elementwise_update = elementwise.elementwise


@edit(*RULES, 'chainer.optimizer_hooks.weight_decay')
def kernels_of_many_parameters() -> dict[str, str]:
    """All versions: an update on a GPU launched a kernel for each parameter.

    Now update rules and WeightDecay call ``cuda.elementwise_update``.
    """
    return {'cuda.elementwise(': 'cuda.elementwise_update('}


@patch('chainer.optimizer_hooks.weight_decay', 'chainer.optimizer_hooks.gradient_clipping')
def hooks_of_many_parameters(module: Any) -> None:
    """All versions: a hook launched kernels for each parameter on a GPU."""
    from chainer_compat.updates import device_gradients, update_hooks

    if hasattr(module, 'WeightDecay'):
        update_hooks.accept_hook(module.WeightDecay)
        return
    call, norm = module.GradientClipping.__call__, module._sum_sqnorm_grads

    @functools.wraps(call)
    def clip(self: Any, opt: Any) -> None:
        if module._sum_sqnorm_grads is not norm or not device_gradients.clip(
                opt.target.params(False), update_hooks.scaled_threshold(self, opt)):
            call(self, opt)

    module.GradientClipping.__call__ = clip


@patch(*RULES)
def updates_in_blocks(module: Any) -> None:
    """All versions: an update allocated several arrays as large as the parameter.

    It was memory-bound. Results are bitwise identical.
    """
    # Import these now: they keep references to Chainer's methods, which user code may replace
    # later.
    from chainer_compat.updates import one_pass, optimizer_steps  # noqa: F401

    rule = getattr(module, RULES[module.__name__])
    rule.update_core_cpu = _in_blocks(rule.update_core_cpu)
    one_pass.accept(rule)


def _in_blocks(update: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    from chainer_compat.graph.settings import raises_errors
    from chainer_compat.updates import block_updates, one_pass, update_formulas

    @functools.wraps(update)
    def update_core_cpu(self: Any, param: Any) -> None:
        if raises_errors():
            return update(self, param)
        whole = self.state
        states = whole or {}
        arrays = [param.data, param.grad, *states.values()]
        if not (_is_divisible(arrays, block_updates.BLOCK) and one_pass.is_unchanged(type(self))
                and one_pass.has_numbers(self.hyperparam) and not one_pass.share_memory(arrays)):
            return update(self, param)
        data, grad, *flat = [array.reshape(-1) for array in arrays]
        is_of_one_dtype = all([array.dtype == data.dtype for array in arrays])
        formula = update_formulas.find(self, data.dtype) if is_of_one_dtype else None
        length = block_updates.length(formula)
        try:
            for start in range(0, data.size, length):
                part = slice(start, start + length)
                blocks = [state[part] for state in flat]
                if formula is not None:
                    formula(data[part], grad[part], *blocks)
                    continue
                self._state = dict(zip(states, blocks, strict=True))
                update(self, block_updates.Block(data[part], grad[part]))
        finally:
            self._state = whole

    return update_core_cpu


def _is_divisible(arrays: list[Any], block: int) -> bool:
    import numpy as np

    data = arrays[0]
    return all(type(array) is np.ndarray and array.size == data.size > block
               and array.flags.c_contiguous for array in arrays)
