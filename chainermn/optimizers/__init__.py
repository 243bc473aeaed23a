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
from chainermn.optimizers._gradient_averaging import GradientAveraging, takes
from chainermn.optimizers._multi_node_optimizer import MultiNodeOptimizer
from chainermn.optimizers._optimizer_proxy import OptimizerProxy
from chainermn.optimizers._optimizer_settings import OptimizerSettings

if TYPE_CHECKING:
    from chainermn.communicators.compression import Compressor, PowerSGD

__all__ = ['MultiNodeOptimizer', 'create_multi_node_optimizer', 'is_elementwise']

_MultiNodeOptimizer = MultiNodeOptimizer  # the name in ChainerMN 7, from which some programs derive


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
    ``add_hook``, ``serialize``, ...) belong to the actual optimizer, but ``update`` averages.
    The proxy is not an instance of :class:`chainer.Optimizer`; Chainer's updaters accept it.

    ``proxy.update(lossfun, *args)`` is collective: every rank calls it. It computes this rank's
    gradients, replaces them by their mean over all ranks, and lets the actual optimizer step.
    So hooks such as ``GradientClipping`` use the mean gradients, which are identical on all ranks.
    Without ``lossfun`` it uses the current gradients, as any Chainer optimizer does.

    The first ``update`` does not step (``t`` stays 0): it only copies the parameters of rank 0 to
    all ranks. So does an ``update`` in which the set of initialized parameters has changed, since
    a layer such as ``Linear(None, 10)`` initializes itself on its first use, with different random
    numbers on each rank.

    Args:
        actual_optimizer: Chainer optimizer, before or after ``setup`` with a model. Without
            ``double_buffering``, ``overlap`` and ``shard_states``, any object with the methods
            ``setup(model)`` and ``update(None, *args)`` and the attribute ``target`` will do, such
            as a wrapper of another framework's optimizer.
        communicator: ChainerMN communicator.
        double_buffering: If true, gradients are exchanged while the next forward and backward
            run, and a step uses the gradients of the previous update. This can change accuracy.
            Only for communicators with ``can_overlap`` (``pure_nccl``). The first two updates do
            not step.
        zero_fill: If true, an initialized parameter that this rank's loss did not use (its
            gradient is ``None``) has a gradient of zero. If false it is skipped, and it is an
            error if some rank has a gradient for it. Uninitialized parameters are always skipped.
        n_accumulations: Number of updates per step: ``update`` accumulates this rank's gradients,
            and every ``n_accumulations``-th one averages them over these updates and all ranks,
            and steps. So two updates with ``n_accumulations=2`` are equal to one update with a
            batch of twice the size. The other updates end after backward: ``t`` does not change,
            hooks are not called, and the gradients are ``None`` afterwards. Without ``lossfun``,
            call ``cleargrads`` before each backward, as always. An update that broadcasts does not
            accumulate. The loss scale may change between updates. The accumulated gradients are
            saved with the optimizer. They belong to the
            rank: only a snapshot of each rank, as taken by the multi-node checkpointer, contains
            them for all ranks.
        compression: Encoding of the gradients: ``None``, ``'fp16'``, ``'bf16'``, ``'2bit'``,
            ``'powersgd'``, a dict such as ``{'type': '2bit', 'threshold': 0.5}``, or your own
            compressor; see :mod:`chainermn.communicators.compression`. With ``'2bit'`` and
            ``'powersgd'``, the gradients that were not sent yet are saved with the optimizer. They
            belong to the rank: only a snapshot of each rank, as taken by the multi-node
            checkpointer, contains them for all ranks. If another optimizer uses the same
            compressor object, and it has state, this optimizer gets a copy without state.
        overlap: If true, ``update(lossfun, ...)`` exchanges gradients in buckets while backward
            computes others, and waits for them before the step. The results are the same as
            without it; unlike with double buffering, each step uses the gradients of its own
            update. ``update()`` without ``lossfun`` exchanges all together. It needs a second
            communicator in the background, and as much memory as the gradients. If all ranks are
            on one node and need all its cores to compute, overlap cannot help, and everything is
            also exchanged together; ``'always'`` overlaps even then.
        bucket_mb: Size of the largest bucket, in units of 2**20 bytes: larger ones are exchanged
            more efficiently, smaller ones earlier. The first and the last ones are smaller.
        shard_states: If true, each rank keeps the state of the optimizer (such as Adam's moments)
            for its shard of the parameters only, updates this shard, and the ranks exchange the
            updated parameters (ZeRO stage 1). The results are the same as without it, some up to
            rounding. The gradients of other shards are undefined after an update; hooks that need
            them get them. Snapshots need the files of all ranks: use the multi-node checkpointer.
            See docs/sharded_states.md.
        compare_settings: If true, ranks compare hyperparameters (such as ``lr``), hooks, disabled
            parameters and ``t`` in each exchange, and raise an error if they differ, for example
            because an extension that changes ``lr`` was added on one rank only. Pass False if the
            differences are intended.

    Returns:
        The multi-node optimizer of this rank.

    Raises:
        TypeError: If ``actual_optimizer`` is not an optimizer, or already a multi-node optimizer,
            or cannot be used with these options; if ``communicator`` is not a communicator; or
            with ``shard_states``, if the optimizer has no update rules, or overrides
            ``GradientMethod.update``.
        ValueError: If ``double_buffering`` is not supported by the communicator, or is combined
            with ``n_accumulations`` or ``overlap``; if ``n_accumulations`` is not a positive
            integer, ``bucket_mb`` not a positive number, or ``compression`` invalid. In the first
            update, if ``n_accumulations``, ``double_buffering``, ``overlap``, ``bucket_mb``,
            ``shard_states`` or ``compare_settings`` differ between ranks. In ``update``, on all
            ranks, if the compared settings differ between ranks.

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
        if compressor is not None and not takes(communicator, compression=None):
            raise ValueError('compression is not supported by '
                             f'{type(communicator).__name__}: its multi_node_mean_grad takes no '
                             'compression argument. Add the argument, or omit compression.')
        if isinstance(compressor, compression_module.PowerSGD) and (
                double_buffering or (overlap and communicator._chainermn_channel.can_overlap)):
            raise ValueError("compression='powersgd' cannot be combined with double_buffering, nor "
                             'on pure_nccl with overlap')
        n_accumulations = _checked_number(n_accumulations)
        if double_buffering and n_accumulations > 1:
            raise ValueError('double_buffering=True cannot be combined with n_accumulations. '
                             'Use one of them.')
        if double_buffering and overlap:
            raise ValueError('double_buffering=True cannot be combined with overlap. '
                             'Use overlap=True; its steps use the gradients of their own update.')
        if not isinstance(overlap, bool) and overlap != 'always':
            raise ValueError(f"overlap must be True, False or 'always', not {overlap!r}")
        if not isinstance(shard_states, bool):
            raise TypeError(f'shard_states must be True or False, not {shard_states!r}')
        if shard_states and not has_plain_update(actual_optimizer):
            raise TypeError('shard_states=True needs a chainer.optimizer.GradientMethod that does '
                            'not override its method update, not a '
                            f'{type(actual_optimizer).__name__}')
        bucket_bytes = _checked_size(bucket_mb)
        if double_buffering and not communicator._chainermn_channel.can_overlap:
            raise ValueError('This communicator does not support double buffering. '
                             'Use pure_nccl, or double_buffering=False.')

        averaging: GradientAveraging
        options = actual_optimizer, communicator, zero_fill, compressor
        # Most programs need none of these modules.
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
            'compare_settings': str(bool(compare_settings))},
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
    """Return a size in bytes."""
    if isinstance(bucket_mb, bool) or not isinstance(bucket_mb, (int, float)):
        raise TypeError(f'bucket_mb must be a positive number, not {bucket_mb!r}')
    if not 0 < bucket_mb < float('inf'):
        raise ValueError(f'bucket_mb must be a positive number, not {bucket_mb}')
    return max(1, int(bucket_mb * 2**20))
