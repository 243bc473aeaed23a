"""Overlap: gradients are exchanged while backward computes those of the layers before.

::

    backward    g4  g3      g2  g1
    buckets         [g4 g3]     [g2 g1]
    exchange            mean ......  mean ......
    step                                        with all means

Parameters are assigned to buckets in the order in which backward finishes them on rank 0 in the
first update.  The exchange of a bucket starts when its gradients and all previous buckets are
complete, so the order is the same on all ranks.  Gradients that are missing at the end of backward,
such as the gradients of a layer that this rank's loss did not use, are exchanged then.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from chainermn._types import Array, Model, Object, Optimizer, Parameter, Variable, VariableNode
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.optimizers._gradient_watch import watch
from chainermn.optimizers._multi_node_optimizer import (
    Exchange,
    MultiNodeOptimizer,
    Named,
    Shapes,
)

if TYPE_CHECKING:
    from chainermn.communicators.compression import Compressor, PowerSGD

#: Bytes of a bucket below which its exchange takes hardly less time.
_SMALLEST = 2**20


class _OverlappingOptimizer(MultiNodeOptimizer):
    """See :func:`chainermn.create_multi_node_optimizer`."""

    _bucket_bytes: int
    _always: bool  # overlap even if the exchange needs the cores that the ranks compute on
    buckets: list[list[str]]  # paths of parameters
    n_early: int  # buckets submitted during backward, in the last update
    _order: list[str]  # paths in the order in which backward finished them, in the last update
    _early: dict[str, Array]  # gradients that were complete before the end of backward, by path
    _means: dict[str, Array]  # of the gradients submitted in this update, by path
    _n_submitted: int  # buckets submitted in this update
    _late: list[str]  # paths of gradients that changed after they were submitted
    _failed: bool  # whether a failed update, of any optimizer, has left gradients in the queue

    def __init__(
        self, actual_optimizer: Optimizer, communicator: CommunicatorBase, zero_fill: bool,
        n_accumulations: int = 1, compression: Compressor | PowerSGD | None = None,
        bucket_bytes: int = 25 * 2**20, always: bool = False,
    ) -> None:
        super().__init__(actual_optimizer, communicator, zero_fill, n_accumulations, compression)
        self._bucket_bytes = bucket_bytes
        self._always = always
        self.buckets, self.n_early, self._order, self._failed = [], 0, [], False
        self._begin()

    def _check_previous(self) -> None:
        """Check whether the previous update finished."""
        self._failed = bool(self.buckets) and self.communicator.mean_queue().pending
        self._begin()

    def _begin(self) -> None:
        self._early, self._means, self._n_submitted, self._late = {}, {}, 0, []

    def setup(self, link: Model) -> MultiNodeOptimizer:
        self.buckets, self._order = [], []
        return super().setup(link)

    def update(self, lossfun: Callable[..., Variable] | None = None, *args: Object, **kwds: Object
               ) -> None:
        self._check_previous()
        super().update(lossfun, *args, **kwds)

    def _flush(self, as_if_whole: bool) -> None:
        self._check_previous()
        super()._flush(as_if_whole)

    def _shadow(self, what: Exchange, layout: Shapes | None) -> None:
        self._check_previous()
        super()._shadow(what, layout)

    def _backward(self, loss: Variable, named: Named, is_exchanged: bool) -> None:
        self._order = []
        params = _once(named)
        paths = {param.node: path for path, param in params.items()}
        is_early = is_exchanged and not self._failed
        missing = [set(bucket) for bucket in self.buckets]
        bucket_of = {path: bucket for bucket in missing for path in bucket}

        def ready(node: VariableNode, gradient: Array) -> None:
            path = paths[node]
            self._order.append(path)
            if is_early and path in bucket_of:
                self._early[path] = gradient
                bucket_of[path].discard(path)
                while self._n_submitted < len(missing) and not missing[self._n_submitted]:
                    self._submit({
                        path: self._accumulation.completed(params[path], self._early[path])
                        for path in self.buckets[self._n_submitted]})
                    self._n_submitted += 1

        with watch(loss, paths, ready):
            super()._backward(loss, named, is_exchanged)
        self.n_early = self._n_submitted
        self._late = [path for path in self._means if params[path].grad is not self._early[path]]

    def _submit(self, gradients: dict[str, Array]) -> None:
        if gradients:
            means = self.communicator.mean_queue().submit(gradients, self.compression)
            self._means.update(zip(gradients, means, strict=True))

    def _broadcast(self) -> None:
        super()._broadcast()
        # All ranks are here: create the queue, or drop gradients left by another optimizer.
        queue = self.communicator.mean_queue()
        queue.cancel()
        if not (queue.is_profitable or self._always):
            return
        params = _once(sorted(self.target.namedparams(include_uninit=False)))
        finished = [path for path in self._order if path in params]
        others = [path for path in params if path not in set(finished)]
        buckets = _assigned({path: params[path].array.nbytes for path in finished},
                            self._bucket_bytes)
        buckets += _assigned({path: params[path].array.nbytes for path in others},
                             self._bucket_bytes)
        self.buckets = self.communicator.bcast_obj(buckets)

    def _exchange(self) -> None:
        if not self.buckets:
            super()._exchange()
            return
        self._exchange_all()
        self._begin()

    def _exchange_all(self) -> None:
        queue = self.communicator.mean_queue()
        some_late, some_failed = self.communicator.allreduce(
            np.array([len(self._late), self._failed]), op='max')
        if some_failed:
            queue.cancel()
            self._begin()
            some_late = False
        gradients = queue.gradients(self.target, self.zero_fill, self.compression)
        for bucket in self.buckets[self._n_submitted:]:
            self._submit({path: gradients[path] for path in bucket if path in gradients})
        self._submit({path: gradient for path, gradient in gradients.items()
                      if path not in self._means})
        if some_late:
            self._submit_again(gradients)
        queue.wait()
        if self._means:
            params = dict(self.target.namedparams(include_uninit=False))
            for path, mean in self._means.items():
                params[path].grad = mean
        queue.check(self.target)

    def _submit_again(self, gradients: dict[str, Array]) -> None:
        """Exchange gradients that changed on some rank; in later updates, only after backward."""
        late = sorted(set().union(*self.communicator.allgather_obj(self._late)))
        self._submit({path: gradients[path] for path in late})
        self.buckets = [[path for path in bucket if path not in late] for bucket in self.buckets]


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
