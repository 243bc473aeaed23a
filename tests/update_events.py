"""Changes of a model and its optimizer between two updates: ``event(optimizer, p, q)``.

``p`` and ``q`` are parameters of the model; if possible, they have the same size.
"""

import chainer
import numpy as np
from chainer import optimizer_hooks, optimizers


class Hook:
    name, timing = 'hook', 'pre'

    def __call__(self, rule, param):
        param.grad *= 2


class MyParameter(chainer.Parameter):
    def update(self):
        self.array -= 1


def rate(optimizer):
    return 'alpha' if hasattr(optimizer.hyperparam, 'alpha') else 'lr'


def set_rate(value, of_rule=False):
    def event(optimizer, p, q):
        setattr(p.update_rule.hyperparam if of_rule else optimizer.hyperparam, rate(optimizer),
                value)
    return event


def set_number(name, value):
    def event(optimizer, p, q):
        if name in optimizer.hyperparam.get_dict():
            setattr(optimizer.hyperparam, name, value)
    return event


def assign(path, value):
    """Return an event that assigns to an attribute of ``p``, given by its path."""
    def event(optimizer, p, q):
        target = p
        *names, last = path.split('.')
        for name in names:
            target = getattr(target, name)
        setattr(target, last, value(target))
    return event


def other_rule(optimizer, p, q):
    class Mine(type(p.update_rule)):
        def update_core_cpu(self, param):
            param.array -= param.grad

    p.update_rule = Mine()


def change_class(optimizer, p, q):
    class Mine(type(p.update_rule)):
        def update_core_cpu(self, param):
            param.array -= param.grad

    p.update_rule.__class__ = Mine


def derived_rule(optimizer, p, q):
    """Replace the rules of ``p`` and ``q`` by rules of one class with different attributes."""
    rule = type(p.update_rule)

    class Derived(rule):
        factor = 1.

        @property
        def alpha_t(self):
            return rule.alpha_t.fget(self) * self.factor

    for factor, param in enumerate([p, q], 1):
        param.update_rule = Derived(optimizer.hyperparam)
        param.update_rule.factor = factor


def add(name, make):
    def event(optimizer, p, q):
        with optimizer.target.init_scope():
            setattr(optimizer.target, name, make(p))
    return event


def add_parameter(optimizer, p, q):
    add('added', lambda _: chainer.Parameter(np.full(2, 3, 'f')))(optimizer, p, q)
    optimizer.target.added.update_rule = optimizer.create_update_rule()


def replace_parameter(optimizer, p, q):
    name = next(name for name, param in optimizer.target.namedparams() if param is p)
    add(name[1:], lambda p: MyParameter(p.array))(optimizer, p, q)
    getattr(optimizer.target, name[1:]).update_rule = p.update_rule


def tied(optimizer, p, q):
    if p.size == q.size and p is not q:
        q.array = p.array.reshape(q.shape)


def tied_views(optimizer, p, q):
    """Make the arrays of ``p`` and ``q`` views of one buffer."""
    buffer = bytearray(p.array.nbytes + q.array.nbytes)
    for i, param in enumerate([p, q]):
        data = np.frombuffer(buffer, param.dtype, param.size, param.array.itemsize * i)
        data[...] = param.array.ravel()
        param.array = data.reshape(param.shape)


def exchanged(optimizer, p, q):
    if p.size == q.size:
        p.array, q.array = q.array.reshape(p.shape), p.array.reshape(q.shape)


def gradient(value):
    """Return an event that lets the gradient of ``q`` share the memory of ``value(p)``."""
    def event(optimizer, p, q):
        array = value(p)
        if array is not None and array.size == q.size:
            q._grad = array.reshape(q.shape)
    return event


def first_state(param):
    return next((each for each in (param.update_rule.state or {}).values()
                 if isinstance(each, np.ndarray)), None)


def states(change):
    def event(optimizer, p, q):
        if first_state(p) is not None:
            change(p.update_rule, next(iter(p.update_rule.state)))
    return event


def reorder(rule, name):
    rule.state[name] = rule.state.pop(name)


def snapshot(optimizer, p, q):
    saved = {}
    chainer.serializers.DictionarySerializer(saved).save(optimizer)
    saved = {key: value + 1 if value is not None and key.endswith('/v') else value
             for key, value in saved.items()}
    chainer.serializers.NpzDeserializer(saved).load(optimizer)


def method(name):
    """Return an event that replaces a method of the optimizer by one that counts its calls."""
    def event(optimizer, p, q):
        original = getattr(optimizer, name)

        def counting(*args):
            optimizer.counted = getattr(optimizer, 'counted', 0) + 1
            return original(*args)

        setattr(optimizer, name, counting)
    return event


def shared_rule(optimizer, p, q):
    q.update_rule = p.update_rule


def reader(optimizer):
    for param in optimizer.target.params():
        if param.grad is not None:
            param.grad *= 2


EVENTS = {
    'nothing': lambda optimizer, p, q: None,
    'rate': set_rate(.05), 'rate of a rule': set_rate(.3, True),
    'array as rate': set_rate(np.array([.3], 'f'), True),
    'float32 as rate': set_rate(np.float32(.05)),
    **{f'other {name}': set_number(name, value) for name, value in {
        'momentum': 0., 'eta': 1.5, 'eps': 1e-2, 'beta2': .9, 'weight_decay_rate': .3,
        'amsgrad': False}.items()},
    'other hyperparameters': lambda optimizer, p, q: setattr(
        p.update_rule, 'hyperparam', type(optimizer)().create_update_rule().hyperparam),
    'disabled': assign('update_rule.enabled', lambda rule: not rule.enabled),
    'hook': lambda optimizer, p, q: optimizer.add_hook(reader, 'reader', timing='pre'),
    'hooks of Chainer': lambda optimizer, p, q: (
        optimizer.add_hook(optimizer_hooks.WeightDecay(.01), 'decay'),
        optimizer.add_hook(optimizer_hooks.GradientClipping(5), 'clipping')),
    'hook of a rule': lambda optimizer, p, q: p.update_rule.add_hook(Hook()),
    'hook after': lambda optimizer, p, q: p.update_rule.add_hook(
        lambda rule, param: param.array.fill(2), 'after', timing='post'),
    'hook that clears': lambda optimizer, p, q: p.update_rule.add_hook(
        lambda rule, param: param.cleargrad(), 'clear', timing='post'),
    'other hooks': assign('update_rule._hookable._pre_update_hooks', lambda _: {'hook': Hook()}),
    'scale': lambda optimizer, p, q: optimizer.loss_scaling(scale=10.),
    'dynamic scale': lambda optimizer, p, q: optimizer.loss_scaling(interval=2),
    'scaled parameter': assign('_loss_scale', lambda param: 4.),
    'other rule': other_rule, 'class of a rule': change_class, 'derived rule': derived_rule,
    'SGD': assign('update_rule', lambda param: optimizers.SGD(.5).create_update_rule()),
    'no rule': assign('update_rule', lambda param: None), 'shared rule': shared_rule,
    'method of a rule': assign('update_rule.update_core',
                               lambda rule: lambda param: param.array.fill(3)),
    'method of a parameter': assign('update', lambda param: lambda: param.array.fill(3)),
    'attribute of a rule': assign('update_rule.mine', lambda rule: 1),
    'attribute of a parameter': assign('mine', lambda param: 1),
    'step': assign('update_rule.t', lambda rule: 7),
    'array': assign('array', lambda param: np.asarray(param.array + 1)),
    'array of another dtype': assign('array', lambda param: param.array.astype('d')),
    'strides': assign('array', lambda param: np.asarray(
        np.repeat(param.array, 2, -1)[..., ::2] if param.ndim else param.array.copy())),
    'Fortran': assign('array', lambda param: np.asfortranarray(param.array)),
    'tied': tied, 'tied views': tied_views, 'exchanged': exchanged,
    'two paths': add('zz', lambda p: p), 'two paths in a row': add('p5b', lambda p: p),
    'added': add_parameter, 'replaced parameter': replace_parameter,
    'added link': add('late', lambda p: chainer.links.Linear(None, 2)),
    'class of a parameter': lambda optimizer, p, q: setattr(p, '__class__', MyParameter),
    'no gradient': assign('grad', lambda param: None),
    'no gradients': lambda optimizer, p, q: optimizer.target.cleargrads(),
    'gradient of another dtype': assign('_grad', lambda param: param.grad.astype('d')),
    'gradient of another shape': assign('_grad', lambda param: np.full(1, 2, 'f')),
    'strided gradient': assign('grad', lambda param: np.asarray(
        np.repeat(param.grad, 2, -1)[..., ::2] if param.ndim else param.grad.copy())),
    'read-only gradient': lambda optimizer, p, q: p.grad.setflags(write=False),
    'variable replaced': lambda optimizer, p, q: setattr(p.grad_var, 'array', p.grad * 2),
    'gradient is an array': gradient(lambda p: p.array),
    'gradient is a state': gradient(first_state),
    'equal gradients': gradient(lambda p: p.grad),
    'state': states(lambda rule, name: rule.state.update({name: rule.state[name] + 1})),
    'new state': states(lambda rule, name: setattr(
        rule, '_state', {**rule.state, name: rule.state[name] + 1})),
    'no state': assign('update_rule._state', lambda rule: None),
    'renamed state': states(lambda rule, name: rule.state.update(other=rule.state[name])),
    'reordered states': states(reorder), 'snapshot': snapshot,
    'removed': lambda optimizer, p, q: delattr(optimizer.target, next(
        name for name, param in optimizer.target.namedparams() if param is p)[1:]),
    'optimizer in user code': lambda optimizer, p, q: setattr(optimizer, '__class__', type(
        'Own', (type(optimizer),), {'reallocate_cleared_grads': lambda self: None})),
    'set up again': lambda optimizer, p, q: optimizer.setup(optimizer.target),
    **{name: method(name) for name in (
        'reallocate_cleared_grads', 'check_nan_in_grads', 'call_hooks', 'is_safe_to_update',
        'update_loss_scale')},
}
