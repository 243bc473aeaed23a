"""Batch normalization over the batches of all ranks, as a link."""
from __future__ import annotations

import chainer
from chainer.functions.normalization import batch_normalization as chainer_bn
from numpy.typing import DTypeLike

from chainermn._types import Initializer, VariableOrArray
from chainermn.communicators._recognize import as_communicator
from chainermn.communicators.communicator_base import CommunicatorBase
from chainermn.functions import batch_normalization


class MultiNodeBatchNormalization(chainer.links.BatchNormalization):
    """Batch normalization with the mean and variance over the batches of all ranks.

    The statistics of a single rank are noisy if its batches are small. This link uses the
    statistics that one process with all examples would compute. In training mode, forward and
    backward are collective: every rank runs them, in the same order.

    Args:
        size (int or tuple of int): Size (or shape) of the channel dimensions.
        comm: ChainerMN communicator.
        decay: Decay rate of the moving averages.
        eps: Added to the variance for numerical stability.
        dtype: Dtype of the parameters. By default, ``chainer.config.dtype``, or float32 if that is
            mixed16.
        use_gamma: Whether to scale the output.
        use_beta: Whether to shift the output.
        initial_gamma: Initializer of the scale; ones by default.
        initial_beta: Initializer of the shift; zeros by default.
        communication_backend: ``'mpi'``, ``'nccl'`` (with pure_nccl) or ``'auto'``.

    Example:
        >>> bn = chainermn.links.MultiNodeBatchNormalization(1, comm)
        >>> y = bn(np.full((4, 1), comm.rank, np.float32))
        >>> bn.avg_mean  # 0.1 times the mean of 0 and 1
        array([0.05], dtype=float32)
    """

    def __init__(self, size: int | tuple[int, ...], comm: CommunicatorBase, decay: float = 0.9,
                 eps: float = 2e-5, dtype: DTypeLike | None = None, use_gamma: bool = True,
                 use_beta: bool = True, initial_gamma: Initializer = None,
                 initial_beta: Initializer = None,
                 communication_backend: str = 'auto') -> None:
        self.comm = as_communicator(comm, 'MultiNodeBatchNormalization(size, comm)')
        super().__init__(
            size, decay=decay, eps=eps, dtype=dtype, use_gamma=use_gamma, use_beta=use_beta,
            initial_gamma=initial_gamma, initial_beta=initial_beta, initial_avg_var=0)
        self._communication_backend = batch_normalization.get_communication_backend(
            comm, communication_backend)

    def forward(self, x: VariableOrArray, finetune: bool = False) -> chainer.Variable:
        """Normalize ``x``. Collective in training mode: every rank calls it.

        In training mode, the statistics of all ranks are used, and the moving averages are updated.
        Otherwise, the moving averages are used.

        Args:
            x: Variable or array of shape (batch, size, ...). Batch sizes may differ between ranks.
            finetune: Whether to average over all calls since :meth:`start_finetuning` instead of
                using moving averages.

        Returns:
            A Variable with the shape of ``x``.

        Raises:
            ValueError: On all ranks, if the number of channels differs between ranks.

        Example:
            >>> bn = chainermn.links.MultiNodeBatchNormalization(1, comm)
            >>> y = bn(np.full((2, 1), comm.rank, np.float32))
            >>> y.array.round()  # the mean over both ranks is 0.5
            array([[-1.],
                   [-1.]], dtype=float32)
        """
        if not chainer.config.train:
            return super().forward(x)
        gamma = self._get_gamma()[0] if self.gamma is None else self.gamma
        beta = self._get_beta()[0] if self.beta is None else self.beta
        recomputing = chainer.config.in_recomputing
        decay = self.decay
        if finetune:
            self.N += not recomputing
            decay = 1 - 1 / self.N
        node = chainer_bn.BatchNormalization(
            self.eps, None if recomputing else self.avg_mean,
            None if recomputing else self.avg_var, decay,
            impl_selector=batch_normalization.MultiNodeBNImplSelector(
                self.comm, self._communication_backend))
        return node.apply((x, gamma, beta))[0]
