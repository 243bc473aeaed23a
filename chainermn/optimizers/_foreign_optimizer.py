"""Optimizers of other frameworks: an object with setup, update and target is enough.

A wrapper that forwards to a Chainer optimizer has all attributes of Chainer's optimizers.
"""
from __future__ import annotations

from collections.abc import Mapping

from chainer.optimizer import GradientMethod

from chainermn._types import Optimizer

#: The attributes that some options of multi-node optimizers need.
_OF_CHAINER = 't', '_loss_scale', 'call_hooks'


def check_optimizer(optimizer: Optimizer, options: Mapping[str, bool]) -> None:
    """Raise TypeError if an object cannot be used as the actual optimizer.

    Args:
        optimizer: The object.
        options: The options of create_multi_node_optimizer that need a Chainer optimizer, by name,
            and whether each of them is used.
    """
    if isinstance(optimizer, type):
        raise TypeError('create_multi_node_optimizer needs an optimizer as its first argument, not '
                        f'the class {optimizer.__name__}. Create an instance: '
                        f'{optimizer.__name__}().')
    missing = [name for name in ('setup', 'update')
               if not callable(getattr(optimizer, name, None))]
    if getattr(optimizer, 'target', None) is not None and 'setup' in missing:
        missing.remove('setup')  # it already has its model
    if missing:
        raise TypeError(
            'create_multi_node_optimizer needs a chainer.Optimizer, or an object with '
            f'setup(model), update() and target; {type(optimizer).__name__} has no '
            f'{" or ".join(missing)} method.')
    missing = [name for name in _OF_CHAINER if not hasattr(optimizer, name)]
    if used := [name for name, is_used in options.items() if is_used and missing]:
        options_used = ' and '.join(used)
        raise TypeError(f'{options_used} require{"s" * (len(used) == 1)} a chainer.Optimizer; '
                        f'{type(optimizer).__name__} does not have {_listed(missing)}. '
                        f'Omit {options_used}.')


def _listed(names: list[str]) -> str:
    return ' and '.join(filter(None, [', '.join(names[:-1]), names[-1]]))


def has_plain_update(optimizer: Optimizer) -> bool:
    """Return whether ``update`` is GradientMethod's, possibly that of a wrapped optimizer."""
    return getattr(optimizer.update, '__func__', None) is GradientMethod.update
