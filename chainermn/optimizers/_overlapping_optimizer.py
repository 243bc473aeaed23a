"""Overlap: gradients are exchanged while backward computes those of the layers before.

::

    backward    g4  g3      g2  g1
    buckets         [g4 g3]     [g2 g1]
    exchange            mean ......  mean ......
    step                                        with all means

Parameters are assigned to buckets in the order in which backward finishes them on rank 0 in the
first update, also after resuming.  The exchange of a bucket starts when its gradients and all
previous buckets are complete, so the order is the same on all ranks.  Gradients that are missing at
the end of backward, such as the gradients of a layer that this rank's loss did not use, are
exchanged then.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from chainermn._types import Array, Model, Object, Optimizer, Parameter, Variable, VariableNode
from chainermn.communicators.communicator_base import CommunicatorBase, GradientQueue
from chainermn.optimizers._gradient_watch import watch
from chainermn.optimizers._multi_node_optimizer import (
    Exchange,
    MultiNodeOptimizer,
    Shapes,
)
from chainermn.optimizers._optimizer_settings import Named

if TYPE_CHECKING:
    from chainermn.communicators.compression import Compressor, PowerSGD

#: Bytes of a bucket below which its exchange takes hardly less time.
_SMALLEST = 2**20


class _Buckets:
    """The buckets of an optimizer.  Not in the proxy, where assignment takes longer.

    Attributes:
        paths: The paths of the parameters of each bucket.
        are_assigned: Whether the parameters have been assigned to buckets, perhaps to none.
        queue: Averages the gradients, once parameters are assigned to buckets.
        order: Paths in the order in which backward finished them, in the last update.
        n_early: Buckets submitted during backward, in the last update.
        has_failed: Whether a failed update, of any optimizer, has left gradients in the queue.
        early: Gradients that were complete before the end of backward, by path.
        means: Of the gradients submitted in this update, by path.
        n_submitted: Buckets submitted in this update.
        late: Paths of gradients that changed after they were submitted.
    """

    queue: GradientQueue

    def __init__(self) -> None:
        self.paths: list[list[str]] = []
        self.are_assigned = False
        self.order: list[str] = []
        self.n_early = 0
        self.has_failed = False
        self.begin()

    def begin(self) -> None:
        """Begin with no gradients."""
        self.early: dict[str, Array] = {}
        self.means: dict[str, Array] = {}
        self.n_submitted = 0
        self.late: list[str] = []

    def check_previous(self) -> None:
        """Check whether the previous update finished."""
        self.has_failed = bool(self.paths) and self.queue.pending
        self.begin()

    def submit(self, gradients: dict[str, Array], compression: Compressor | PowerSGD | None
               ) -> None:
        """Start to average gradients."""
        if gradients:
            means = self.queue.submit(gradients, compression)
            self.means.update(zip(gradients, means, strict=True))


class _OverlappingOptimizer(MultiNodeOptimizer):
    """See :func:`chainermn.create_multi_node_optimizer`."""

    _bucket_bytes: int
    _always: bool  # overlap even if the exchange needs the cores that the ranks compute on
    _buckets: _Buckets

    def __init__(
        self, actual_optimizer: Optimizer, communicator: CommunicatorBase, zero_fill: bool,
        n_accumulations: int = 1, compression: Compressor | PowerSGD | None = None,
        bucket_bytes: int = 25 * 2**20, always: bool = False,
    ) -> None:
        super().__init__(actual_optimizer, communicator, zero_fill, n_accumulations, compression)
        self._bucket_bytes = bucket_bytes
        self._always = always
        self._buckets = _Buckets()

    @property
    def buckets(self) -> list[list[str]]:
        """The paths of the parameters of each bucket."""
        return self._buckets.paths

    @property
    def n_early(self) -> int:
        """Number of buckets submitted during backward, in the last update."""
        return self._buckets.n_early

    def setup(self, link: Model) -> MultiNodeOptimizer:
        self._buckets = _Buckets()
        return super().setup(link)

    def update(self, lossfun: Callable[..., Variable] | None = None, *args: Object, **kwds: Object
               ) -> None:
        self._buckets.check_previous()
        super().update(lossfun, *args, **kwds)

    def _flush(self, as_if_whole: bool) -> None:
        self._buckets.check_previous()
        super()._flush(as_if_whole)

    def _shadow(self, what: Exchange, layout: Shapes | None) -> None:
        self._buckets.check_previous()
        super()._shadow(what, layout)

    def _backward(self, loss: Variable, named: Named, is_exchanged: bool) -> None:
        buckets = self._buckets
        buckets.order = []
        params = _once(named)
        paths = {param.node: path for path, param in params.items()}
        is_early = is_exchanged and not buckets.has_failed
        missing = [set(bucket) for bucket in buckets.paths]
        bucket_of = {path: bucket for bucket in missing for path in bucket}

        def ready(node: VariableNode, gradient: Array) -> None:
            path = paths[node]
            buckets.order.append(path)
            if is_early and path in bucket_of:
                buckets.early[path] = gradient
                bucket_of[path].discard(path)
                while buckets.n_submitted < len(missing) and not missing[buckets.n_submitted]:
                    buckets.submit({
                        path: self._accumulation.completed(params[path], buckets.early[path])
                        for path in buckets.paths[buckets.n_submitted]}, self.compression)
                    buckets.n_submitted += 1

        with watch(loss, paths, ready):
            super()._backward(loss, named, is_exchanged)
        buckets.n_early = buckets.n_submitted
        buckets.late = [path for path in buckets.means
                        if params[path].grad is not buckets.early[path]]

    def _broadcast(self) -> None:
        super()._broadcast()
        self._assign()

    def _assign(self) -> None:
        """Assign the parameters to buckets.  Collective: every rank calls it."""
        # All ranks are here: create the queue, or drop gradients left by another optimizer.
        buckets = self._buckets
        buckets.are_assigned = True
        buckets.queue = self.communicator.mean_queue()
        buckets.queue.cancel()
        if not (buckets.queue.is_profitable or self._always):
            return
        params = _once(sorted(self.target.namedparams(include_uninit=False)))
        finished = [path for path in buckets.order if path in params]
        others = [path for path in params if path not in set(finished)]
        buckets.paths = self.communicator.bcast_obj([
            bucket for paths in (finished, others) for bucket in _assigned(
                {path: params[path].array.nbytes for path in paths}, self._bucket_bytes)])

    def _exchange(self) -> None:
        if not self._buckets.are_assigned:  # a resumed run does not broadcast
            self._assign()
        if not self._buckets.paths:
            super()._exchange()
            return
        self._exchange_all()
        self._buckets.begin()

    def _exchange_all(self) -> None:
        buckets, queue, target = self._buckets, self._buckets.queue, self.actual_optimizer.target
        gradients, is_notified = queue.gradients(
            target, self.zero_fill, self.compression, buckets.has_failed or bool(buckets.late))
        late: list[list[str] | None] = []
        if is_notified:
            late = self.communicator.allgather_obj(None if buckets.has_failed else buckets.late)
            if None in late:
                queue.cancel()
                buckets.begin()
                late = []
        for bucket in buckets.paths[buckets.n_submitted:]:
            buckets.submit({path: gradients[path] for path in bucket if path in gradients},
                           self.compression)
        buckets.submit({path: gradient for path, gradient in gradients.items()
                        if path not in buckets.means}, self.compression)
        # Gradients that changed on some rank: in later updates, exchange them after backward.
        if again := sorted({path for paths in late for path in paths or ()}):
            buckets.submit({path: gradients[path] for path in again}, self.compression)
            buckets.paths = [[path for path in bucket if path not in again]
                             for bucket in buckets.paths]
        queue.wait()
        if buckets.means:
            params = dict(target.namedparams(include_uninit=False))
            for path, mean in buckets.means.items():
                params[path].grad = mean
        queue.check(target)


def _once(named: Named) -> dict[str, Parameter]:
    """Return the initialized parameters by path, shared ones by their first path."""
    paths: dict[int, str] = {}
    return {path: param for path, param in named
            if param.is_initialized and paths.setdefault(id(param), path) == path}


def _assigned(sizes: dict[str, int], bucket_bytes: int) -> list[list[str]]:
    """Assign parameters of these sizes to buckets, in order.

    A larger parameter gets its own bucket, with small ones that follow, such as its bias.  The
    first buckets are smaller, each at most half of what was sent before, so that the exchange
    starts early.  The last buckets are smaller, each at most a third of what is left, because
    little of backward remains to hide their exchange.  None is made smaller than 1 MiB.
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
