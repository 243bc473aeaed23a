"""Attributes of Chainer 1 to 6 that Chainer 7.8.1 renamed, removed or made read-only.

The read-only attributes became properties without a setter, so classes in existing programs that
set them raised AttributeError.
"""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from chainer_compat.dialect.old_arguments import warn
from chainer_compat.patching.registry import patch

Setter = Callable[[Any, Any], None]


def _settable(cls: Any, name: str, store: Setter, since: int, now: str) -> None:
    """Add a setter to a read-only property of Chainer.

    Args:
        cls: The class.
        name: The property.
        store: Function that stores a value where Chainer's getter, or the getter that
            ``_prefer_set_value`` defines, finds it.
        since: The version that made the property read-only.
        now: The advice in the warning.
    """
    def set_value(self: Any, value: Any) -> None:
        warn(f'{cls.__name__}.{name} has been read-only since Chainer {since}: {now}.')
        store(self, value)

    setattr(cls, name, getattr(cls, name).setter(set_value))


def _prefer_set_value(cls: Any, name: str) -> None:
    """Make a property return the value that was set, if there is one."""
    compute = getattr(cls, name).fget

    @functools.wraps(compute)
    def get(self: Any) -> Any:
        attributes = vars(self)
        return attributes[name] if name in attributes else compute(self)

    setattr(cls, name, property(get, doc=compute.__doc__))


@patch('chainer.training.updaters.standard_updater')
def device_of_updater(module: ModuleType) -> None:
    """All versions: subclasses of StandardUpdater can set ``self.device``, as in Chainer 1 to 6.

    Batches are sent to this device, and reading the attribute returns the value that was set (used
    by graph-nvp).
    """
    updater: Any = module.StandardUpdater
    _prefer_set_value(updater, 'device')

    def store(self: Any, value: Any) -> None:
        import chainer

        attributes = vars(self)
        attributes['device'] = value
        device = None if value is None else chainer.get_device(value)
        if attributes.get('_input_device') is attributes.get('_device'):  # not set separately
            self._input_device = device
        self._device = device

    _settable(updater, 'device', store, 7, 'pass device to its constructor')


@patch('chainer.iterators.serial_iterator', 'chainer.iterators.multithread_iterator',
       'chainer.iterators.multiprocess_iterator')
def position_of_iterator(module: ModuleType) -> None:
    """All versions: attributes of iterators, such as ``epoch``, can be set.

    The other attributes are ``current_position``, ``is_new_epoch`` and ``_order``. Subclasses
    written for Chainer 1 to 5 that define ``__next__`` use all four.
    """
    names = vars(module)
    iterator: Any = (names.get('SerialIterator') or names.get('MultithreadIterator')
                     or names['MultiprocessIterator'])

    iterator._order = property(lambda self: self._state.order)
    for name in ('current_position', 'epoch', 'is_new_epoch', '_order'):
        _settable(iterator, name, functools.partial(_set_state, name.lstrip('_')), 6,
                  'override serialize, or use order_sampler')


def _set_state(name: str, iterator: Any, value: Any) -> None:
    from chainer.iterators import _statemachine

    state = vars(iterator).get('_state') or _statemachine.IteratorState(0, 0, False, None)
    iterator._state = state._replace(**{name: value})


@patch('chainer.links.model.vision.googlenet', 'chainer.links.model.vision.resnet',
       'chainer.links.model.vision.vgg')
def functions_of_vision_models(module: ModuleType) -> None:
    """All versions: subclasses of GoogLeNet, VGG and ResNet can set ``functions`` again."""
    for cls in [*vars(module).values()]:
        if isinstance(cls, type) and isinstance(vars(cls).get('functions'), property):
            _prefer_set_value(cls, 'functions')
            _settable(cls, 'functions', _store_functions, 2, 'override the property')


def _store_functions(model: Any, functions: Any) -> None:
    vars(model)['functions'] = functions


@patch('chainer.training.triggers.early_stopping_trigger')
def patients_of_trigger(module: ModuleType) -> None:
    """All versions: EarlyStoppingTrigger has the attribute ``patients``, as in Chainer 4 to 6."""
    module.EarlyStoppingTrigger.patients = _renamed('patients', 'patience')


def _renamed(old: str, now: str) -> property:
    def get(self: Any) -> Any:
        warn(f'{old} is an attribute of an old version of Chainer: use {now}.')
        return getattr(self, now)

    def set_value(self: Any, value: Any) -> None:
        warn(f'{old} is an attribute of an old version of Chainer: use {now}.')
        setattr(self, now, value)

    return property(get, set_value)


@patch('chainer.variable')
def variables_in_graph(module: ModuleType) -> None:
    """All versions: code that walks the graph finds ``volatile`` and other attributes of Variable.

    In Chainer 1, ``function.inputs`` contained variables. Now it contains nodes, which have fewer
    attributes.
    """
    node: Any = module.VariableNode
    for name in ('backward', 'cleargrad', 'ndim', 'size', 'unchain_backward', 'volatile',
                 'zerograd'):
        setattr(node, name, property(functools.partial(_of_variable, name)))


def _of_variable(name: str, node: Any) -> Any:
    warn(f'{name} is an attribute of variables: use node.get_variable().{name}.')
    return getattr(node.get_variable(), name)


class FunctionName(str):
    """The name of a function, in a place where Chainer 1 to 3 stored the function itself."""

    @property
    def label(self) -> str:
        """The name."""
        warn('Since Chainer 4, function hooks store the names of functions, not the functions: '
             'remove .label.')
        return str(self)


@patch('chainer.function_hooks.timer', 'chainer.function_hooks.cupy_memory_profile')
def functions_of_hooks(module: ModuleType) -> None:
    """All versions: ``function.label`` works for ``function, ... in hook.call_history``, as before.

    Chainer 4 replaced the functions with their names.
    """
    hook: Any = vars(module).get('TimerHook') or vars(module)['CupyMemoryProfileHook']
    postprocess = hook._postprocess

    def with_label(self: Any, function: Any) -> None:
        postprocess(self, function)
        name, *values = self.call_history[-1]
        self.call_history[-1] = FunctionName(name), *values

    hook._postprocess = with_label


@patch('chainer.training.extension')
def no_invoke_before_training(module: ModuleType) -> None:
    """All versions: ``extension.invoke_before_training`` is False unless user code sets it.

    Chainer 7.8.1 raised an error that mentions Extension.initialize.
    """
    module.Extension.invoke_before_training = False
