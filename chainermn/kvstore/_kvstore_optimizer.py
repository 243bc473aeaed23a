"""create_kvstore_optimizer: an optimizer that trains through a store, like Gluon's Trainer."""
from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, TypeAlias

import chainer
import numpy as np

from chainer_compat.updates import sharded_states
from chainermn.communicators.errors import raise_on_all_ranks
from chainermn.kvstore import _arguments
from chainermn.kvstore._kvstore import KVStore
from chainermn.kvstore._optimizer_states import OptimizerState
from chainermn.kvstore._optimizer_updater import OptimizerUpdater, loaded, write_state
from chainermn.kvstore._server import assign
from chainermn.kvstore._sharding import Key, KeyLayout
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
    per-parameter hyperparameters and loss scaling. With ``update_on_kvstore``, hooks must be called
    for each parameter separately. Each rank keeps the states of the parameters that it serves, so
    each rank must save its own file, as :func:`chainermn.create_multi_node_checkpointer` does, or
    call :meth:`chainermn.kvstore.KVStore.save_optimizer_states`. If your script changes parameters,
    for example by clipping weights, the next update overwrites the changes, unless it has also
    loaded the optimizer.

    In ``dist_sync``, gradients are averaged: the store multiplies their sum by
    ``1 / kvstore.num_workers`` (in float32 for float16). In ``dist_async``, each push of a rank is
    a separate update, so there are ``num_workers`` times as many updates.

    A store can serve only one such optimizer, because its keys are the paths of the parameters (the
    first path of each). The values of the keys are the parameters with ``update_on_kvstore``,
    otherwise the last mean gradients.

    The first ``update`` does not change ``t``: it initializes the keys and copies the parameters of
    rank 0 to all ranks. An ``update`` that finds newly initialized parameters does the same for
    these parameters. After the checkpointer has loaded, the first ``update`` also changes the
    parameters. Such updates are collective. In ``dist_async``, all other updates are not
    collective, and the number of updates may differ between ranks.

    Collective in ``dist`` types: every rank calls it with the same ``update_on_kvstore``.

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
            whose hooks or loss scaling need all parameters together; if it differs between ranks;
            or if the store already has an updater.

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
    kvstore._backend.check_same('create_kvstore_optimizer', 'update_on_kvstore='
                                f'{bool(is_async or update_on_kvstore)}')
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
    _is_new: bool  # loaded from a snapshot that was saved before the first update
    _is_loaded: bool  # since the last update
    _is_resumed: bool  # whether the next update changes the parameters even if it adds keys

    def __init__(self, actual_optimizer: chainer.optimizer.GradientMethod, kvstore: KVStore,
                 compare_settings: bool, noise: tuple[bool, bool] = (True, True)) -> None:
        super().__init__(actual_optimizer)
        self.kvstore = kvstore
        self._initialized = set()
        self._is_new = self._is_loaded = self._is_resumed = False
        self._settings = OptimizerSettings(
            actual_optimizer, 'the KVStore optimizer', 'create_kvstore_optimizer', {
                'update_on_kvstore': str(isinstance(self, _StoreUpdate)),
                'compare_settings': str(bool(compare_settings))},
            is_compared=compare_settings, noise=noise)
        kvstore._backend.server.loss_scale = lambda: actual_optimizer._loss_scale

    @property
    def compression(self) -> object:
        """The compressor of the pushed gradients, or ``None``."""
        return self.kvstore._backend.server.compressor

    @property
    def has_sharded_states(self) -> bool:
        """Whether each rank has only a part of the states, so that it must save its own file."""
        return False

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
            if new or self._is_loaded:
                self._start(parameters, new)
            if new and not self._is_resumed:
                self._pull({path: parameters[path] for path in new})
            else:
                self._step(parameters)
            self._is_resumed = False

    def is_changed(self, target: chainer.Link) -> bool:
        """Make the next update change the parameters, because a checkpoint was loaded.

        Otherwise, the first update only copies the parameters of rank 0. Checkpointers call this
        method on all ranks.

        Args:
            target: The model.

        Returns:
            Whether the next update changes the parameters, unless it did so anyway.
        """
        self._is_resumed = not self._is_new and not self._initialized
        return self._is_resumed

    def _serialize_start(self, serializer: chainer.AbstractSerializer) -> None:
        """Save or load whether the first update is over, and the residuals of compression."""
        own = serializer['chainermn']
        if isinstance(serializer, chainer.Deserializer):
            self._is_new = bool(loaded(own, 'is_new', False))
            self._is_loaded = True
        elif self._is_new or not (self._initialized or self._is_loaded):
            own('is_new', True)
        compressor = self.kvstore._backend.server.compressor
        if compressor is not None:
            residuals, rank = own['kvstore'], self.kvstore.rank
            if loaded(residuals, 'rank', rank) == rank:
                compressor.serialize(residuals)
            else:
                compressor.reset()

    def _start(self, parameters: _Parameters, new: list[str]) -> None:
        """Initialize the keys of new parameters and restore loaded states. Collective."""
        with raise_on_all_ranks(self.kvstore._backend, 'update'):
            if taken := [path for path in new if path in self.kvstore._layouts]:
                raise ValueError(f'the store already has the key {taken[0]!r}, perhaps from '
                                 'another optimizer; use a separate store for each optimizer')
        self._prepare(parameters, new)
        if new:
            self.kvstore.init(new, [parameters[path].array for path in new])
            self._initialized.update(new)
        self._restore({path: parameter for path, parameter in parameters.items()
                       if path not in new})
        self._is_loaded = self._is_new = False

    def _restore(self, old: _Parameters) -> None:
        """Restore loaded states in the store. Collective: every rank calls it.

        Args:
            old: The parameters whose keys were initialized before.
        """

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
    return _by_first_path((path, param) for path, param in named if param.is_initialized)


def _by_first_path(named: Iterable[tuple[str, chainer.Parameter]]) -> _Parameters:
    """Return parameters, each once, by their first paths."""
    first: dict[int, tuple[str, chainer.Parameter]] = {}
    for path, parameter in named:
        first.setdefault(id(parameter), (path, parameter))
    return dict(first.values())


def _priorities(parameters: _Parameters) -> list[float]:
    return [-i for i in range(len(parameters))]


class _WorkerUpdate(_KVStoreOptimizer):
    """The store averages the gradients. Each rank updates its parameters with the mean."""

    def serialize(self, serializer: chainer.AbstractSerializer) -> None:
        """Save or load the actual optimizer, and the gradients that this rank has not sent yet.

        Args:
            serializer: A Chainer serializer or deserializer.
        """
        self.actual_optimizer.serialize(serializer)
        self._serialize_start(serializer)

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


class _LoadedState(NamedTuple):
    """The states of a parameter in a file."""

    #: The first element and the end, if they are those of a shard. Then the arrays are flat, unless
    #: the shard has all elements.
    elements: tuple[int, int] | None
    state: OptimizerState  # including ``t``

    def is_for(self, layout: KeyLayout, rank: int) -> bool:
        """Return whether it has all states of a rank's shard."""
        elements = layout.elements(rank)
        return self.elements in (None, elements) or elements[0] == elements[1]

    def shard(self) -> sharded_states.StateShard:
        """Return the states with their elements."""
        begin, end = self.elements or (0, 0)
        return sharded_states.StateShard(begin, end, dict(self.state) if begin < end else {})


class _StoreUpdate(_KVStoreOptimizer):
    """The store updates the parameters. Each rank pulls them."""

    _updater: OptimizerUpdater
    _states: dict[str, _LoadedState]  # loaded, but not yet in the store

    def __init__(self, actual_optimizer: chainer.optimizer.GradientMethod, kvstore: KVStore,
                 compare_settings: bool) -> None:
        super().__init__(actual_optimizer, kvstore, compare_settings,
                         noise=(False, False))  # the server of each key generates noise
        updater = kvstore._backend.server.updater
        assert isinstance(updater, OptimizerUpdater)
        updater.is_loss_scaled = True
        updater.on_load = self._follow
        self._updater, self._states = updater, {}

    @property
    def has_sharded_states(self) -> bool:
        return self.kvstore.num_workers > 1 and self._updater.has_states

    def serialize(self, serializer: chainer.AbstractSerializer) -> None:
        """Save or load ``t``, the epoch and the states of this rank's shards in the store.

        The states that were loaded are restored in the next update.

        Args:
            serializer: A Chainer serializer or deserializer.

        Raises:
            RuntimeError: If a ``dist_async`` store already has the parameters when a snapshot is
                loaded.

        Warns:
            RuntimeWarning: If the updater of the store was replaced, so its states are not saved.
        """
        is_loading = isinstance(serializer, chainer.Deserializer)
        if is_loading and self._initialized and self.kvstore.type == 'dist_async':
            raise RuntimeError(
                'a dist_async store already has the parameters, and other ranks may be changing '
                'them. Load snapshots before the first update.')
        optimizer = self.actual_optimizer
        optimizer.t = serializer('t', optimizer.t)
        optimizer.epoch = serializer('epoch', optimizer.epoch)
        self._serialize_start(serializer)
        if self.kvstore._backend.server.updater is not self._updater:
            warnings.warn(
                'the updater of the store was replaced, so snapshots do not contain its states. '
                'Save the states of your updater yourself, or do not call set_updater or '
                'set_optimizer after create_kvstore_optimizer.', RuntimeWarning, stacklevel=2)
            return
        has_states = self._updater.has_states
        named = sorted(self.target.namedparams())
        firsts = {id(parameter): path for path, parameter in reversed(named)}
        for path, parameter in named:
            if parameter.update_rule is None:
                continue
            if not is_loading:  # Chainer also saves the states under all paths
                self._save(firsts[id(parameter)], parameter, serializer[path], has_states)
            elif path == firsts[id(parameter)]:
                self._load(path, parameter, serializer[path], has_states)

    def _save(self, path: str, parameter: chainer.Parameter,
              serializer: chainer.AbstractSerializer, has_states: bool) -> None:
        """Save the update rule of a parameter.

        The number of updates is the same on all ranks, except in ``dist_async``.
        """
        layout, elements = self.kvstore._layouts.get(path), None
        if path in self._states:
            elements, state = self._states[path]
            write_state(state, serializer)
        elif has_states and layout is not None and parameter.size:
            begin, end = layout.elements(self.kvstore.rank)
            if self.kvstore.num_workers > 1:
                elements = begin, end
            if begin < end:
                self.kvstore._backend.server.save_rule(layout, serializer)
            else:
                serializer('t', parameter.update_rule.t)
        else:
            serializer('t', parameter.update_rule.t)
        if elements is not None:
            serializer(sharded_states.ENTRY, np.array([*elements, *parameter.shape]))

    def _load(self, path: str, parameter: chainer.Parameter,
              serializer: chainer.AbstractSerializer, has_states: bool) -> None:
        """Load the update rule of a parameter."""
        entry = loaded(serializer, sharded_states.ENTRY, None)
        elements = None if entry is None else (int(entry[0]), int(entry[1]))
        state: OptimizerState = {'t': int(serializer('t', 0))}
        if has_states and elements != (0, 0):
            try:
                state = self._updater.load_rule(serializer)
            except KeyError:
                if parameter.is_initialized and parameter.size:
                    raise  # otherwise, the parameter had no states in the saved run
        self._states[path] = _LoadedState(elements, state)
        parameter.update_rule.t = int(state['t'])

    def _follow(self, states: Mapping[Key, OptimizerState]) -> None:
        """Count the updates as in a file that ``load_optimizer_states`` has loaded."""
        self._states.clear()
        if self.target is not None:
            for path, parameter in _by_first_path(sorted(self.target.namedparams())).items():
                if path in self._initialized and parameter.update_rule is not None:
                    parameter.update_rule.t = int(states[path]['t']) if path in states else (
                        self._updater.starts.get(path, 0))

    def _restore(self, old: _Parameters) -> None:
        backend, layouts = self.kvstore._backend, self.kvstore._layouts
        server, states = backend.server, self._states
        for path, parameter in old.items() if self._is_loaded else ():
            server.replace(layouts[path], parameter.array)
            if path in states:
                self._updater.forget(path, int(states[path].state['t']))
        own = {path: state for path, state in states.items() if path in layouts}
        needs_others = any(not state.is_for(layouts[path], self.kvstore.rank)
                           for path, state in own.items())
        if any(backend.allgather('update', needs_others)):
            of_ranks = backend.allgather('update', {
                path: state.shard() for path, state in own.items() if state.elements})
            with raise_on_all_ranks(backend, 'update'):
                for path in own:
                    parts = [shards[path] for shards in of_ranks if path in shards]
                    if parts:
                        own[path] = _LoadedState(None, {'t': own[path].state['t'], **(
                            sharded_states.join(path, layouts[path].shape, parts))})
        for path, (elements, state) in own.items():
            if len(state) > 1:
                server.restore(layouts[path], state, is_shard=elements is not None)
        for path in own:
            del states[path]
        if self.kvstore.type == 'dist_async':
            backend.barrier('update')  # no server gets a gradient before it has its states

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
        pending = self.kvstore._backend.server.loaded
        for path in new:
            self._updater.repeats[path] = uses[id(parameters[path])]
            rule = parameters[path].update_rule
            if path in pending:  # load_optimizer_states has complete states
                self._states.pop(path, None)
            if rule is not None:
                if path in pending:
                    rule.t = int(pending[path]['t'])
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
            if rule is not None and rule.enabled and (
                    not is_async or not parameter.is_initialized or parameter.grad is not None):
                rule.t += 1
        self.actual_optimizer.t += 1
        self._pull(parameters)


_ON_WORKERS = 'pass update_on_kvstore=False (dist_sync only)'
