"""Overlap: the backward pass continues while gradients of later layers are averaged.

::

    backward    g4  g3      g2  g1
    buckets         [g4 g3]     [g2 g1]
    average             mean ......  mean ......
    step                                        with all means

Parameters are assigned to buckets in the order in which the backward pass finishes their gradients
on rank 0 in the first update of each run, including resumed runs. A bucket is averaged once its
gradients and all previous buckets are complete, so the order is the same on all ranks. Gradients
that are still missing at the end of the backward pass, such as the gradients of a layer that this
rank's loss did not use, are averaged at that time.
"""
from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from chainermn._gradients import loss_scale
from chainermn._types import Array, Optimizer, Variable, VariableNode
from chainermn.communicators.communicator_base import CommunicatorBase, GradientQueue
from chainermn.optimizers._gradient_averaging import Completed, GradientAveraging
from chainermn.optimizers._gradient_watch import watch
from chainermn.optimizers._optimizer_proxy import by_first_path
from chainermn.optimizers._optimizer_settings import Named
from chainermn.optimizers._sharded_states.partition import Shard

if TYPE_CHECKING:
    from chainermn.communicators.compression import Compressor, PowerSGD

#: Bytes of the smallest useful bucket. Averaging a smaller one takes nearly as long.
_SMALLEST = 2**20


class Overlapped(GradientAveraging):
    """Averages gradients in buckets during the backward pass, or after it if that is faster.

    Args:
        actual_optimizer, communicator, zero_fill, compression: See :class:`GradientAveraging`.
        bucket_bytes: Size of the largest bucket.
        always: Whether to overlap even if averaging needs the cores on which the ranks compute.

    Attributes:
        buckets: The paths of the parameters of each bucket.
        n_early: Number of buckets that the last update submitted during the backward pass.
    """

    public = *GradientAveraging.public, 'buckets', 'n_early'

    _queue: GradientQueue  # created when parameters are assigned to buckets

    def __init__(self, actual_optimizer: Optimizer, communicator: CommunicatorBase, zero_fill: bool,
                 compression: Compressor | PowerSGD | None, bucket_bytes: int, always: bool
                 ) -> None:
        super().__init__(actual_optimizer, communicator, zero_fill, compression)
        self._bucket_bytes = bucket_bytes
        self._always = always
        self._clear()

    def _clear(self) -> None:
        self.buckets: list[list[str]] = []
        #: Whether the parameters have been assigned to buckets. There may be no buckets.
        self._are_assigned = False
        self.n_early = 0
        #: Paths in the order in which the last backward pass finished their gradients.
        self._order: list[str] = []
        #: Whether a failed update of any optimizer has left gradients in the queue.
        self._has_failed = False
        self._forget()

    def _forget(self) -> None:
        """Discard the gradients of an update."""
        #: Gradients that were complete before the end of the backward pass, by path.
        self._early: dict[str, Array] = {}
        #: Means of the submitted gradients, by path.
        self._means: dict[str, Array] = {}
        self._n_submitted = 0  # number of buckets
        #: Paths of gradients that changed after they were submitted.
        self._late: list[str] = []

    def reset(self) -> None:
        self._clear()
        super().reset()

    def begin(self) -> None:
        self._has_failed = bool(self.buckets) and self._queue.pending
        if not self._has_failed:
            self._commit()
        self._forget()

    def backward(self, loss: Variable, named: Named, completed: Completed | None) -> None:
        self._order = []
        params = by_first_path(named)
        paths = {param.node: path for path, param in params.items()}
        missing = [set(bucket) for bucket in self.buckets]
        bucket_of = {path: bucket for bucket in missing for path in bucket}
        scale = getattr(self.actual_optimizer, '_loss_scale', None)  # scale of these gradients

        def ready(node: VariableNode, gradient: Array) -> None:
            path = paths[node]
            self._order.append(path)
            if completed is not None and not self._has_failed and path in bucket_of:
                self._early[path] = gradient
                bucket_of[path].discard(path)
                while self._n_submitted < len(missing) and not missing[self._n_submitted]:
                    self._submit({path: completed(params[path], self._early[path], scale)
                                  for path in self.buckets[self._n_submitted]}, scale)
                    self._n_submitted += 1

        with watch(loss, paths, ready):
            super().backward(loss, named, completed)
        self.n_early = self._n_submitted
        self._late = [path for path in self._means
                      if params[path].grad is not self._early[path]]

    def broadcast(self) -> None:
        super().broadcast()
        self._assign()

    def _assign(self) -> None:
        """Assign the parameters to buckets. Collective: every rank calls it."""
        self._are_assigned = True
        # Every rank calls this: create the queue, or drop gradients left by another optimizer.
        self._queue = self.communicator.mean_queue()
        self._queue.cancel()
        if not (self._queue.is_profitable or self._always):
            return
        target = self.actual_optimizer.target
        params = by_first_path(sorted(target.namedparams(include_uninit=False)))
        finished = [path for path in self._order if path in params]
        others = [path for path in params if path not in set(finished)]
        self.buckets = self.communicator.bcast_obj([
            bucket for paths in (finished, others) for bucket in _assigned(
                {path: params[path].array.nbytes for path in paths}, self._bucket_bytes)])

    def _rollback(self, *args: Collection[str]) -> None:
        if not (self.buckets and self._queue.pending):  # otherwise, _mean() cancels and rolls back
            super()._rollback(*args)

    def _mean(self, shards: Sequence[Shard] | None) -> None:
        if not self._are_assigned:  # a resumed run does not broadcast
            self._assign()
        if not self.buckets:
            super()._mean(shards)
            return
        target = self.actual_optimizer.target
        gradients, is_notified = self._queue.gradients(
            target, self.zero_fill, self.compression, self._has_failed or bool(self._late))
        late: list[list[str] | None] = []
        if is_notified:
            late = self.communicator.allgather_obj(None if self._has_failed else self._late)
            if None in late:
                self._queue.cancel()
                self._rollback()
                self._forget()
                late = []
        scale = loss_scale.unify(target.params())
        for bucket in self.buckets[self._n_submitted:]:
            self._submit({path: gradients[path] for path in bucket if path in gradients}, scale)
        self._submit({path: gradient for path, gradient in gradients.items()
                      if path not in self._means}, scale)
        # These gradients changed on some rank. In later updates, average them after the backward
        # pass.
        if again := sorted({path for paths in late for path in paths or ()}):
            self._queue.wait()
            self._rollback(again)
            self._submit({path: gradients[path] for path in again}, scale)
            self.buckets = [[path for path in bucket if path not in again]
                            for bucket in self.buckets]
        self._queue.wait()
        if self._means:
            params = dict(target.namedparams(include_uninit=False))
            for path, mean in self._means.items():
                params[path].grad = mean
        self._queue.check(target)
        self._forget()

    def _submit(self, gradients: dict[str, Array], scale: float | None) -> None:
        """Start to average gradients."""
        if gradients:
            means = self._queue.submit(gradients, self.compression, scale)
            self._means.update(zip(gradients, means, strict=True))


def _assigned(sizes: dict[str, int], bucket_bytes: int) -> list[list[str]]:
    """Assign parameters of these sizes to buckets, in order.

    A parameter that is larger than a bucket gets a bucket together with small parameters that
    follow it, such as its bias. The first buckets are smaller, so that averaging starts early: each
    is at most half as large as all previous buckets together. The last buckets are also smaller,
    because little of the backward pass is left to hide their averaging: each is at most a third of
    the remaining parameters. No bucket is made smaller than 1 MiB.
    """
    buckets: list[list[str]] = []
    total = sum(sizes.values())
    free = assigned = 0
    for path, size in sizes.items():
        if not buckets or size > free:
            buckets.append([])
            small = min(assigned // 2, (total - assigned) // 3)
            free = min(bucket_bytes, max(_SMALLEST, small, size + size // 8))
        buckets[-1].append(path)
        free -= size
        assigned += size
    return buckets
