"""create_kvstore_optimizer: an optimizer that trains through a store, like Gluon's Trainer."""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import TypeAlias

import chainer

from chainermn.communicators.errors import raise_on_all_ranks
from chainermn.kvstore import _arguments
from chainermn.kvstore._kvstore import KVStore
from chainermn.kvstore._optimizer_updater import OptimizerUpdater
from chainermn.kvstore._server import assign
from chainermn.optimizers.proxy import (
    Named,
    OptimizerProxy,
    OptimizerSettings,
    compute_gradients,
    fill_missing_grad,
    init_state,
    keep_scale,
    sharing_memory,
)

_Parameters: TypeAlias = dict[str, chainer.Parameter]


def create_kvstore_optimizer(actual_optimizer: chainer.optimizer.GradientMethod, kvstore: KVStore,
                             update_on_kvstore: bool | None = None, *,
                             compare_settings: bool = True) -> _KVStoreOptimizer:
    """Create an optimizer that trains through a store. Collective, except for local stores.

    Returns a proxy of ``actual_optimizer``, like :func:`chainermn.create_multi_node_optimizer`.
    ``update(lossfun, *args)`` computes this rank's gradients and pushes them for all parameters.
    The key is the path of the parameter, and the priority of the i-th parameter is ``-i``. Then it

    - pulls the mean of the gradients over all ranks, with which the actual optimizer updates the
      parameters; or
    - with ``update_on_kvstore``, pulls the parameters, which the store has updated.

    In ``dist_sync``, both give the parameters that the actual optimizer computes in one process
    from the mean gradients. A parameter with k paths is updated k times, as in Chainer.

    Without ``update_on_kvstore``, the actual optimizer works as usual, with all hooks,
    per-parameter hyperparameters, loss scaling, and its states in snapshots. With
    ``update_on_kvstore``, hooks must be called for each parameter separately. Each rank keeps the
    states of the parameters that it serves, and
    :meth:`chainermn.kvstore.KVStore.save_optimizer_states` saves them. If your script changes
    parameters, for example by clipping weights or by loading a model after the first update, the
    next update overwrites the changes.

    In ``dist_sync``, gradients are averaged: the store multiplies their sum by
    ``1 / kvstore.num_workers`` (in float32 for float16). In ``dist_async``, each push of a rank is
    a separate update, so there are ``num_workers`` times as many updates.

    A store can serve only one such optimizer, because its keys are the paths of the parameters (the
    first path of each). The values of the keys are the parameters with ``update_on_kvstore``,
    otherwise the last mean gradients.

    The first ``update`` does not change ``t``: it initializes the keys and copies the parameters of
    rank 0 to all ranks. An ``update`` that finds newly initialized parameters does the same for
    these parameters. Such updates are collective. In ``dist_async``, all other updates are not
    collective, and the number of updates may differ between ranks.

    Args:
        actual_optimizer: Any ``chainer.optimizer.GradientMethod``. It may be set up later.
        kvstore: A store without an updater or optimizer.
        update_on_kvstore: Whether the store updates the parameters instead of the actual optimizer.
            By default, true in ``dist_async`` and false in all other types.
        compare_settings: If true, ranks compare hyperparameters (such as ``lr``), hooks, disabled
            parameters and ``t`` in each update and raise an error if they differ, as in
            :func:`chainermn.create_multi_node_optimizer`. Pass False if the differences are
            intended. ``dist_async`` does not compare them.

    Returns:
        The optimizer of this rank.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If ``update_on_kvstore`` is false in ``dist_async``, or true with an optimizer
            whose hooks or loss scaling need all parameters together; or if the store already has
            an updater.

    Example:
        >>> store = chainermn.kvstore.create('dist_sync', comm)
        >>> sgd = chainer.optimizers.SGD(lr=0.1).setup(model)
        >>> optimizer = chainermn.kvstore.create_kvstore_optimizer(sgd, store)
        >>> optimizer.update(model, *batch)
    """
    if not isinstance(kvstore, KVStore):
        raise TypeError('create_kvstore_optimizer needs a KVStore as its second argument, not '
                        f'{type(kvstore).__name__}. Create one with chainermn.kvstore.create().')
    is_async = kvstore.type == 'dist_async'
    with raise_on_all_ranks(kvstore._backend, 'create_kvstore_optimizer'):
        _arguments.check_optimizer(
            actual_optimizer, 'create_kvstore_optimizer needs a chainer.optimizer.GradientMethod '
            'as its first argument')
        if is_async and update_on_kvstore is not None and not update_on_kvstore:
            raise ValueError('dist_async has no mean gradient to update with. Pass '
                             'update_on_kvstore=True, or use dist_sync.')
        if (is_async or update_on_kvstore) and (
                type(actual_optimizer).update is not chainer.optimizer.GradientMethod.update):
            raise TypeError(
                f'{type(actual_optimizer).__name__} overrides update, which the store does not '
                'call. Pass update_on_kvstore=False (dist_sync only).')
        if kvstore._backend.server.updater is not assign:
            raise ValueError('the store already has an updater or an optimizer. Create another '
                             'store for create_kvstore_optimizer.')
    if is_async or update_on_kvstore:
        kvstore.set_optimizer(actual_optimizer, 1. if is_async else 1 / kvstore.num_workers,
                              compare_settings=compare_settings)
        return _StoreUpdate(actual_optimizer, kvstore, compare_settings)
    return _WorkerUpdate(actual_optimizer, kvstore, compare_settings)


class _KVStoreOptimizer(OptimizerProxy):
    """See :func:`create_kvstore_optimizer`."""

    actual_optimizer: chainer.optimizer.GradientMethod
    kvstore: KVStore
    _initialized: set[str]
    _settings: OptimizerSettings

    def __init__(self, actual_optimizer: chainer.optimizer.GradientMethod, kvstore: KVStore,
                 compare_settings: bool, noise: tuple[bool, bool] = (True, True)) -> None:
        super().__init__(actual_optimizer)
        self.kvstore = kvstore
        self._initialized = set()
        self._settings = OptimizerSettings(
            actual_optimizer, 'the KVStore optimizer', 'create_kvstore_optimizer', {
                'update_on_kvstore': str(isinstance(self, _StoreUpdate)),
                'compare_settings': str(bool(compare_settings))},
            is_compared=compare_settings, noise=noise)
        kvstore._backend.server.loss_scale = lambda: actual_optimizer._loss_scale

    def setup(self, link: chainer.Link) -> _KVStoreOptimizer:
        """Set the model to train. See :meth:`chainer.Optimizer.setup`.

        Args:
            link: The model.

        Returns:
            This optimizer.

        Raises:
            ValueError: If the store already has the parameters of a model.
        """
        if self._initialized:
            self.kvstore._backend.refuse('setup', ValueError(
                'the store already has the parameters of another model; create another store'))
        self.actual_optimizer.setup(link)
        return self

    def update(self, lossfun: Callable[..., chainer.Variable] | None = None, *args: object,
               **kwds: object) -> None:
        """Push this rank's gradients and update the parameters.

        Collective, except for local stores and ``dist_async``.

        Args:
            lossfun: Function of ``args`` and ``kwds`` that returns the loss, a scalar Variable. If
                ``None``, the current gradients of the parameters are used.
            *args: Arguments of ``lossfun``.
            **kwds: Keyword arguments of ``lossfun``.

        Raises:
            RuntimeError: If the optimizer is not set up with a model.
            ValueError: If the store cannot update a parameter because of its hyperparameters,
                update rule, hooks, loss scaling or shared memory; if the store already has a key
                with the path of a parameter; or if the compared settings differ between ranks.
        """
        if self.target is None:
            self.kvstore._backend.refuse('push', RuntimeError(
                'the KVStore optimizer has no model. Call optimizer.setup(model) first.'))
        if lossfun is not None:
            compute_gradients(self.actual_optimizer, lossfun(*args, **kwds))
        named = sorted(self.target.namedparams())
        parameters = _initialized(named)
        new = [path for path in parameters if path not in self._initialized]
        with self.kvstore._backend.comparing(self._settings, named):
            if not new:
                self._step(parameters)
                return
            with raise_on_all_ranks(self.kvstore._backend, 'update'):
                if taken := [path for path in new if path in self.kvstore._layouts]:
                    raise ValueError(f'the store already has the key {taken[0]!r}, perhaps from '
                                     'another optimizer; use a separate store for each optimizer')
            self._prepare(parameters, new)
            self.kvstore.init(new, [parameters[path].array for path in new])
            self._initialized.update(new)
            self._pull({path: parameters[path] for path in new})

    def _push(self, parameters: _Parameters) -> None:
        self.kvstore.push(list(parameters), [parameter.grad for parameter in parameters.values()],
                          priority=_priorities(parameters))

    def _pull(self, parameters: _Parameters) -> None:
        """Copy the values of the store to the parameters."""
        self.kvstore.pull(list(parameters), [parameter.array for parameter in parameters.values()],
                          priority=_priorities(parameters))

    def _prepare(self, parameters: _Parameters, new: list[str]) -> None:
        """Prepare the store for new parameters, before their keys are initialized.

        Collective: every rank calls it.

        Args:
            parameters: All initialized parameters.
            new: Paths of the new parameters.
        """
        raise NotImplementedError

    def _step(self, parameters: _Parameters) -> None:
        """Push the gradients of all initialized parameters and update the parameters."""
        raise NotImplementedError


def _initialized(named: Named) -> _Parameters:
    """Return the initialized parameters, each once, by their first paths."""
    first: dict[int, tuple[str, chainer.Parameter]] = {}
    for path, parameter in named:
        if parameter.is_initialized:
            first.setdefault(id(parameter), (path, parameter))
    return dict(first.values())


def _priorities(parameters: _Parameters) -> list[float]:
    return [-i for i in range(len(parameters))]


class _WorkerUpdate(_KVStoreOptimizer):
    """The store averages the gradients. Each rank updates its parameters with the mean."""

    def _prepare(self, parameters: _Parameters, new: list[str]) -> None:
        scales = dict.fromkeys(new, 1 / self.kvstore.num_workers)
        self.kvstore._backend.server.scales.update(scales)
        for path in new:
            init_state(parameters[path])

    def _step(self, parameters: _Parameters) -> None:
        for parameter in parameters.values():  # hooks are called even if a rule is disabled
            fill_missing_grad(parameter)
        keep_scale(self.actual_optimizer)
        compressor = self.kvstore._backend.server.compressor
        if compressor is not None:
            compressor.commit()
        self._push(parameters)
        means = self.kvstore.pull(list(parameters), priority=_priorities(parameters))
        # Assign new arrays, because a gradient may be read-only or shared between parameters.
        for parameter, mean in zip(parameters.values(), means, strict=True):
            parameter.grad = parameter.device.send(mean)
        self.actual_optimizer.update(None)
        if compressor is not None and self.actual_optimizer._loss_scaling_isnan:
            compressor.rollback()  # the step was skipped


class _StoreUpdate(_KVStoreOptimizer):
    """The store updates the parameters. Each rank pulls them."""

    def __init__(self, actual_optimizer: chainer.optimizer.GradientMethod, kvstore: KVStore,
                 compare_settings: bool) -> None:
        super().__init__(actual_optimizer, kvstore, compare_settings,
                         noise=(False, False))  # the server of each key generates noise
        updater = kvstore._backend.server.updater
        assert isinstance(updater, OptimizerUpdater)
        updater.is_loss_scaled = True
        self._updater = updater

    def serialize(self, serializer: chainer.AbstractSerializer) -> None:
        """Save or load ``t`` and the epoch. The store has the other states.

        Args:
            serializer: A Chainer serializer or deserializer.
        """
        optimizer = self.actual_optimizer
        optimizer.t = serializer('t', optimizer.t)
        optimizer.epoch = serializer('epoch', optimizer.epoch)

    def _prepare(self, parameters: _Parameters, new: list[str]) -> None:
        with raise_on_all_ranks(self.kvstore._backend, 'update'):
            self._check(parameters.items())
            for path in new:
                if getattr(parameters[path].update_rule, 'state', None):
                    raise ValueError(
                        f'the optimizer already has states of parameter {path}, which the store '
                        f'does not use. Use a new optimizer, or {_ON_WORKERS}.')
            if groups := sharing_memory([parameter.array for parameter in parameters.values()]):
                names = [*parameters]
                paths = ', '.join([names[i] for i in groups[0]])
                raise ValueError(f'the parameters {paths} share memory, but the store updates '
                                 'each of them separately. Assign one Parameter object to both '
                                 f'links (link.W = other.W), or {_ON_WORKERS}.')
        uses = Counter(map(id, self.target.params()))
        for path in new:
            self._updater.repeats[path] = uses[id(parameters[path])]
            rule = parameters[path].update_rule
            if rule is not None:
                self._updater.starts[path] = rule.t

    def _check(self, parameters: Iterable[tuple[str, chainer.Parameter]]) -> None:
        """Raise an error if the store cannot update the parameters like the actual optimizer."""
        fresh = self._updater.new_rule()
        for path, parameter in parameters:
            rule = parameter.update_rule
            if rule is None:
                continue
            if set(vars(rule.hyperparam)) - {'_parent'} or rule._hookable._pre_update_hooks \
                    or rule._hookable._post_update_hooks:
                raise ValueError(f'parameter {path} has its own hyperparameters or hooks, which '
                                 f'the store does not use; {_ON_WORKERS}')
            if type(rule) is not type(fresh) or rule._use_fp32_update != fresh._use_fp32_update:
                raise ValueError(f'parameter {path} has its own update rule, which the store does '
                                 f'not use; {_ON_WORKERS}')
        if self.actual_optimizer._loss_scaling_is_dynamic:
            raise ValueError(f'dynamic loss scaling needs all gradients together; {_ON_WORKERS}')

    def _step(self, parameters: _Parameters) -> None:
        parameters = {path: parameter for path, parameter in parameters.items()
                      if parameter.update_rule is not None}
        disabled = {path for path, parameter in parameters.items()
                    if not parameter.update_rule.enabled}
        is_async = self.kvstore.type == 'dist_async'
        if is_async or not self._updater.has_hooks:  # Chainer also calls hooks for disabled rules
            parameters = {path: parameter for path, parameter in parameters.items()
                          if path not in disabled}
        if is_async:  # no rank waits for gradients that this rank does not have
            parameters = {path: parameter for path, parameter in parameters.items()
                          if parameter.grad is not None}
        self._updater.disabled = disabled
        with raise_on_all_ranks(self.kvstore._backend, 'push'):
            self._check(parameters.items())
            for parameter in parameters.values():
                fill_missing_grad(parameter)
        self._push(parameters)
        for parameter in self.target.params():  # Optimizer.update also counts these updates
            rule = parameter.update_rule
            if rule is not None and rule.enabled and not parameter.is_initialized:
                rule.t += 1
        self.actual_optimizer.t += 1
        self._pull(parameters)


_ON_WORKERS = 'pass update_on_kvstore=False (dist_sync only)'
