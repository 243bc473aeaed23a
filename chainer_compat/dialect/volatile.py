"""``volatile`` of Chainer 1: functions of a volatile Variable build no graph.

There is no overhead unless it is used: functions are only hooked when a Variable becomes volatile.
"""

import functools
import sys
from types import ModuleType
from typing import Any

from chainer_compat.dialect.flag import AUTO, OFF, ON, Flag, aggregate_flags
from chainer_compat.dialect.old_arguments import warn
from chainer_compat.patching.registry import edit, patch

_LIBRARIES = ('chainer', 'chainer_compat', 'chainermn')


@patch('chainer.variable')
def volatile(module: ModuleType) -> None:
    """All versions: ``volatile`` of Chainer 1 works again as an argument and attribute of Variable.

    Chainer 7.8.1 raised an error for the argument, and ignored the attribute.
    """
    variable: Any = module.Variable
    check, arrays = variable.__init__, (module.numpy.ndarray, module.cuda.ndarray)

    @functools.wraps(check)
    def init(self: Any, data: Any = None, volatile: Any = None, name: Any = None,
             grad: Any = None, *, requires_grad: bool = True, _grad_valid: bool = True,
             layout: Any = None, **unknown: Any) -> None:
        if volatile is not None:
            _set(self, Flag(volatile))
        if unknown or type(data) not in arrays or requires_grad not in (True, False):
            check(self, data, name=name, grad=grad, requires_grad=requires_grad,
                  _grad_valid=_grad_valid, layout=layout, **unknown)
        else:
            # Like the original, but without its slow parsing of keywords.
            self._init_impl(data, None, name, grad, _grad_valid, requires_grad, None, None, layout)

    variable.__init__ = init
    variable.volatile = property(_get, _set)


@edit('chainer.links.connection.parameter')
def parameter_link() -> dict[str, str]:
    """All versions: ``L.Parameter`` warned about ``volatile``, which the link itself sets."""
    return {'W.volatile = volatile': "if volatile != 'off': W.volatile = volatile"}


def _get(variable: Any) -> Any:
    import chainer

    if 'volatile' in variable.__dict__:
        return variable.__dict__['volatile']
    default = AUTO if isinstance(variable, chainer.Parameter) else OFF
    return variable.__dict__.get('_volatile', default)


def _set(variable: Any, value: Any) -> None:
    try:
        variable._volatile = Flag(value)
    except ValueError:  # an unrelated attribute of user code
        variable.__dict__['volatile'] = value
        return
    variable.__dict__.pop('volatile', None)
    warn('volatile belongs to the Chainer 1 API: use chainer.no_backprop_mode() or remove it.')
    if variable._volatile is not OFF:
        _hook_functions()


@functools.cache
def _hook_functions() -> None:
    """Make functions obey ``volatile``, and record which Variables user code creates."""
    import chainer

    node: Any = chainer.FunctionNode
    apply, init, reduce = node.apply, chainer.Variable.__init__, chainer.Variable.__reduce__

    @functools.wraps(apply)
    def volatile_apply(self: Any, inputs: Any) -> Any:
        flag = aggregate_flags(getattr(x, '__dict__', {}).get('_volatile', AUTO) for x in inputs)
        if flag is ON:
            with chainer.no_backprop_mode():
                outputs = apply(self, inputs)
        else:
            outputs = apply(self, inputs)
        for y in outputs:
            y._volatile = flag
        return outputs

    @functools.wraps(init)
    def init_with_flag(self: Any, *args: Any, **kwargs: Any) -> None:
        # In Chainer 1, Variables were OFF by default. Here, Variables that Chainer creates have no
        # flag, so that a function takes the flag of its other inputs.
        if sys._getframe(1).f_globals.get('__name__', '').split('.')[0] not in _LIBRARIES:
            self._volatile = OFF
        init(self, *args, **kwargs)

    @functools.wraps(reduce)
    def reduce_with_flag(self: Any) -> Any:
        flag = self.__dict__.get('_volatile')
        return reduce(self) if flag is None else (_recover, (flag, *reduce(self)))

    node.apply = volatile_apply
    chainer.Variable.__init__, chainer.Variable.__reduce__ = (
        init_with_flag, reduce_with_flag)


def _recover(flag: Flag, create: Any, args: tuple[Any, ...]) -> Any:
    """Return a Variable from a pickle, with its flag."""
    variable = create(*args)
    variable._volatile = flag
    _hook_functions()
    return variable
