"""``to_torch_optimizer``: convert a Chainer optimizer to PyTorch, and its state back to Chainer.

Each supported update rule of Chainer has an entry in :data:`KINDS`. A hook becomes an option of
the PyTorch optimizer if there is an equivalent option, or else a function that runs before each
step.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import chainer
import numpy as np
import torch
from chainer import optimizer_hooks
from chainer.optimizers.ada_delta import AdaDeltaRule
from chainer.optimizers.ada_grad import AdaGradRule
from chainer.optimizers.adam import AdamRule
from chainer.optimizers.corrected_momentum_sgd import CorrectedMomentumSGDRule
from chainer.optimizers.momentum_sgd import MomentumSGDRule
from chainer.optimizers.nesterov_ag import NesterovAGRule
from chainer.optimizers.rmsprop import RMSpropRule
from chainer.optimizers.sgd import SGDRule

from chainer_compat.pytorch.conversion import state, torch_optimizers
from chainer_compat.pytorch.conversion.errors import ConversionError, name_of_kind

T = TypeVar('T')
Options = dict[str, Any]
#: Changes the gradients of the given parameters of the module before a step.
Preparation = Callable[[list[torch.nn.Parameter]], None]


class RuleInTorch(NamedTuple):
    """The PyTorch equivalent of a Chainer update rule."""

    make: type[torch.optim.Optimizer]
    #: Returns the options of the optimizer for the given hyperparameters.
    options: Callable[[Any], Options]
    #: PyTorch's name of each state, by Chainer's name.
    states: dict[str, str]
    #: Returns the factor that converts Chainer's state to PyTorch's, for given hyperparameters.
    factor: Callable[[Any], float] = lambda _: 1.
    #: Whether ``weight_decay`` has the effect of the hook WeightDecay.
    has_weight_decay: bool = True
    #: Whether PyTorch counts the steps of each parameter.
    counts: bool = False


def _velocity(hyperparam: Any) -> float:
    """Return the factor that converts Chainer's velocity, which contains the learning rate."""
    if not hyperparam.lr:
        raise ConversionError('The learning rate is 0, so the velocity of MomentumSGD, which '
                              'contains it, cannot be converted. Set a different learning rate '
                              'first')
    return -1 / float(hyperparam.lr)


def _adam(hyperparam: Any) -> Options:
    if hyperparam.adabound:
        raise ConversionError('PyTorch has no AdaBound. Use Adam, or create a new optimizer in '
                              'PyTorch, without the state of this one')
    alpha = float(hyperparam.alpha)
    decay = float(hyperparam.weight_decay_rate)
    if decay and not alpha:
        raise ConversionError('alpha is 0, but weight_decay_rate is not: PyTorch multiplies the '
                              'weight decay by the learning rate. Set alpha, or set '
                              'weight_decay_rate to 0')
    options: Options = {
        'lr': alpha * hyperparam.eta, 'betas': (hyperparam.beta1, hyperparam.beta2),
        'chainer_eps': hyperparam.eps, 'amsgrad': bool(hyperparam.amsgrad)}
    return {**options, 'weight_decay': decay / alpha} if decay else options


def _rmsprop(hyperparam: Any) -> Options:
    if hyperparam.eps_inside_sqrt:
        raise ConversionError('PyTorch has no RMSprop with eps_inside_sqrt=True. Create a new '
                              'optimizer in PyTorch, without the state of this one')
    return {'lr': hyperparam.lr, 'alpha': hyperparam.alpha, 'eps': hyperparam.eps}


def _momentum(hyperparam: Any) -> Options:
    return {'lr': hyperparam.lr, 'momentum': hyperparam.momentum}


_ADAM = RuleInTorch(torch.optim.Adam, _adam, {
    'm': 'exp_avg', 'v': 'exp_avg_sq', 'vhat': 'max_exp_avg_sq'}, counts=True)

#: The PyTorch equivalents, by update rule.
KINDS: dict[type, RuleInTorch] = {
    AdaDeltaRule: RuleInTorch(
        torch.optim.Adadelta, lambda h: {'lr': 1., 'rho': h.rho, 'eps': h.eps},
        {'msg': 'square_avg', 'msdx': 'acc_delta'}, counts=True),
    AdaGradRule: RuleInTorch(
        torch.optim.Adagrad, lambda h: {'lr': h.lr, 'eps': h.eps}, {'h': 'sum'}, counts=True),
    AdamRule: _ADAM,
    CorrectedMomentumSGDRule: RuleInTorch(
        torch.optim.SGD, _momentum, {'v': 'momentum_buffer'}, lambda _: -1.),
    MomentumSGDRule: RuleInTorch(
        torch.optim.SGD, _momentum, {'v': 'momentum_buffer'}, _velocity),
    NesterovAGRule: RuleInTorch(
        torch_optimizers.NesterovAG, _momentum, {'v': 'v'}, has_weight_decay=False),
    RMSpropRule: RuleInTorch(
        torch.optim.RMSprop, _rmsprop, {'ms': 'square_avg'}, counts=True),
    SGDRule: RuleInTorch(torch.optim.SGD, lambda h: {'lr': h.lr}, {}),
}

_ADAMW = _ADAM._replace(make=torch.optim.AdamW, has_weight_decay=False)


def to_torch_optimizer(optimizer: chainer.Optimizer, module: torch.nn.Module
                       ) -> torch.optim.Optimizer:
    """Return a PyTorch optimizer that continues where Chainer's stopped.

    It has the state of each parameter, even if hyperparameters differ between parameters.
    Parameters with ``disable_update()`` get ``requires_grad=False``. The hooks WeightDecay,
    GradientClipping, GradientHardClipping and Lasso have the same effect as before: as the option
    ``weight_decay`` if it is equivalent, or else before each step (``register_step_pre_hook``).

    Collective for a multi-node optimizer with ``shard_states=True``: every rank calls it.

    Args:
        optimizer: An optimizer of a model on the CPU, or a multi-node optimizer.
        module: The model in PyTorch, from ``to_torch(model, ..., train=True)``.

    Returns:
        An optimizer of ``torch.optim`` (SGD, Adam, AdamW, RMSprop, Adagrad or Adadelta), or
        NesterovAG, a class with the same interface and Chainer's formula. For Adam and AdamW, a
        hook changes ``eps`` before each step, because Chainer adds it before the bias correction.

        PyTorch's velocity does not contain the learning rate, so a later change of the learning
        rate immediately affects the whole velocity. AdamW multiplies its weight decay by the
        learning rate.

    Raises:
        ConversionError: If PyTorch has no such optimizer or hook, or if a parameter is missing
            from the module.

    Example:
        >>> model = chainer.links.Linear(3, 2)
        >>> optimizer = chainer.optimizers.MomentumSGD(lr=.1).setup(model)
        >>> module = chainer_compat.to_torch(model, np.ones((1, 3), 'f'), train=True)
        >>> chainer_compat.to_torch_optimizer(optimizer, module).param_groups[0]['momentum']
        0.9
    """
    states = _states(optimizer)
    optimizer = actual(optimizer)
    used, frozen = _parameters(optimizer, module)
    kind = kind_of(optimizer, [old for _, old, _ in used])
    hooks, decay = remaining_hooks(optimizer, kind)
    preparations = [_preparation(hook) for hook in hooks]
    if frozen and any(type(hook) is optimizer_hooks.GradientClipping for hook in hooks):
        warnings.warn(
            'In Chainer, the norm of GradientClipping includes the gradients of frozen parameters. '
            'In PyTorch, frozen parameters have no gradients, so the norm may be smaller.',
            stacklevel=2)
    groups: dict[Any, Options] = {}
    for name, old, new in used:
        rule = old.update_rule
        options = _named(name, functools.partial(_options, rule, kind, decay))
        if 'chainer_eps' in options:
            options['t'] = rule.t
        group = groups.setdefault(repr(sorted(options.items())), {'params': [], **options})
        group['params'].append(new)
    result = kind.make([*groups.values()])
    for name, old, new in used:
        _set_state(result, kind, name, old, new, states[id(old)])
    for _, new in frozen:
        new.requires_grad_(False)
    if preparations:
        parameters = [new for _, _, new in used]
        result.register_step_pre_hook(lambda *_: _prepare(preparations, parameters))
    if 'chainer_eps' in result.param_groups[0]:
        result.register_step_pre_hook(torch_optimizers.eps_before_correction)
    return result


def load_torch_optimizer(optimizer: chainer.Optimizer, torch_optimizer: torch.optim.Optimizer,
                         module: torch.nn.Module) -> None:
    """Copy the state of a PyTorch optimizer into a Chainer optimizer.

    Args:
        optimizer: The corresponding Chainer optimizer, set up with the model. Its hyperparameters
            are not changed.
        torch_optimizer: The PyTorch optimizer, such as the result of :func:`to_torch_optimizer`.
        module: The model in PyTorch. :func:`load_weights` copies its parameters.

    Raises:
        ConversionError: If the optimizers do not correspond, if ``torch_optimizer`` updates the
            parameters of a different module, or if a part of the state of a parameter is missing.
    """
    optimizer = actual(optimizer)
    used, _ = _parameters(optimizer, module)
    kind = kind_of(optimizer, [old for _, old, _ in used])
    if not isinstance(torch_optimizer, kind.make):
        raise ConversionError(
            f'{type(optimizer).__name__} is {kind.make.__name__} in PyTorch, not '
            f'{type(torch_optimizer).__name__}. Pass the optimizer that to_torch_optimizer '
            'returned.')
    known = {id(each) for group in torch_optimizer.param_groups for each in group['params']}
    if missing := [name for name, _, new in used if id(new) not in known]:
        raise ConversionError(
            f'The PyTorch optimizer does not update these parameters of the module: '
            f'{", ".join(missing[:4])}{", ..." * (len(missing) > 4)}. Pass the module whose '
            'parameters it was created with; for parameters that stay frozen, call '
            'disable_update() in Chainer first.')
    values = []  # nothing is changed until all values are known
    for name, old, new in used:
        rule, found = old.update_rule, torch_optimizer.state.get(new, {})
        rule._init_states(old)
        for ours, theirs in kind.states.items():
            if ours in (rule.state or {}):
                if rule.state[ours].shape != old.shape:
                    raise ConversionError(
                        f'The state of {name} is a shard, because the optimizer has '
                        'shard_states=True and was updated. Call optimizer.setup(model) again '
                        'first.')
                if found and found.get(theirs) is None:
                    raise ConversionError(
                        f'The PyTorch optimizer has no state {theirs!r} for {name}. Pass the '
                        'optimizer that to_torch_optimizer returned.')
                factor = _named(name, functools.partial(kind.factor, rule.hyperparam))
                values.append((rule.state[ours], found[theirs].detach().cpu().numpy() / factor
                               if found else 0))
    for array, value in values:
        array[...] = value
    for _, old, new in used:
        step = torch_optimizer.state.get(new, {}).get('step')
        if step is not None:
            old.update_rule.t = int(step)
            optimizer.t = max(optimizer.t, int(step))


def actual(optimizer: Any) -> Any:
    """Return the Chainer optimizer, which may be wrapped in multi-node optimizers."""
    while hasattr(optimizer, 'actual_optimizer'):
        optimizer = optimizer.actual_optimizer
    if not isinstance(optimizer, chainer.Optimizer):
        raise ConversionError(
            f'optimizer must be a chainer.Optimizer, not {name_of_kind(optimizer)}. The order of '
            'the arguments is to_torch_optimizer(optimizer, module) and '
            'load_torch_optimizer(optimizer, torch_optimizer, module).')
    if getattr(optimizer, 'target', None) is None:
        raise ConversionError(
            f'{type(optimizer).__name__} has no model. Call optimizer.setup(model) first.')
    return optimizer


def _states(optimizer: Any) -> dict[int, dict[str, Any]]:
    """Return the state of each update rule, by the ``id`` of the parameter.

    Collective if each rank has a shard of the state: every rank calls it.
    """
    params = dict(actual(optimizer).target.namedparams())
    found = {id(param): param.update_rule.state or {}
             for param in params.values() if param.update_rule is not None}
    if hasattr(optimizer, 'gather_states'):
        found.update((id(params[path]), states)
                     for path, states in optimizer.gather_states().items())
    return found


def _parameters(optimizer: Any, module: torch.nn.Module
                ) -> tuple[list[tuple[str, Any, torch.nn.Parameter]],
                           list[tuple[str, torch.nn.Parameter]]]:
    """Return the parameters to update, with their module parameters, and the frozen parameters.

    The module can be converted from a part of the optimizer's target, such as the predictor of a
    Classifier.
    """
    if not isinstance(module, torch.nn.Module):
        raise ConversionError(f'module must be a torch.nn.Module, not {name_of_kind(module)}. Pass '
                              'the module that to_torch(model, ..., train=True) returned.')
    ours = state.parameters(optimizer.target)
    theirs = dict(module.named_parameters(remove_duplicate=False))
    prefix = next((prefix for prefix in _prefixes(ours) if all(
        name.removeprefix(prefix) in theirs for name in ours)), None)
    if prefix is None:
        missing = [name for name in ours if name not in theirs]
        raise ConversionError(
            f'The module has no parameter {missing[0]!r}; its first parameters are: '
            f'{", ".join([*theirs][:4]) or "none"}. Convert the model of the optimizer with '
            'to_torch(model, ..., train=True).')
    used, frozen, seen = [], [], set()
    for name, old in ours.items():
        new = theirs[name.removeprefix(prefix)]
        if new.shape != old.shape:
            raise ConversionError(f'{name} has shape {old.shape} in the model, but shape '
                                  f'{tuple(new.shape)} in the module. Pass the module that '
                                  "to_torch returned for the optimizer's model.")
        if id(old) in seen:
            warnings.warn(
                f'{name} is a parameter of several links. Chainer updates it once per link in '
                'every step, but PyTorch updates it only once.', stacklevel=3)
            continue
        seen.add(id(old))
        if not isinstance(old._data[0], np.ndarray):
            raise ConversionError(f'{name} is on a GPU. Call optimizer.target.to_cpu() first.')
        if old.update_rule is not None and old.update_rule.enabled:
            used.append((name, old, new))
        else:
            frozen.append((name, new))
    if not used:
        raise ConversionError('All parameters are frozen, so there is nothing to optimize. Call '
                              'optimizer.target.enable_update() first.')
    return used, frozen


def _prefixes(names: Any) -> Iterator[str]:
    """Yield possible common prefixes of the names: first none, then the names of outer links."""
    yield ''
    first = next(iter(names), '')
    parts = first.split('.')
    for n in range(1, len(parts)):
        prefix = '.'.join(parts[:n]) + '.'
        if all(name.startswith(prefix) for name in names):
            yield prefix


def kind_of(optimizer: Any, params: list[Any]) -> RuleInTorch:
    """Return the PyTorch equivalent of the update rules of parameters."""
    rules = {type(param.update_rule) for param in params}
    if len(rules) > 1:
        raise ConversionError('Parameters have update rules of different classes: '
                              f'{", ".join(sorted(rule.__name__ for rule in rules))}. Use the '
                              'same class for all parameters.')
    rule, = rules
    kind = KINDS.get(rule)
    if kind is None:
        known = ', '.join(sorted(each.__name__.removesuffix('Rule') for each in KINDS))
        raise ConversionError(f'{type(optimizer).__name__} has no equivalent in PyTorch. These '
                              f'optimizers have one: {known}.')
    if any(param.update_rule._use_fp32_update and param.dtype == np.float16 for param in params):
        raise ConversionError('Parameters in float16 with use_fp32_update() have no equivalent in '
                              'PyTorch. Convert a float32 model, and use torch.amp.')
    if kind is _ADAM and any(param.update_rule.hyperparam.weight_decay_rate for param in params):
        return _ADAMW
    return kind


def _named(name: str, call: Callable[[], T]) -> T:
    """Return the result of a call; add the name of the parameter to its errors."""
    try:
        return call()
    except ConversionError as error:
        raise ConversionError(f'{name}: {error}.') from None


def remaining_hooks(optimizer: Any, kind: RuleInTorch) -> tuple[list[Any], float]:
    """Return the hooks that are not options in PyTorch, and the option ``weight_decay``."""
    hooks, after = _hooks_of(actual(optimizer))
    if after:
        raise ConversionError(
            f'The hook {type(after[0]).__name__} runs after updates, which has no equivalent in '
            'PyTorch. Remove it, and do its work after each optimizer.step().')
    if hooks and type(hooks[-1]) is optimizer_hooks.WeightDecay and kind.has_weight_decay:
        return hooks[:-1], float(hooks[-1].rate)
    return hooks, 0.


def _hooks_of(owner: Any) -> tuple[list[Any], list[Any]]:
    """Return the hooks of an optimizer or rule: before an update, and after it."""
    hookable = owner._hookable
    before, after = ([*(hooks or {}).values()] for hooks in (
        hookable._pre_update_hooks, hookable._post_update_hooks))
    return before, after


def _options(rule: Any, kind: RuleInTorch, decay: float) -> Options:
    """Return the options of a parameter, including the hook WeightDecay of its update rule."""
    options = kind.options(rule.hyperparam)
    before, after = _hooks_of(rule)
    hooks = before + after
    for hook in hooks:
        if type(hook) is not optimizer_hooks.WeightDecay or len(hooks) > 1 or not (
                kind.has_weight_decay):
            raise ConversionError(
                f'The hook {type(hook).__name__} of its update rule has no equivalent in PyTorch. '
                'Remove the hook')
        decay += float(hook.rate)
    return {**options, 'weight_decay': decay} if decay else options


def _preparation(hook: Any) -> Preparation:
    """Return a function that has the effect of a hook on PyTorch parameters."""
    kind = type(hook)
    if kind is optimizer_hooks.WeightDecay:
        return lambda params: _for_each(params, lambda p: p.grad.add_(p, alpha=hook.rate))
    if kind is optimizer_hooks.Lasso:
        return lambda params: _for_each(
            params, lambda p: p.grad.add_(torch.sign(p), alpha=hook.rate))
    if kind is optimizer_hooks.GradientHardClipping:
        return lambda params: _for_each(
            params, lambda p: p.grad.clamp_(hook.lower_bound, hook.upper_bound))
    if kind is optimizer_hooks.GradientClipping:
        def clip(params: list[torch.nn.Parameter]) -> None:
            grads = [p.grad for p in params if p.grad is not None]
            norm = torch.stack([grad.norm() for grad in grads]).norm() if grads else 0.
            if not norm <= hook.threshold:
                for grad in grads:
                    grad.mul_(hook.threshold / norm)
        return clip
    raise ConversionError(
        f'The hook {kind.__name__} has no equivalent in PyTorch. Remove it from the optimizer, and '
        'change the gradients before step yourself: see torch.optim.Optimizer.'
        'register_step_pre_hook.')


def _for_each(params: list[torch.nn.Parameter], change: Callable[[Any], object]) -> None:
    for p in params:
        if p.grad is not None:
            change(p)


@torch.no_grad()
def _prepare(preparations: list[Preparation], params: list[torch.nn.Parameter]) -> None:
    for prepare in preparations:
        prepare(params)


def _set_state(optimizer: torch.optim.Optimizer, kind: RuleInTorch, name: str, old: Any,
               new: torch.nn.Parameter, arrays: dict[str, Any]) -> None:
    """Copy the state of a parameter's update rule to the PyTorch optimizer."""
    rule = old.update_rule
    if set(arrays) - set(kind.states):
        raise ConversionError(f'The state of {name} has {", ".join(sorted(arrays))}, but '
                              f'{kind.make.__name__} expects {", ".join(kind.states)}. Create a '
                              'new optimizer in PyTorch, without the state of this one.')
    found: dict[str, Any] = {'step': torch.tensor(float(rule.t))} if kind.counts else {}
    for ours, theirs in kind.states.items():
        if ours == 'vhat' and not rule.hyperparam.amsgrad:
            continue
        array = arrays.get(ours)
        if array is None:
            found[theirs] = torch.zeros_like(new)
            continue
        factor = _named(name, functools.partial(kind.factor, rule.hyperparam))
        found[theirs] = torch.from_numpy(np.array(array)).to(new.device, new.dtype) * factor
    if found:
        optimizer.state[new] = found
