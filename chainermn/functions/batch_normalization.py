"""Batch normalization with statistics over the batches of all ranks."""
from __future__ import annotations

import warnings
from math import prod
from types import ModuleType
from typing import Literal, cast

import chainer
import numpy as np
from chainer.functions.normalization import batch_normalization as chainer_bn

from chainermn._types import Array, ArrayModule, FunctionNode, VariableOrArray
from chainermn.communicators._recognize import as_communicator
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.functions import _batch_norm_on_device, _batch_norm_on_host
from chainermn.functions._batch_norm_on_host import Expander

#: Library that sends the statistics.
Backend = Literal['mpi', 'nccl']


def get_communication_backend(comm: CommunicatorBase, communication_backend: str = 'auto'
                              ) -> Backend:
    """Select the library that sends the statistics.

    Args:
        comm: ChainerMN communicator.
        communication_backend: ``'mpi'``, ``'nccl'`` or ``'auto'``.

    Returns:
        ``'mpi'`` or ``'nccl'``. ``'auto'`` selects NCCL if the communicator supports it.

    Raises:
        ValueError: If the backend is unknown, or the communicator does not support it.
    """
    comm = as_communicator(comm, 'multi-node batch normalization')
    if communication_backend == 'auto':
        return 'nccl' if comm._chainermn_channel.has_nccl else 'mpi'
    if communication_backend not in ('mpi', 'nccl'):
        raise ValueError(f"communication_backend must be 'auto', 'mpi' or 'nccl', not "
                         f'{communication_backend!r}')
    if communication_backend == 'nccl' and not comm._chainermn_channel.has_nccl:
        raise ValueError(f'nccl is not supported by {type(comm).__name__}. Use pure_nccl or '
                         "communication_backend='auto'.")
    return cast(Backend, communication_backend)


class MultiNodeBNImplSelector:
    """Makes Chainer's batch normalization use the statistics of all ranks.

    An ``impl_selector`` for Chainer's ``BatchNormalization`` function node.

    Args:
        comm: ChainerMN communicator.
        communication_backend_name: The result of :func:`get_communication_backend`.
    """

    def __init__(self, comm: CommunicatorBase, communication_backend_name: Backend) -> None:
        self.comm = as_communicator(comm, 'multi-node batch normalization')
        self.communication_backend_name = communication_backend_name

    def __call__(self, batch_norm_func: FunctionNode, inputs: tuple[VariableOrArray, ...]
                 ) -> _MultiNodeBatchNormalization:
        return _MultiNodeBatchNormalization(self.comm, self.communication_backend_name)


class _MultiNodeBatchNormalization(chainer_bn.GeneralBatchNormalizationImpl):
    r"""Communicates once per forward pass (all-gather) and once per backward pass (all-reduce).

    Forward merges the count :math:`n_r`, the mean :math:`\mu_r` and the variance
    :math:`\sigma_r^2` of each rank (Chan, Golub and LeVeque, 1983). This is numerically stable,
    unlike the difference between the mean of the squares and the square of the mean:

    .. math::
        \mu = \sum_r n_r \mu_r / n, \qquad
        \sigma^2 = \sum_r n_r \bigl(\sigma_r^2 + (\mu_r - \mu)^2\bigr) / n
    """

    def __init__(self, comm: CommunicatorBase, backend: Backend) -> None:
        self._comm = comm
        # A communicator with NCCL sends device arrays with NCCL, but host arrays with MPI.
        self._is_through_host = backend == 'mpi' and comm._chainermn_channel.has_nccl

    def _to_send(self, x: Array) -> Array:
        if self._is_through_host and chainer.backend.get_array_module(x) is not np:
            return chainer.cuda.to_cpu(x)
        return x

    def forward(self, axis: tuple[int, ...], gamma: Array, x: Array, x_layout: object,
                xp: ArrayModule, expander: Expander, beta: Array, eps: float, decay: float,
                running_mean: Array | None, running_var: Array | None) -> tuple[object, ...]:
        # Do not let Chainer update the moving averages: it would count only this rank's examples.
        y, y_layout, _, _, mean, var, inv_std, forward_data = super().forward(
            axis, gamma, x, x_layout, xp, expander, beta, eps, decay, None, None)
        if running_mean is not None:
            _arithmetic(xp).update_averages(
                running_mean, running_var, mean, var, self._total, decay)
        return y, y_layout, running_mean, running_var, mean, var, inv_std, forward_data

    def get_mean_and_var(self, axis: tuple[int, ...], gamma: Array, x: Array, xp: ArrayModule,
                         interm_dtype: np.dtype) -> tuple[Array, Array]:
        dtype = np.promote_types(interm_dtype, np.float32)
        expander = tuple(None if i in axis else slice(None) for i in range(x.ndim))
        arithmetic = _arithmetic(xp)
        mine = arithmetic.statistics(x, axis, expander, dtype)
        with self._comm.called_by('MultiNodeBatchNormalization'):
            parts = self._comm.allgather(self._to_send(mine))
        if len({part.size for part in parts}) > 1:
            raise ValueError(
                'multi-node batch normalization: the number of channels differs between ranks\n'
                + '\n'.join(f'  rank {rank}: {part.size // 2}' for rank, part in enumerate(parts))
                + '\nUse the same model on all ranks.')
        # All ranks together can only have one example if this rank has at most one. Read the counts
        # only then, because on a GPU, reading them waits for the all-gather.
        if prod(x.shape[i] for i in axis) <= 1 and sum(int(part[0]) for part in parts) == 1:
            warnings.warn(
                'Multi-node batch normalization got one sample in total over all ranks, so its '
                'output is just beta. Use larger batches, or chainer.using_config("train", False) '
                'to evaluate.', stacklevel=2)
        table = xp.asarray(_arithmetic(chainer.backend.get_array_module(parts[0])).table(parts))
        shape = tuple(n for i, n in enumerate(x.shape) if i not in axis)
        mean, var, self._total = arithmetic.merge(table, shape, interm_dtype)
        return mean, var

    def backward(self, axis: tuple[int, ...], gamma: Array, gy: Array, x: Array, x_layout: object,
                 xp: ArrayModule, expander: Expander, mean: Array, inv_std: Array,
                 eps: float, var: Array, forward_data: object
                 ) -> tuple[Array, None, Array, Array]:
        if chainer.config.enable_backprop:
            raise RuntimeError('multi-node batch normalization has no second derivative. Run '
                               'backward without enable_double_backprop.')
        dtype = np.promote_types(np.promote_types(x.dtype, gamma.dtype), np.float32)
        arithmetic = _arithmetic(xp)
        mine = arithmetic.gradient_sums(gy, x, axis, expander, mean, inv_std, dtype)
        with self._comm.called_by('MultiNodeBatchNormalization'):
            sums = xp.asarray(self._comm.allreduce(self._to_send(mine)))
        gx = arithmetic.input_gradient(gy, x, expander, mean, inv_std, gamma, sums, self._total)
        # These are averages over all ranks already, so the optimizer's averaging keeps the values.
        gbeta, ggamma = (sums / self._comm.size).astype(gamma.dtype, copy=False)
        return gx, None, ggamma, gbeta


class MultiNodeBatchNormalizationFunction:
    """The batch normalization of ChainerMN 1.3: a function of an input, gamma and beta.

    Deprecated: use :class:`chainermn.links.MultiNodeBatchNormalization`.

    Args:
        comm: ChainerMN communicator.
        eps: Added to the variance for numerical stability.
        mean: Moving average of the mean before this call; zeros by default. It is not changed.
        var: Moving average of the variance before this call; zeros by default. It is not changed.
        decay: Decay rate of the moving averages.
        communication_backend: ``'mpi'``, ``'nccl'`` (with pure_nccl) or ``'auto'``.

    Attributes:
        running_mean: The moving average of the mean, after a call.
        running_var: The moving average of the variance, after a call.
    """

    def __init__(self, comm: CommunicatorBase, eps: float = 2e-5, mean: Array | None = None,
                 var: Array | None = None, decay: float = 0.9,
                 communication_backend: str = 'auto') -> None:
        warnings.warn('MultiNodeBatchNormalizationFunction is deprecated; use '
                      'chainermn.links.MultiNodeBatchNormalization',
                      DeprecationWarning, stacklevel=2)
        self.comm = comm
        self.eps = eps
        self.running_mean = mean
        self.running_var = var
        self.decay = decay
        self._selector = MultiNodeBNImplSelector(
            comm, get_communication_backend(comm, communication_backend))

    def __call__(self, x: VariableOrArray, gamma: VariableOrArray, beta: VariableOrArray,
                 *fixed: VariableOrArray) -> chainer.Variable:
        """Normalize ``x``. Collective in training mode: every rank calls it.

        Args:
            x: Variable or array of shape (batch, size, ...).
            gamma: Scale.
            beta: Shift.
            fixed: Mean and variance, which are required outside of training mode and not used in
                training mode.

        Returns:
            A Variable with the shape of ``x``.
        """
        if not chainer.config.train:
            return chainer.functions.fixed_batch_normalization(
                x, gamma, beta, *fixed, eps=self.eps)
        xp = chainer.backend.get_array_module(gamma)
        scale = chainer.as_array(gamma)
        averages = [xp.zeros_like(scale) if average is None else xp.array(average)
                    for average in (self.running_mean, self.running_var)]
        node = chainer_bn.BatchNormalization(
            self.eps, *averages, self.decay, impl_selector=self._selector)
        y, = node.apply((x, gamma, beta))
        self.running_mean, self.running_var = node.running_mean, node.running_var
        return y


def _arithmetic(xp: ArrayModule) -> ModuleType:
    return _batch_norm_on_host if xp is np else _batch_norm_on_device
