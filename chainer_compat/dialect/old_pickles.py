"""Support for pickled models of Chainer 1 to 6.

Pickles contain the attributes of the version that wrote them, but not its version number.
``old_names`` finds the modules that they refer to.
"""

import functools
from types import ModuleType
from typing import Any

from chainer_compat.dialect.old_options import use_options
from chainer_compat.patching.registry import patch

#: By module and class: the attributes that later versions added, and their values.
ADDED: dict[str, dict[str, dict[str, Any]]] = {
    'chainer.links.connection.convolution_2d': {'Convolution2D': {
        'cudnn_fast': False, 'dilate': (1, 1), 'groups': 1, 'x_layout': None,
        'in_channels': lambda link: link.W.shape[1] * link.groups}},
    'chainer.links.connection.deconvolution_2d': {'Deconvolution2D': {
        'dilate': (1, 1), 'groups': 1}},
    'chainer.links.connection.linear': {'Linear': {
        'in_size': lambda link: None if link.W.array is None else link.W.shape[1]}},
    'chainer.links.normalization.batch_normalization': {'BatchNormalization': {
        '_highprec_dtype': lambda link: _promoted(link.avg_mean.dtype),
        '_initial_avg_mean': None, '_initial_avg_var': None, 'axis': None}},
    'chainer.links.rnn.n_step_rnn': {'NStepRNNBase': {
        'ws': lambda link: _weights(link, 'w'), 'bs': lambda link: _weights(link, 'b')}},
}


@patch(*ADDED)
def attributes_of_old_pickles(module: ModuleType) -> None:
    """All versions: pickled links of Chainer 1 to 5 are missing later attributes."""
    for name, attributes in ADDED[module.__name__].items():
        for attribute, value in attributes.items():
            holder = getattr(module, name)
            if callable(value):
                value = functools.cached_property(value)
                value.__set_name__(holder, attribute)
            setattr(holder, attribute, value)


@patch('chainer.device_resident')
def methods_of_old_pickles(module: Any) -> None:
    """All versions: objects pickled with Chainer 1 to 5 could not be moved between devices."""
    module.DeviceResident._overridden_to_methods = ()


@patch('chainer.link')
def old_pickled_links(link: Any) -> None:
    """All versions: links pickled with Chainer 1 to 5 could not be used."""

    def set_state(self: Any, state: Any) -> None:
        # Call the method of the next base class, which would be called without this patch.
        following = getattr(super(link.Link, self), '__setstate__', None)
        if following:
            return following(state)
        # With __slots__, the state is a tuple.
        state, slots = state if isinstance(state, tuple) else (state, None)
        self.__dict__.update(state)
        for name, value in (slots or {}).items():
            setattr(self, name, value)
        use_options(self)
        if '_Link__init_done' in state:
            return
        attributes = dict(state)
        link.Link.__init__(self)
        self.__dict__.update(attributes)
        for name in ('_cpu', '_device_id'):
            self.__dict__.pop(name, None)
        self._params, self._persistent = set(self._params), set(self._persistent)
        if isinstance(self, link.Chain):
            self._children = set(self._children)
        for name in self._params:
            _make_parameter(getattr(self, name))

    link.Link.__setstate__ = set_state


@patch('chainer.variable')
def old_pickled_parameters(module: Any) -> None:
    """All versions: parameters pickled with Chainer 2 to 5 could not be loaded."""
    recover = module._recover_parameter

    @functools.wraps(recover)
    def recover_any(*args: Any) -> Any:
        if len(args) == 5:  # without device
            device = module.backend.get_device_from_array(args[0])
            args = (*args, device or module.backend.CpuDevice())
        return recover(*args)

    module._recover_parameter = recover_any


def _make_parameter(variable: Any) -> None:
    """Turn a variable into a parameter, wherever it is referenced."""
    import chainer

    if not isinstance(variable, chainer.Parameter):
        like = chainer.Parameter(variable.array)
        variable.__class__ = chainer.Parameter
        for name in like.__dict__.keys() - variable.__dict__.keys():
            setattr(variable, name, getattr(like, name))


def _promoted(dtype: Any) -> Any:
    import chainer

    return chainer.get_dtype(dtype, map_mixed16='float32')


def _weights(link: Any, letter: str) -> list[list[Any]]:
    return [[getattr(layer, f'{letter}{i}') for i in range(link.n_weights)] for layer in link]
