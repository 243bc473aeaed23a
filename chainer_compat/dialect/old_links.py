"""Links of Chainer 1: removed methods, and the GRU without state."""

import functools
from types import ModuleType
from typing import Any

from chainer_compat.dialect.old_arguments import scaled, warn
from chainer_compat.dialect.old_options import set_options
from chainer_compat.patching.registry import patch
from chainer_compat.patching.signatures import wraps

#: By module: a link, and the constructor arguments of Chainer 1 that were stored as attributes.
_CUDNN = {f'chainer.links.{path}': row for path, row in {
    'connection.convolution_2d': 'Convolution2D use_cudnn deterministic',
    'connection.convolution_nd': 'ConvolutionND use_cudnn',
    'connection.deconvolution_2d': 'Deconvolution2D use_cudnn deterministic',
    'connection.deconvolution_nd': 'DeconvolutionND use_cudnn',
    'connection.dilated_convolution_2d': 'DilatedConvolution2D use_cudnn',
    'normalization.batch_normalization': 'BatchNormalization use_cudnn',
    'rnn.n_step_rnn': 'NStepRNNBase use_cudnn'}.items()}


@patch('chainer.links.rnn.gru')
def stateless_gru(module: ModuleType) -> None:
    """All versions: ``L.GRU(n_units)`` and ``gru(h, x)``, as in Chainer 1, work again.

    Chainer 7.8.1 raised an error that mentions StatelessGRU.
    """
    gru: Any = module.GRU
    init, forward = gru.__init__, gru.forward

    @wraps(init)
    def init_gru(self: Any, *sizes: Any, n_units: int | None = None,
                 n_inputs: int | None = None, **kwargs: Any) -> None:
        if n_units is None and len(sizes) == 1 and 'out_size' not in kwargs:
            n_units, sizes = sizes[0], ()
        if n_units is not None:
            warn('GRU(n_units) belongs to the Chainer 1 API: use StatelessGRU(in_size, out_size).')
            sizes = (n_units if n_inputs is None else n_inputs, n_units)
        init(self, *sizes, **kwargs)

    @wraps(forward)
    def call(self: Any, *args: Any) -> Any:
        if len(args) != 2:
            return forward(self, *args)
        warn('GRU without state belongs to the Chainer 1 API: use StatelessGRU.')
        return module.StatelessGRU.forward(self, *args)

    gru.__init__, gru.forward = init_gru, call


@patch('chainer.links.connection.inceptionbn', 'chainer.links.rnn.zoneoutlstm')
def train_attributes(module: ModuleType) -> None:
    """All versions: the attribute ``train`` of InceptionBN and StatefulZoneoutLSTM works again.

    Chainer 7.8.1 ignored it.
    """
    link: Any = getattr(module, 'InceptionBN', None) or module.StatefulZoneoutLSTM

    def set_train(self: Any, value: bool) -> None:
        warn("train is an attribute of Chainer 1: use chainer.using_config('train', ...).")
        set_options(self, {'train': bool(value)})

    link.train = property(
        lambda self: vars(self).get('_old_options', {}).get('train', True), set_train)


@patch(*_CUDNN)
def cudnn_attributes(module: ModuleType) -> None:
    """All versions: the attributes ``use_cudnn`` and ``deterministic`` of links work again.

    Subclasses of L.Convolution2D written for Chainer 1 pass them to F.convolution_2d.
    """
    cls, *names = _CUDNN[module.__name__].split()
    for name in names:
        setattr(getattr(module, cls), name, _cudnn_attribute(name))


def _cudnn_attribute(name: str) -> property:
    key, default = {'use_cudnn': ('use_cudnn', 'always'),
                    'deterministic': ('cudnn_deterministic', False)}[name]

    def get(self: Any) -> bool:
        warn(f'{name} is an attribute of Chainer 1: remove it.')
        return vars(self).get('_old_options', {}).get(key, default) in ('always', True)

    def set_value(self: Any, value: bool) -> None:
        warn(f'{name} is an attribute of Chainer 1: use chainer.using_config({key!r}, ...).')
        if name == 'use_cudnn':
            vars(self).get('_old_options', {}).pop(key, None)  # set_options ignores 'always'
            set_options(self, {key: 'always' if value else 'never'})
        else:
            set_options(self, {key: bool(value)})

    return property(get, set_value)


@patch('chainer.initializers')
def scaled_initializers(module: ModuleType) -> None:
    """All versions: ``initializers._get_initializer(initialW, scale)`` works again.

    Custom links written for Chainer 1 call it like this, as Chainer's own links did. Chainer 7.8.1
    does not have the argument ``scale``.
    """
    owner: Any = module
    get = owner._get_initializer

    @functools.wraps(get)
    def get_scaled(initializer: Any, scale: float | None = None) -> Any:
        if scale is None:
            return get(initializer)
        warn('scale of _get_initializer belongs to the Chainer 1 API: pass a scaled initializer.')
        return get(scaled(initializer, scale))

    owner._get_initializer = get_scaled


@patch('chainer.link')
def uninitialized_params(module: ModuleType) -> None:
    """All versions: ``add_uninitialized_param`` and ``has_uninitialized_params`` work again.

    Chainer 7.8.1 does not have these methods of Link.
    """
    link: Any = module.Link

    def add_uninitialized_param(self: Any, name: str) -> None:
        warn('add_uninitialized_param is a method of Chainer 1: use chainer.Parameter.')
        _hook_add_param(link)
        self.add_param(name)

    def has_uninitialized_params(self: Any) -> bool:
        return any(not self.__dict__[name].is_initialized for name in self._params)

    link.add_uninitialized_param = add_uninitialized_param
    link.has_uninitialized_params = property(has_uninitialized_params)


@functools.cache
def _hook_add_param(link: Any) -> None:
    """Make ``add_param`` initialize a parameter that already exists."""
    from chainer import initializers, variable

    add = link.add_param

    @functools.wraps(add)
    def add_param(self: Any, name: str, shape: Any = None, dtype: Any = 'float32',
                  initializer: Any = None) -> None:
        param = self.__dict__.get(name)
        if not isinstance(param, variable.Parameter) or param.is_initialized:
            return add(self, name, shape, dtype, initializer)
        if initializer is None:
            initializer = initializers.NaN(dtype)
        param.initializer = initializers._get_initializer(initializer)
        param.initialize(shape)

    link.add_param = add_param
