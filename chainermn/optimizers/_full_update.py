"""The step of the actual optimizer, in which each rank updates all parameters."""
from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import chainer
import numpy as np

from chainer_compat.updates import sharded_states
from chainermn._types import Model, Object, Optimizer, Parameter, Serializer, UpdateRule
from chainermn.optimizers._optimizer_proxy import by_first_path
from chainermn.optimizers._sharded_states.partition import Shard


class FullUpdate:
    """Each rank updates all parameters and stores all states."""

    def clear(self) -> None:
        """Forget the model, because the optimizer gets a different one."""

    def begin(self, optimizer: Optimizer) -> None:
        """Prepare the first step, once all ranks have the same parameters."""
        for param in optimizer.target.params():
            init_state(param)

    def prepare(self, optimizer: Optimizer) -> None:
        """Prepare the averaging of gradients. Collective: every rank calls it."""

    def shards(self) -> Sequence[Shard] | None:
        """Return the gradient elements that each rank needs for a step; ``None`` for all."""
        return None

    def update(self, optimizer: Optimizer, *args: Object, **kwds: Object) -> None:
        """Step with the mean gradients. Collective: every rank calls it."""
        optimizer.update(None, *args, **kwds)

    def gather(self, optimizer: Optimizer) -> dict[str, dict[str, Object]]:
        """Return the states of all parameters. Collective: every rank calls it."""
        return {path: dict(param.update_rule.state or {})
                for path, param in with_rules(optimizer.target).items()}

    def serialize(self, optimizer: Optimizer, serializer: Serializer, is_root: bool) -> None:
        """Save or load the optimizer with the states of this rank.

        Warns:
            RuntimeWarning: On the root, if the optimizer belongs to another framework and cannot be
                saved.
        """
        if isinstance(serializer, chainer.Deserializer) and sharded_states.load_shard(
                serializer, optimizer.target):
            raise ValueError(
                'the snapshot contains only one shard of the optimizer states. Create the '
                'optimizer with shard_states=True, or load the snapshot with '
                'chainermn.create_multi_node_checkpointer, which joins the files of all ranks.')
        if hasattr(optimizer, 'serialize'):
            optimizer.serialize(serializer)
        elif is_root:
            name = type(optimizer).__name__
            warnings.warn(f'{name} has no method serialize, so snapshots do not contain its state. '
                          f'If it has a state, define {name}.serialize(serializer).',
                          RuntimeWarning, stacklevel=3)

    def common(self, saved: Mapping[str, Object]) -> dict[str, Object]:
        """Return the part of a saved optimizer that is the same on all ranks."""
        return dict(saved)


def with_rules(target: Model) -> dict[str, Parameter]:
    """Return the initialized parameters that the optimizer updates, each under one path."""
    return by_first_path(
        (path, param) for path, param in sorted(target.namedparams(include_uninit=False))
        if param.update_rule is not None)


def init_state(param: Parameter) -> None:
    """Initialize the state of a parameter before the first step.

    Otherwise, Chainer could not load a snapshot that was taken before the first step.

    Args:
        param: The parameter.

    Example:
        >>> from chainermn.optimizers import proxy
        >>> adam = chainer.optimizers.Adam().setup(model)
        >>> proxy.init_state(model.predictor.b)
        >>> model.predictor.b.update_rule.state['m']
        array([0., 0.], dtype=float32)
    """
    rule = param.update_rule
    if param.is_initialized and rule is not None and rule.enabled and rule.state is None:
        rule._init_states(as_updated(rule, param))


def as_updated(rule: UpdateRule, param: Parameter) -> Parameter:
    """Return the parameter that the rule updates: a float32 copy with ``use_fp32_update``."""
    if not rule._use_fp32_update or param.dtype != np.float16:
        return param
    return chainer.Parameter(param.array.astype(np.float32))
