"""Which update rules compute each element of a parameter independently of the others."""
from __future__ import annotations

from chainermn._types import UpdateRule

#: The methods in which a rule computes.
_METHODS = frozenset({'update', 'update_core', 'update_core_cpu', 'update_core_gpu',
                      'update_core_chainerx', 'init_state'})


def is_elementwise(rule: UpdateRule) -> bool:
    """Return whether an update rule may update a piece of a parameter.

    ``is_elementwise`` only holds for the class that declares it: a subclass that overrides one of
    the methods, such as LAMB as a subclass of Adam, may use norms of the whole parameter.  It must
    declare ``is_elementwise = True`` itself.
    """
    for namespace in (vars(rule), *map(vars, type(rule).__mro__)):
        if 'is_elementwise' in namespace:
            return bool(namespace['is_elementwise'])
        if not _METHODS.isdisjoint(namespace):
            return False
    return False
