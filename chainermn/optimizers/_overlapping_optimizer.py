"""Overlap: gradients are exchanged while backward computes those of the layers before.

::

    backward    g4  g3      g2  g1
    buckets         [g4 g3]     [g2 g1]
    exchange            mean ......  mean ......
    step                                        with all means

The parameters are dealt into buckets in the order in which backward finishes them on rank 0, in the
first update.  The exchange of a bucket begins once its gradients, and those of the buckets before
it, are there; so it is the same order on all ranks.  What is not there when backward ends, such as
the gradients of a layer that this rank's loss did not use, is exchanged then.
"""
from __future__ import annotations

from typing import Any

import numpy as np

from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.optimizers._gradient_watch import watch
from chainermn.optimizers._multi_node_optimizer import Named, _MultiNodeOptimizer


class _OverlappingOptimizer(_MultiNodeOptimizer):
    """See :func:`chainermn.create_multi_node_optimizer`."""

    bucket_bytes: int
    always: bool  # even where exchanging takes from all ranks what they compute with
    buckets: list[list[str]]  # paths of parameters
    n_early: int  # buckets whose exchange began during backward, in the last update
    _order: list[str]  # in which backward finished the gradients, the last time
    _early: dict[str, Any]  # gradients that are there before backward has ended, by path
    _means: dict[str, Any]  # of what was put in the queue in this update, by path
    _n_put: int  # how many buckets were
    _late: list[str]  # of which another gradient was put than backward left
    _failed: bool  # whether an update, of any optimizer, has left something in the queue

    def __init__(
        self, actual_optimizer: Any, communicator: CommunicatorBase, zero_fill: bool,
        n_accumulations: int = 1, compression: Any = None, bucket_bytes: int = 25 * 2**20,
        always: bool = False,
    ) -> None:
        super().__init__(actual_optimizer, communicator, zero_fill, n_accumulations, compression)
        self.bucket_bytes = bucket_bytes
        self.always = always
        self.buckets, self.n_early, self._order, self._failed = [], 0, [], False
        self._begin()

    def _look_back(self) -> None:
        """Before something new: has what was put come to its end?"""
        self._failed = bool(self.buckets) and self.communicator.mean_queue().pending
        self._begin()

    def _begin(self) -> None:
        self._early, self._means, self._n_put, self._late = {}, {}, 0, []

    def setup(self, link: Any) -> Any:
        self.buckets, self._order = [], []
        return super().setup(link)

    def update(self, lossfun: Any = None, *args: Any, **kwds: Any) -> None:
        self._look_back()
        super().update(lossfun, *args, **kwds)

    def flush(self, as_if_whole: bool) -> None:
        self._look_back()
        super().flush(as_if_whole)

    def shadow(self, what: str, layout: dict[str, Any] | None) -> None:
        self._look_back()
        super().shadow(what, layout)

    def _backward(self, loss: Any, named: Named, is_exchanged: bool) -> None:
        self._order = []
        params = _once(named)
        paths = {param.node: path for path, param in params.items()}
        is_early = is_exchanged and not self._failed
        missing = [set(bucket) for bucket in self.buckets]
        bucket_of = {path: bucket for bucket in missing for path in bucket}

        def ready(node: Any, gradient: Any) -> None:
            path = paths[node]
            self._order.append(path)
            if is_early and path in bucket_of:
                self._early[path] = gradient
                bucket_of[path].discard(path)
                while self._n_put < len(missing) and not missing[self._n_put]:
                    self._put({path: self.accumulation.completed(params[path], self._early[path])
                               for path in self.buckets[self._n_put]})
                    self._n_put += 1

        with watch(loss, paths, ready):
            super()._backward(loss, named, is_exchanged)
        self.n_early = self._n_put
        self._late = [path for path in self._means if params[path].grad is not self._early[path]]

    def _put(self, gradients: dict[str, Any]) -> None:
        if gradients:
            means = self.communicator.mean_queue().put(gradients, self.compression)
            self._means.update(zip(gradients, means, strict=True))

    def _broadcast(self) -> None:
        super()._broadcast()
        # The queue is made, or rid of what another optimizer has left, while all ranks are here.
        queue = self.communicator.mean_queue()
        queue.cancel()
        if not (queue.can_hide or self.always):
            return
        params = _once(sorted(self.target.namedparams(include_uninit=False)))
        finished = [path for path in self._order if path in params]
        others = [path for path in params if path not in set(finished)]
        buckets = _dealt({path: params[path].array.nbytes for path in finished},
                         self.bucket_bytes)
        buckets += _dealt({path: params[path].array.nbytes for path in others}, self.bucket_bytes)
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
        gradients = queue.agree(self.target, self.zero_fill, self.compression)
        for bucket in self.buckets[self._n_put:]:
            self._put({path: gradients[path] for path in bucket if path in gradients})
        self._put({path: gradient for path, gradient in gradients.items()
                   if path not in self._means})
        if some_late:
            self._put_again(gradients)
        queue.wait()
        if self._means:
            params = dict(self.target.namedparams(include_uninit=False))
            for path, mean in self._means.items():
                params[path].grad = mean
        queue.check(self.target)

    def _put_again(self, gradients: dict[str, Any]) -> None:
        """Exchanges what was wrong on some rank, and from now on waits for the end for it."""
        late = sorted(set().union(*self.communicator.allgather_obj(self._late)))
        self._put({path: gradients[path] for path in late})
        self.buckets = [[path for path in bucket if path not in late] for bucket in self.buckets]


def _once(named: Named) -> dict[str, Any]:
    """The parameters by path; one that has several has the first."""
    paths: dict[int, str] = {}
    return {path: param for path, param in named
            if param.is_initialized and paths.setdefault(id(param), path) == path}


def _dealt(sizes: dict[str, int], bucket_bytes: int) -> list[list[str]]:
    """Deals what has those sizes into buckets, in order; a large one has a bucket of its own."""
    buckets: list[list[str]] = []
    room = 0
    for path, size in sizes.items():
        if size > room or not buckets:
            buckets.append([])
            room = bucket_bytes
        buckets[-1].append(path)
        room -= size
    return buckets
