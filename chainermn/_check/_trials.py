"""Tries each communicator: makes it, lets it exchange, compares, and takes the time."""
from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import chainer
import numpy as np

from chainermn import communicators
from chainermn._check._limit import Limit

_BYTES = 16 * 2 ** 20  # of the gradient whose mean is timed
_TIMES = 5  # of which the best counts


class Trial(NamedTuple):
    """How a communicator did; the same on all ranks."""

    name: str
    works: bool
    said: str  # why not, in a line
    needs_device: bool
    latency: float | None = None  # seconds for a sum of one number over all ranks
    bandwidth: float | None = None  # bytes of a gradient per second


def all_communicators(limit: Limit) -> list[Trial]:
    """Tries them all.  Collective: every rank calls it."""
    trials = []
    for name in communicators._CLASSES:
        limit.stage = f'trying the communicator {name!r}'
        trials.append(_try(name))
    return trials


def _try(name: communicators.CommunicatorName) -> Trial:
    needs_device = name in ('pure_nccl', 'non_cuda_aware')
    try:
        comm = communicators.create_communicator(name)
    except Exception as error:  # the same one on all ranks
        lines = [line.strip() for line in str(error).splitlines()]
        if lines[-1].endswith('was refused on all ranks)'):  # for one reason
            lines = lines[:1]
        return Trial(name, False, '; '.join(lines), needs_device)
    try:
        wrong = _what_is_wrong(comm, name, needs_device)
    except Exception as error:  # of this rank only, perhaps
        wrong = ' '.join(f'{type(error).__name__}: {error}'.split())
    faults = comm.mpi_comm.allgather(wrong)
    if any(faults):
        said = '; '.join(f'rank {rank}: {fault}' for rank, fault in enumerate(faults) if fault)
        return Trial(name, False, said, needs_device)
    latency = bandwidth = None
    if comm.size > 1:
        one = _array(1, needs_device)
        latency = _seconds(comm, lambda: [comm.allreduce(one) for _ in range(20)]) / 20
        if name != 'dummy':  # which exchanges no gradients
            model = _model(comm.rank, _BYTES // 4, needs_device)
            bandwidth = _BYTES / _seconds(comm, lambda: comm.multi_node_mean_grad(model))
    comm.finalize()
    return Trial(name, True, '', needs_device, latency, bandwidth)


def _what_is_wrong(comm: Any, name: str, on_device: bool) -> str:
    """Lets arrays, objects and gradients travel.  Collective: every rank calls it."""
    ranks = range(comm.size)
    if on_device:
        import cupy

        cupy.cuda.Device(comm.intra_rank % cupy.cuda.runtime.getDeviceCount()).use()
    total = comm.allreduce(_array(1000, on_device) * (comm.rank + 1))
    objects = comm.allgather_obj(str(comm.rank))
    model = _model(comm.rank, 1000, on_device)
    comm.multi_node_mean_grad(model)
    mean = comm.rank if name == 'dummy' else sum(ranks) / comm.size
    if not bool((total == sum(ranks) + comm.size).all()):
        return 'the sum of arrays is wrong'
    if objects != [str(rank) for rank in ranks]:
        return 'objects arrive wrong'
    if not np.allclose(float(model.w.grad.mean()), mean):
        return 'the mean of gradients is wrong'
    return ''


def _array(size: int, on_device: bool) -> Any:
    x = np.ones(size, np.float32)
    return chainer.backends.cuda.to_gpu(x) if on_device else x


def _model(value: float, size: int, on_device: bool) -> Any:
    model = chainer.Link()
    with model.init_scope():
        model.w = chainer.Parameter(_array(size, on_device))
    model.w.grad = _array(size, on_device) * np.float32(value)
    return model


def _seconds(comm: Any, act: Callable[[], Any]) -> float:
    """How long it takes at best, until all ranks are done."""
    def finish() -> None:
        if comm.has_nccl:
            import cupy

            cupy.cuda.Device().synchronize()
        comm.barrier()

    act()
    times = []
    for _ in range(_TIMES):
        finish()
        start = time.perf_counter()
        act()
        finish()
        times.append(time.perf_counter() - start)
    return float(comm.mpi_comm.bcast(min(times)))
