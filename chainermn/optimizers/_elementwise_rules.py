"""Elementwise update rules: they compute each element of a parameter independently."""
from __future__ import annotations

from chainermn._types import UpdateRule

#: The methods of a rule that compute an update.
_METHODS = frozenset({'update', 'update_core', 'update_core_cpu', 'update_core_gpu',
                      'update_core_chainerx', 'init_state'})


def is_elementwise(rule: UpdateRule) -> bool:
    """Return whether an update rule may update a piece of a parameter.

    The attribute ``is_elementwise`` applies only to the class that declares it. A subclass that
    overrides a method that computes updates, such as LAMB as a subclass of Adam, may use norms of
    the whole parameter. If it does not, it must declare ``is_elementwise = True`` itself.

    Args:
        rule: A Chainer update rule, such as ``parameter.update_rule``.

    Returns:
        Whether each element of the parameter is computed independently of the others, so that
        ``shard_states`` and key-value stores may split the parameter.

    Example:
        >>> class Rule(chainer.optimizers.sgd.SGDRule):
        ...     def update_core_cpu(self, param):
        ...         param.array -= param.grad / np.linalg.norm(param.grad)
        >>> chainermn.optimizers.is_elementwise(chainer.optimizers.sgd.SGDRule())
        True
        >>> chainermn.optimizers.is_elementwise(Rule())
        False
    """
    for namespace in (vars(rule), *map(vars, type(rule).__mro__)):
        if 'is_elementwise' in namespace:
            return bool(namespace['is_elementwise'])
        if not _METHODS.isdisjoint(namespace):
            return False
    return False
