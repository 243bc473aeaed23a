"""Batch normalization with the statistics of the batches of all ranks."""
from __future__ import annotations

from typing import Any

import chainer
import numpy as np
from chainer.functions.normalization import batch_normalization as chainer_bn


def get_communication_backend(comm: Any, communication_backend: str = 'auto') -> str:
    """Says by what the statistics travel.

    Args:
        comm: ChainerMN communicator.
        communication_backend: ``'mpi'``, ``'nccl'`` or ``'auto'``.

    Returns:
        ``'mpi'`` or ``'nccl'``; for ``'auto'`` NCCL if the communicator has it.

    Raises:
        ValueError: If the communicator has no such backend.
    """
    backends = ('mpi', 'nccl') if comm.has_nccl else ('mpi',)
    if communication_backend == 'auto':
        return backends[-1]
    if communication_backend not in ('mpi', 'nccl'):
        raise ValueError(f"communication_backend has to be 'auto', 'mpi' or 'nccl', not "
                         f'{communication_backend!r}')
    if communication_backend not in backends:
        raise ValueError(f'nccl is not supported by {type(comm).__name__}; use pure_nccl, or '
                         "communication_backend='auto'")
    return communication_backend


class MultiNodeBNImplSelector:
    """Makes Chainer's batch normalization use the statistics of all ranks.

    An ``impl_selector`` of Chainer's ``BatchNormalization`` function node.

    Args:
        comm: ChainerMN communicator.
        communication_backend_name: As :func:`get_communication_backend` returns it.
    """

    def __init__(self, comm: Any, communication_backend_name: str) -> None:
        self.comm = comm
        self.communication_backend_name = communication_backend_name

    def __call__(self, batch_norm_func: Any, inputs: Any) -> Any:
        return _MultiNodeBatchNormalization(self.comm, self.communication_backend_name)


class _MultiNodeBatchNormalization(chainer_bn.GeneralBatchNormalizationImpl):
    r"""One exchange forward and one backward.

    Forward merges the count :math:`n_r`, mean :math:`\mu_r` and variance :math:`\sigma_r^2` of each
    rank, which is stable where the difference of mean square and squared mean is not (Chan, Golub
    and LeVeque, 1983):

    .. math::
        \mu = \sum_r n_r \mu_r / n, \qquad
        \sigma^2 = \sum_r n_r \bigl(\sigma_r^2 + (\mu_r - \mu)^2\bigr) / n
    """

    def __init__(self, comm: Any, backend: str) -> None:
        self._comm = comm
        # NCCL would take arrays on a device; MPI takes those on the host.
        self._is_through_host = backend == 'mpi' and comm.has_nccl

    def _to_send(self, x: Any) -> Any:
        if self._is_through_host and chainer.backend.get_array_module(x) is not np:
            return x.get()
        return x

    def get_mean_and_var(self, axis: Any, gamma: Any, x: Any, xp: Any, interm_dtype: Any) -> Any:
        dtype = np.promote_types(interm_dtype, np.float32)
        count = _count(x.shape, axis)
        if count:
            mean, var = x.mean(axis=axis, dtype=dtype), x.var(axis=axis, dtype=dtype)
        else:
            shape = tuple(n for i, n in enumerate(x.shape) if i not in axis)
            mean, var = xp.zeros(shape, dtype), xp.zeros(shape, dtype)
        mine = xp.concatenate([xp.full(1, count, dtype), mean.ravel(), var.ravel()])
        parts = self._comm.allgather(self._to_send(mine))
        if len({part.size for part in parts}) > 1:
            raise ValueError(
                'multi-node batch normalization refused: the number of channels differs\n'
                + '\n'.join(f'  rank {rank}: {part.size // 2}' for rank, part in enumerate(parts))
                + '\nAll ranks need the same model.')
        table = xp.stack([xp.asarray(part) for part in parts])  # (rank, 1 + 2 * channels)
        weights = table[:, :1] / table[:, :1].sum()
        means, variances = table[:, 1:1 + mean.size], table[:, 1 + mean.size:]
        self._total = table[:, 0].sum()
        merged = (weights * means).sum(axis=0)
        spread = (weights * (variances + (means - merged) ** 2)).sum(axis=0)
        return (merged.reshape(mean.shape).astype(interm_dtype),
                spread.reshape(mean.shape).astype(interm_dtype))

    def backward(self, axis: Any, gamma: Any, gy: Any, x: Any, x_layout: Any, xp: Any,
                 expander: Any, mean: Any, inv_std: Any, eps: Any, var: Any,
                 forward_data: Any) -> Any:
        if chainer.config.enable_backprop:
            raise RuntimeError('multi-node batch normalization has no second derivative; run '
                               'backward without enable_double_backprop')
        dtype = np.promote_types(np.promote_types(x.dtype, gamma.dtype), np.float32)
        x_hat = (x - mean[expander]) * inv_std[expander]
        gbeta = gy.sum(axis=axis, dtype=dtype)
        ggamma = (gy * x_hat).sum(axis=axis, dtype=dtype)
        sums = xp.asarray(self._comm.allreduce(self._to_send(xp.stack([gbeta, ggamma]))))
        gbeta, ggamma = sums[0], sums[1]
        gx = (gamma * inv_std)[expander] * (
            gy - (x_hat * ggamma[expander] + gbeta[expander]) / self._total)
        # The optimizer averages the gradients of all ranks; these are averages already.
        return (gx.astype(x.dtype, copy=False), None,
                (ggamma / self._comm.size).astype(gamma.dtype, copy=False),
                (gbeta / self._comm.size).astype(gamma.dtype, copy=False))


def _count(shape: tuple[int, ...], axis: Any) -> int:
    count = 1
    for i in axis:
        count *= shape[i]
    return count
