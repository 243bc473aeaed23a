"""Averages the gradients of a model in one buffer with NCCL, without blocking the caller."""
from __future__ import annotations

import contextlib
from typing import cast

import numpy as np

from chainermn._collectives import models
from chainermn._collectives.context import MpiCommunicator
from chainermn._collectives.operation import operation
from chainermn._gradients.nccl_mean_queue import NcclMeanQueue
from chainermn._process.mpi import MPI
from chainermn._transport.nccl.nccl_transport import NcclTransport, as_grad_dtype, wait
from chainermn._types import Model, Stream
from chainermn.communicators._nccl_communicator_base import NcclCommunicatorBase


class PureNcclCommunicator(NcclCommunicatorBase):
    """Averages the gradients of a model on a GPU with one ncclAllReduce.

    All gradients are averaged in one dtype: ``allreduce_grad_dtype`` or, if that is ``None``, the
    ``dtype`` of Chainer's configuration, where ``mixed16`` means float16. Each mean is cast to the
    dtype of its gradient.

    NCCL connects when the communicator is first used for a model, on the GPU that holds the model.
    The all-reduce runs on its own CUDA stream, after all work queued on the caller's current
    stream.

    Example:
        >>> comm = chainermn.create_communicator('pure_nccl')  # doctest: +SKIP
        >>> chainer.get_device(f'@cupy:{comm.intra_rank}').use() # doctest: +SKIP
    """

    transport_class = NcclTransport

    def __init__(self, mpi_comm: MPI.Intracomm) -> None:
        super().__init__(mpi_comm)
        with self.config_scope():
            self.allreduce_grad_dtype = None

    @property
    def allreduce_grad_dtype(self) -> np.dtype | None:
        """The dtype in which gradients are averaged; ``None`` for Chainer's configured dtype."""
        return self._group.grad_dtype

    @allreduce_grad_dtype.setter
    def allreduce_grad_dtype(self, value: np.dtype | None) -> None:
        self._group.grad_dtype = value

    @classmethod
    def _check_grad_dtype(cls, dtype: object) -> np.dtype:
        return as_grad_dtype(dtype)

    def set_config(self, name: str, value: object = True, **kwargs: object) -> None:
        if name != 'allreduce_grad_dtype' or kwargs:
            super().set_config(name, value, **kwargs)
            return
        with self.config_scope():
            self.allreduce_grad_dtype = None if value is None else as_grad_dtype(value)

    def _new_mean_queue(self, mpi_comm: MPI.Intracomm, background: MpiCommunicator
                        ) -> NcclMeanQueue:
        return NcclMeanQueue(
            mpi_comm, models.weak_partial(models.queue_gradients, self),
            models.weak_partial(models.check_means, self._context),
            cast(NcclTransport, background._context.transport))

    @operation('multi_node_mean_grad')
    def _multi_node_mean_grad_async(self, model: Model, zero_fill: bool, stream: Stream | None
                                    ) -> None:
        """Average gradients asynchronously, for code from ChainerMN 7.

        Later work on ``stream`` sees the means.
        """
        context = self._context
        gradients, _ = models.checked_gradients(context, model, zero_fill, None)
        done = cast(NcclTransport, context.transport).begin_mean(gradients)
        with contextlib.nullcontext() if stream is None else stream:
            wait(done)
        models.check_means(context, model)
