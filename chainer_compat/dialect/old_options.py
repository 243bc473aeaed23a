"""Options of ``chainer.config`` that apply to one function with its gradients, or to one link.

In Chainer 1, they were arguments. Links have no overhead unless the options are used: ``forward``
of a class is only hooked when one of its links gets an option.
"""

import contextlib
import functools
from typing import Any

Options = dict[str, Any]


def call_with(options: Options, function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call ``function`` with ``options``, which also apply when its gradient is computed."""
    with _using(options):
        result = function(*args, **kwargs)
    cudnn = tuple((key, x) for key, x in options.items() if 'cudnn' in key)
    node = getattr(result, 'creator_node', None)
    if cudnn and node is not None:
        node.__class__ = _with_options(node.__class__, cudnn)
    return result


def set_options(link: Any, options: Options) -> None:
    """Apply ``options`` to all calls of ``link``, which can also be a function node."""
    options = {key: x for key, x in options.items() if x != 'always'}  # 'always' is the default
    if options and hasattr(link, 'apply'):
        link.__class__ = _with_options(link.__class__, tuple(options.items()))
    elif options:
        link._old_options = {**vars(link).get('_old_options', {}), **options}
        use_options(link)


def use_options(link: Any) -> None:
    """Apply the options of ``link``, which another process may have set, to its calls."""
    if '_old_options' in vars(link):
        _hook(next(cls for cls in type(link).__mro__ if 'forward' in vars(cls)))


def _using(options: Options) -> contextlib.ExitStack:
    import chainer

    stack = contextlib.ExitStack()
    for key, x in options.items():
        stack.enter_context(chainer.using_config(key, x))
    return stack


@functools.cache
def _hook(cls: Any) -> None:
    function = cls.forward

    @functools.wraps(function)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        options = vars(self).get('_old_options')
        if options is None:
            return function(self, *args, **kwargs)
        return call_with(options, function, self, *args, **kwargs)

    cls.forward = forward


@functools.cache
def _with_options(cls: Any, options: tuple[tuple[str, Any], ...]) -> Any:
    """Return a subclass of the function class ``cls`` whose calls and gradients use ``options``."""

    def using(name: str) -> Any:
        def method(self: Any, *args: Any) -> Any:
            with _using(dict(options)):
                return getattr(cls, name)(self, *args)

        return method

    return type(cls.__name__, (cls,), {
        'apply': using('apply'), 'backward': using('backward'), '__module__': cls.__module__})
