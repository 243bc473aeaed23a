"""The factory of multi-node optimizers, which average gradients over all ranks."""
from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import TYPE_CHECKING

from chainermn._operations.arguments import is_integer
from chainermn._operations.on_all_ranks import raise_on_all_ranks
from chainermn._process import environment
from chainermn._types import Object, Optimizer
from chainermn.communicators import compression as compression_module
from chainermn.communicators._recognize import as_communicator
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.optimizers._accumulation import Accumulation
from chainermn.optimizers._elementwise_rules import is_elementwise
from chainermn.optimizers._foreign_optimizer import check_optimizer, has_plain_update
from chainermn.optimizers._full_update import FullUpdate
from chainermn.optimizers._gradient_averaging import GradientAveraging, mean_grad_accepts
from chainermn.optimizers._multi_node_optimizer import MultiNodeOptimizer
from chainermn.optimizers._optimizer_proxy import OptimizerProxy
from chainermn.optimizers._optimizer_settings import OptimizerSettings

if TYPE_CHECKING:
    from chainermn.communicators.compression import Compressor, PowerSGD

__all__ = ['MultiNodeOptimizer', 'create_multi_node_optimizer', 'is_elementwise']

_MultiNodeOptimizer = MultiNodeOptimizer  # name in ChainerMN 7; some scripts subclass it


def create_multi_node_optimizer(
    actual_optimizer: Optimizer,
    communicator: CommunicatorBase,
    double_buffering: bool = False,
    zero_fill: bool = True,
    *,
    n_accumulations: int = 1,
    compression: Compressor | PowerSGD | Mapping[str, object] | str | None = None,
    overlap: bool | str = False,
    bucket_mb: float = 25,
    shard_states: bool = False,
    compare_settings: bool = True,
) -> MultiNodeOptimizer:
    """Create an optimizer that averages gradients over all ranks before each step.

    Returns a proxy for ``actual_optimizer``: all attributes (``lr``, ``t``, ``target``,
    ``add_hook``, ``serialize``, ...) belong to the actual optimizer, but ``update`` averages
    gradients first. The proxy is not an instance of :class:`chainer.Optimizer`, but Chainer's
    updaters accept it.

    ``proxy.update(lossfun, *args)`` is collective: every rank calls it. It computes this rank's
    gradients, replaces them with their mean over all ranks, and updates the parameters with the
    actual optimizer. So hooks such as ``GradientClipping`` use the mean gradients, which are
    identical on all ranks. Without ``lossfun``, it uses the current gradients, like any Chainer
    optimizer.

    The first ``update`` takes no step (``t`` stays 0): it only copies the parameters of rank 0 to
    all ranks. An ``update`` in which the set of initialized parameters has changed does the same,
    because a layer such as ``Linear(None, 10)`` initializes itself on its first use, with different
    random numbers on each rank.

    With ``n_accumulations=2``, two updates are equivalent to one update with a batch of twice the
    size. An update without a step ends after the backward pass: ``t`` does not change, hooks are
    not called, and the gradients are ``None`` afterwards. Without ``lossfun``, call ``cleargrads``
    before each ``backward()``, as usual. An update that copies parameters does not accumulate
    gradients.

    Accumulated gradients and the residuals of compression are saved with the optimizer. They differ
    between ranks, so only snapshots of all ranks contain all of them, such as the snapshots of the
    multi-node checkpointer: docs/checkpoints.md.

    Args:
        actual_optimizer: Chainer optimizer, before or after ``setup`` with a model. Without
            ``double_buffering``, ``overlap`` and ``shard_states``, also any object with the
            methods ``setup(model)`` and ``update(None, *args)`` and the attribute ``target``.
        communicator: ChainerMN communicator.
        double_buffering: Whether to average gradients during the next forward and backward, so
            that each step uses the gradients of the previous update; false by default. This can
            change accuracy. The first two updates take no step. Requires ``pure_nccl``:
            docs/overlap.md.
        zero_fill: Whether an initialized parameter that this rank's loss did not use (its
            gradient is ``None``) has a gradient of zero; true by default. If false, the parameter
            is skipped, and an error is raised if another rank has a gradient for it. Uninitialized
            parameters are always skipped.
        n_accumulations: Number of updates per step; 1 by default. ``update`` accumulates this
            rank's gradients. Every ``n_accumulations``-th update averages them over these updates
            and all ranks and takes a step.
        compression: Compression of the gradients; ``None`` by default. One of ``'fp16'``,
            ``'bf16'``, ``'2bit'``, ``'powersgd'``, a dict such as ``{'type': '2bit',
            'threshold': 0.5}``, or a compressor; see :mod:`chainermn.communicators.compression`.
            If the compressor has state and another optimizer already uses it, this optimizer gets a
            copy without the state.
        overlap: Whether ``update(lossfun, ...)`` averages gradients in buckets during the backward
            pass; false by default. Each step uses the gradients of its own update. ``True`` has no
            effect if all ranks are on one node without free cores; ``'always'`` overlaps even
            then: docs/overlap.md.
        bucket_mb: Size of the largest bucket in MiB (2**20 bytes); 25 by default. Large buckets
            are averaged more efficiently, small ones earlier.
        shard_states: Whether each rank stores the state of the optimizer (such as Adam's moments)
            only for its shard of the parameters (ZeRO stage 1); false by default. After an update,
            the gradients of other shards are undefined. Snapshots need the files of all ranks:
            docs/sharded_states.md.
        compare_settings: Whether ranks compare hyperparameters (such as ``lr``), hooks, disabled
            parameters and ``t`` whenever they average gradients, and raise an error if they differ;
            true by default. Pass False if the differences are intended: docs/common_mistakes.md.

    Returns:
        The multi-node optimizer of this rank.

    Raises:
        TypeError: If ``actual_optimizer`` is not an optimizer, is already a multi-node optimizer,
            or cannot be used with these options; if ``communicator`` is not a communicator; or,
            with ``shard_states``, if the optimizer has no update rules or overrides
            ``GradientMethod.update``.
        ValueError: If ``double_buffering`` is not supported by the communicator or is combined with
            ``n_accumulations`` or ``overlap``; if ``n_accumulations`` is not a positive integer; if
            ``bucket_mb`` is not a positive number; or if ``compression`` is invalid. In the first
            update, if ``n_accumulations``, ``double_buffering``, ``overlap``, ``bucket_mb``,
            ``shard_states`` or ``compare_settings`` differ between ranks, or if only some ranks
            have the environment variable ``CHAINERMN_RECORD``. In any update, on all ranks, if the
            compared settings differ between ranks.

    Example:
        >>> sgd = chainer.optimizers.SGD(lr=0.1)
        >>> optimizer = chainermn.create_multi_node_optimizer(sgd, comm, overlap=True)
        >>> optimizer = optimizer.setup(model)
        >>> optimizer.update(model, *batch)  # copies the parameters of rank 0 to all ranks
        >>> optimizer.update(model, *batch)
        >>> optimizer.t
        1
    """
    communicator = as_communicator(
        communicator, 'create_multi_node_optimizer(actual_optimizer, communicator)')
    with raise_on_all_ranks(communicator, 'create_multi_node_optimizer'):
        if isinstance(actual_optimizer, OptimizerProxy):
            raise TypeError(
                'actual_optimizer is already a multi-node optimizer. Pass the Chainer optimizer.')
        check_optimizer(actual_optimizer, {
            'double_buffering': double_buffering, 'overlap': bool(overlap),
            'shard_states': bool(shard_states)})
        compressor = compression_module.get(compression)
        if compressor is not None and not mean_grad_accepts(
                communicator, compression=None):
            raise ValueError('compression is not supported by '
                             f'{type(communicator).__name__}: its multi_node_mean_grad takes no '
                             'compression argument. Add the argument, or omit compression.')
        if isinstance(compressor, compression_module.PowerSGD) and (
                double_buffering or (overlap and communicator._chainermn_channel.can_overlap)):
            raise ValueError("compression='powersgd' cannot be combined with double_buffering, nor "
                             'with overlap if the communicator is pure_nccl')
        n_accumulations = _checked_number(n_accumulations)
        if isinstance(double_buffering, str):
            raise TypeError(f'double_buffering must be True or False, not {double_buffering!r}. To '
                            f'compress gradients, pass compression={double_buffering!r}.')
        if double_buffering and n_accumulations > 1:
            raise ValueError('double_buffering=True cannot be combined with n_accumulations. '
                             'Use one of them.')
        if double_buffering and overlap:
            raise ValueError('double_buffering=True cannot be combined with overlap. '
                             'Use overlap=True: each step uses the gradients of its own update.')
        if not isinstance(overlap, bool) and overlap != 'always':
            raise ValueError(f"overlap must be True, False or 'always', not {overlap!r}")
        if not isinstance(shard_states, bool):
            raise TypeError(f'shard_states must be True or False, not {shard_states!r}')
        if shard_states and not has_plain_update(actual_optimizer):
            raise TypeError('shard_states=True needs a chainer.optimizer.GradientMethod that does '
                            'not override the method update, not a '
                            f'{type(actual_optimizer).__name__}')
        bucket_bytes = _checked_size(bucket_mb)
        if double_buffering and not communicator._chainermn_channel.can_overlap:
            raise ValueError('This communicator does not support double buffering. '
                             'Use pure_nccl or double_buffering=False.')

        averaging: GradientAveraging
        options = actual_optimizer, communicator, zero_fill, compressor
        # Import these modules only if they are needed. Most scripts need none of them.
        if double_buffering:
            from chainermn.optimizers._double_buffering import DoubleBuffering
            averaging = DoubleBuffering(*options)
        elif overlap and communicator.size > 1:
            from chainermn.optimizers._overlapped import Overlapped
            averaging = Overlapped(*options, bucket_bytes, overlap == 'always')
        else:
            averaging = GradientAveraging(*options)
    is_sharded = shard_states and communicator.size > 1
    settings = OptimizerSettings(
        actual_optimizer, 'the multi-node optimizer', 'create_multi_node_optimizer', {
            'n_accumulations': str(n_accumulations),
            'double_buffering': str(bool(double_buffering)), 'overlap': repr(overlap),
            'bucket_mb': f'{bucket_mb:g}' if overlap else 'none', 'shard_states': str(shard_states),
            'compare_settings': str(bool(compare_settings)),
            # The folders may differ, for example if each host has its own.
            environment.RECORD: 'set' if environment.text(environment.RECORD) else 'not set'},
        is_compared=compare_settings and communicator.size > 1 and (
            OptimizerSettings.are_known(actual_optimizer)),
        noise=(True, not is_sharded))  # only one rank updates a parameter with hooks
    stepper = FullUpdate()
    if is_sharded:
        from chainermn.optimizers._sharded_states.sharded_update import ShardedUpdate
        stepper = ShardedUpdate(communicator, settings.caller)
    optimizer = MultiNodeOptimizer(actual_optimizer, communicator, zero_fill, averaging,
                                   Accumulation(n_accumulations), stepper, settings)
    if environment.text(environment.RECORD):
        from chainermn._records.run_record import record_by_environment
        with raise_on_all_ranks(communicator, 'create_multi_node_optimizer'):
            record_by_environment(optimizer, environment.text(environment.RECORD),
                                  environment.text(environment.RECORD_DETAILS))
    return optimizer


def _checked_number(n_accumulations: Object) -> int:
    if not is_integer(n_accumulations):
        raise TypeError(f'n_accumulations must be a positive integer, not {n_accumulations!r}')
    number = operator.index(n_accumulations)
    if number < 1:
        raise ValueError(f'n_accumulations must be a positive integer, not {number}')
    return number


def _checked_size(bucket_mb: object) -> int:
    """Check ``bucket_mb`` and convert it to bytes."""
    if isinstance(bucket_mb, bool) or not isinstance(bucket_mb, (int, float)):
        raise TypeError(f'bucket_mb must be a positive number, not {bucket_mb!r}')
    if not 0 < bucket_mb < float('inf'):
        raise ValueError(f'bucket_mb must be a positive number, not {bucket_mb}')
    return max(1, int(bucket_mb * 2**20))
