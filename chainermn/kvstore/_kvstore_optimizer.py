"""An optimizer whose gradients go through a store, as in the Trainer of MXNet's Gluon."""
from __future__ import annotations

from typing import Any

import chainer

from chainermn._delegate import Delegate
from chainermn.kvstore._kvstore import KVStore


def create_kvstore_optimizer(actual_optimizer: Any, kvstore: KVStore,
                             update_on_kvstore: bool | None = None) -> Any:
    """Makes an optimizer push its gradients to a store.

    Returns a proxy for ``actual_optimizer``, like
    :func:`chainermn.create_multi_node_optimizer`.  Its ``update(lossfun, *args)`` computes this
    rank's gradients, pushes those of all parameters (by path, priority ``-i`` for the i-th), and

    - pulls their mean over all ranks and lets the actual optimizer step with it, or,
    - with ``update_on_kvstore``, pulls the parameters, which the store has updated.

    Both give the same parameters with ``dist_sync``.  The first leaves everything to the actual
    optimizer: all hooks, hyperparameters of single parameters, loss scaling, and its state in
    snapshots.  In the second each rank keeps the state of the parameters that it serves, and
    :meth:`chainermn.kvstore.KVStore.save_optimizer_states` writes it; of the hooks only those that
    are called for each parameter can be used.

    Gradients are averaged: ``dist_sync`` multiplies their sum by ``1 / kvstore.num_workers``.
    ``dist_async`` steps with each rank's gradients by themselves, as they come, so it makes
    ``num_workers`` times as many steps.

    The keys are the paths of the parameters, so a store serves one such optimizer; their values
    are the parameters with ``update_on_kvstore``, otherwise the last gradients.  The first
    ``update`` does not step (``t`` stays 0): it initializes the keys and copies the parameters of
    rank 0 to all ranks, and so does one that finds parameters that have just been initialized.
    These are collective; with ``dist_async`` later ones are not, and ranks may make different
    numbers of them.

    Args:
        actual_optimizer: ``chainer.optimizer.GradientMethod``, set up with a model or not yet.
        kvstore: The store, in which no optimizer and no updater has been set.
        update_on_kvstore: Where parameters are updated; by default on the store with
            ``dist_async``, and by the actual optimizer with all other types.

    Returns:
        The optimizer of this rank.

    Raises:
        TypeError: If an argument is of a wrong type.
        ValueError: If ``update_on_kvstore`` is false with ``dist_async``, or true with an optimizer
            whose hooks or loss scaling need all parameters at once.
    """
    if not isinstance(kvstore, KVStore):
        raise TypeError('create_kvstore_optimizer needs a KVStore as its second argument, got '
                        f'{kvstore!r}. Make one with chainermn.kvstore.create().')
    try:
        if not isinstance(actual_optimizer, chainer.optimizer.GradientMethod):
            raise TypeError('create_kvstore_optimizer needs a chainer.optimizer.GradientMethod as '
                            f'its first argument, got {actual_optimizer!r}.')
        is_async = kvstore.type == 'dist_async'
        if is_async and update_on_kvstore is not None and not update_on_kvstore:
            raise ValueError('with dist_async there is no mean gradient to update with: leave '
                             'update_on_kvstore=True, or use dist_sync.')
    except Exception as error:
        kvstore._refuse('create_kvstore_optimizer', error)
    if is_async or update_on_kvstore:
        kvstore.set_optimizer(actual_optimizer, 1. if is_async else 1 / kvstore.num_workers)
        return _UpdateOnStore(actual_optimizer, kvstore)
    return _UpdateHere(actual_optimizer, kvstore)


class _KVStoreOptimizer(Delegate, wraps='actual_optimizer'):
    """See :func:`create_kvstore_optimizer`."""

    actual_optimizer: Any
    kvstore: KVStore
    _initialized: set[str]

    def __init__(self, actual_optimizer: Any, kvstore: KVStore) -> None:
        super().__init__(actual_optimizer)
        self.kvstore = kvstore
        self._initialized = set()

    def setup(self, link: Any) -> Any:
        """Sets the model to train; see :meth:`chainer.Optimizer.setup`.

        Returns:
            This proxy.
        """
        if self._initialized:
            self.kvstore._refuse('setup', ValueError(
                'the store has the parameters of another model already; create another store'))
        self.actual_optimizer.setup(link)
        return self

    def update(self, lossfun: Any = None, *args: Any, **kwds: Any) -> None:
        """Pushes this rank's gradients and steps; collective unless the store is ``dist_async``.

        Args:
            lossfun: Function of ``args`` and ``kwds`` that returns the loss, a scalar Variable.
                If ``None``, the gradients that the parameters have now are used.
        """
        self.actual_optimizer._check_set_up()
        if lossfun is not None:
            self._backward(lossfun, *args, **kwds)
        parameters = {path: parameter for path, parameter in sorted(self.target.namedparams())
                      if parameter.is_initialized}
        new = [path for path in parameters if path not in self._initialized]
        if new:
            self._check(parameters)
            self.kvstore.init(new, [parameters[path].array for path in new])
            self._initialized.update(new)
            self._pull(parameters)
        else:
            self._step({path: parameter for path, parameter in parameters.items()
                        if parameter.update_rule is not None and parameter.update_rule.enabled})

    def _backward(self, lossfun: Any, *args: Any, **kwds: Any) -> None:
        loss = lossfun(*args, **kwds)
        if getattr(self.actual_optimizer, '_use_cleargrads', True):
            self.target.cleargrads()
        else:
            self.target.zerograds()
        loss.backward(loss_scale=self.actual_optimizer._loss_scale)

    def _push(self, parameters: dict[str, Any]) -> None:
        self.kvstore.push(list(parameters), [parameter.grad for parameter in parameters.values()],
                          priority=[-i for i in range(len(parameters))])

    def _pull(self, parameters: dict[str, Any]) -> None:
        """Gets the parameters; those that this optimizer does not update, too."""
        self.kvstore.pull(list(parameters), [parameter.array for parameter in parameters.values()],
                          priority=[-i for i in range(len(parameters))])

    def _check(self, parameters: dict[str, Any]) -> None:
        """Refuses parameters with which this optimizer cannot step."""

    def _step(self, parameters: dict[str, Any]) -> None:
        """Pushes the gradients of these parameters, and updates them."""
        raise NotImplementedError


class _UpdateHere(_KVStoreOptimizer):
    """The store adds the gradients; each rank steps with their mean."""

    def _step(self, parameters: dict[str, Any]) -> None:
        for parameter in parameters.values():
            _fill(parameter)
            if self.actual_optimizer._loss_scale is not None:
                # The update rule divides by the scale that backward left in the parameter. One
                # that this rank's loss did not use has none, but its mean is scaled all the same.
                parameter._loss_scale = self.actual_optimizer._loss_scale
        self._push(parameters)
        grads = [parameter.grad for parameter in parameters.values()]
        self.kvstore.pull(list(parameters), grads, priority=[-i for i in range(len(grads))])
        for grad in grads:
            grad *= grad.dtype.type(1 / self.kvstore.num_workers)
        self.actual_optimizer.update(None)


class _UpdateOnStore(_KVStoreOptimizer):
    """The store steps; each rank gets the parameters."""

    def serialize(self, serializer: Any) -> None:
        """Saves or loads the counts of steps and epochs; the rest is the store's."""
        optimizer = self.actual_optimizer
        optimizer.t = serializer('t', optimizer.t)
        optimizer.epoch = serializer('epoch', optimizer.epoch)

    def _check(self, parameters: dict[str, Any]) -> None:
        for path, parameter in parameters.items():
            rule = parameter.update_rule
            if rule is not None and (
                    set(vars(rule.hyperparam)) - {'_parent'} or rule._hookable._pre_update_hooks
                    or rule._hookable._post_update_hooks):
                self.kvstore._refuse('update', ValueError(
                    f'parameter {path} has hyperparameters or hooks of its own, of which the store '
                    'knows nothing; update on the workers (update_on_kvstore=False, with '
                    'dist_sync)'))
        if self.actual_optimizer._loss_scaling_is_dynamic:
            self.kvstore._refuse('update', ValueError(
                'dynamic loss scaling needs all gradients at once; update on the workers '
                '(update_on_kvstore=False, with dist_sync)'))

    def _step(self, parameters: dict[str, Any]) -> None:
        if self.kvstore.type == 'dist_async':  # nobody waits for what this rank has not
            parameters = {path: parameter for path, parameter in parameters.items()
                          if parameter.grad is not None}
        scale = self.actual_optimizer._loss_scale
        for parameter in parameters.values():
            _fill(parameter)
            if scale is not None:
                parameter.grad /= scale
        self._push(parameters)
        self.actual_optimizer.t += 1
        self._pull(parameters)


def _fill(parameter: Any) -> None:
    """Gives a parameter that the loss did not use a gradient of 0."""
    if parameter.grad is None:
        with chainer.using_device(parameter.device):
            parameter.grad = parameter.device.xp.zeros_like(parameter.array)
