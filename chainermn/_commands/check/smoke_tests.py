"""Smoke tests: create every communicator, check its results, and time it."""
from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import chainer
import numpy as np

from chainermn import communicators
from chainermn._commands.check.time_limit import TimeLimit
from chainermn._process import streams
from chainermn._types import Array, Model
from chainermn.communicators.communicator_base import CommunicatorBase

_BYTES = 16 * 2 ** 20  # size of the gradient in the bandwidth test
_REPEATS = 5  # the fastest run counts


class Result(NamedTuple):
    """The test result of one communicator, the same on all ranks."""

    name: str
    passed: bool
    error: str  # one line; empty if passed
    needs_gpu: bool
    latency: float | None = None  # seconds for an allreduce of one number
    bandwidth: float | None = None  # bytes per second when averaging a gradient


def run_all(limit: TimeLimit) -> list[Result]:
    """Test all communicators. Collective: every rank calls it.

    Args:
        limit: The time limit, which is given the name of each test.
    """
    results = []
    for name in communicators._CLASSES:
        limit.step = f'testing the communicator {name!r}'
        results.append(_test(name))
    return results


def _test(name: communicators.CommunicatorName) -> Result:
    needs_gpu = name in ('pure_nccl', 'non_cuda_aware')
    try:
        comm = communicators.create_communicator(name)
    except Exception as error:  # the same on all ranks
        lines = [line.strip() for line in str(error).splitlines()]
        if lines[-1].endswith('failed on all ranks)'):  # all for the same reason
            lines = lines[:1]
        return Result(name, False, '; '.join(lines), needs_gpu)
    try:
        failure = _failure(comm, name, needs_gpu)
    except Exception as error:  # possibly on this rank only
        failure = streams.one_line(error)
    failures = comm.mpi_comm.allgather(failure)
    if any(failures):
        text = '; '.join(f'rank {rank}: {failure}' for rank, failure in enumerate(failures)
                         if failure)
        return Result(name, False, text, needs_gpu)
    latency = bandwidth = None
    if comm.size > 1:
        one = _array(1, needs_gpu)
        latency = _seconds(
            comm, lambda: [comm.allreduce(one) for _ in range(20)], needs_gpu) / 20
        if name != 'dummy':  # it does not average gradients
            model = _model(comm.rank, _BYTES // 4, needs_gpu)
            bandwidth = _BYTES / _seconds(
                comm, lambda: comm.multi_node_mean_grad(model), needs_gpu)
    comm.finalize()
    return Result(name, True, '', needs_gpu, latency, bandwidth)


def _failure(comm: CommunicatorBase, name: str, on_device: bool) -> str:
    """Communicate arrays, objects and gradients; return the first error, or ''.

    Collective: every rank calls it.
    """
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
        return 'wrong sum of arrays'
    if objects != [str(rank) for rank in ranks]:
        return 'wrong objects from allgather_obj'
    if not np.allclose(float(model.w.grad.mean()), mean):
        return 'wrong mean of gradients'
    return ''


def _array(size: int, on_device: bool) -> Array:
    x = np.ones(size, np.float32)
    return chainer.backends.cuda.to_gpu(x) if on_device else x


def _model(value: float, size: int, on_device: bool) -> Model:
    model = chainer.Link()
    with model.init_scope():
        model.w = chainer.Parameter(_array(size, on_device))
    model.w.grad = _array(size, on_device) * np.float32(value)
    return model


def _seconds(comm: CommunicatorBase, run: Callable[[], object], on_device: bool) -> float:
    """Return the shortest time until all ranks and their devices have finished."""
    def finish() -> None:
        if on_device:
            import cupy

            cupy.cuda.Device().synchronize()
        comm.barrier()

    run()
    times = []
    for _ in range(_REPEATS):
        finish()
        start = time.perf_counter()
        run()
        finish()
        times.append(time.perf_counter() - start)
    return float(comm.mpi_comm.bcast(min(times)))
