"""One buffer per model, exchanged between GPUs by NCCL, while the caller may continue."""
from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import cast

import numpy as np
from mpi4py import MPI

from chainermn._collectives.operation import operation
from chainermn._compression.compressors import Compression
from chainermn._gradients.nccl_mean_queue import NcclMeanQueue
from chainermn._gradients.parameters import ParameterList
from chainermn._transport.mpi import MpiTransport
from chainermn._transport.nccl.nccl_transport import NcclTransport, check_grad_dtype, wait
from chainermn._types import DeviceEvent, Model, Stream
from chainermn.communicators._nccl_communicator_base import NcclCommunicatorBase


class PureNcclCommunicator(NcclCommunicatorBase):
    """Averages the gradients of a model on a GPU by one ncclAllReduce.

    Gradients are exchanged in one dtype: ``allreduce_grad_dtype`` or, if that is ``None``, the
    ``dtype`` of Chainer's configuration, where ``mixed16`` means float16.  Each mean is cast to the
    dtype of its gradient.

    NCCL connects at the first exchange, on the GPU that holds the model.  The exchange runs on its
    own CUDA stream, after all work queued on the caller's current stream.

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
        """The dtype in which gradients are exchanged; ``None``: Chainer's configured dtype."""
        return self._group.grad_dtype

    @allreduce_grad_dtype.setter
    def allreduce_grad_dtype(self, value: np.dtype | None) -> None:
        self._group.grad_dtype = value

    @classmethod
    def _check_grad_dtype(cls, dtype: object) -> np.dtype:
        return check_grad_dtype(dtype)

    @property
    def _can_overlap(self) -> bool:
        return True

    @property
    def _has_nccl(self) -> bool:
        return True

    def set_config(self, name: str, value: object = True, **kwargs: object) -> None:
        if name != 'allreduce_grad_dtype' or kwargs:
            super().set_config(name, value, **kwargs)
            return
        with self.config_scope():
            self.allreduce_grad_dtype = None if value is None else check_grad_dtype(value)

    @operation('multi_node_mean_grad')
    def multi_node_mean_grad_async(self, model: Model, zero_fill: bool = False,
                                   compression: Compression = None) -> PendingMean:
        gradients, compressor = self._checked_gradients(model, zero_fill, compression)
        codec = None if compressor is None else self._codec(gradients, compressor)
        transport = cast(NcclTransport, self._transport)
        return PendingMean(model, gradients, transport.begin_mean(gradients, codec=codec),
                           self._check_means)

    def _new_mean_queue(self, mpi_comm: MPI.Intracomm, transport: MpiTransport) -> NcclMeanQueue:
        return NcclMeanQueue(mpi_comm, self._queue_gradients, self._check_means,
                             cast(NcclTransport, transport))

    def _multi_node_mean_grad_async(self, model: Model, zero_fill: bool, stream: Stream | None
                                    ) -> None:
        """For callers of ChainerMN 7: the gradients are means after this point of ``stream``."""
        exchange = self.multi_node_mean_grad_async(model, zero_fill)
        with contextlib.nullcontext() if stream is None else stream:
            exchange.wait()


class PendingMean:
    """Gradients that are being averaged."""

    def __init__(self, model: Model, gradients: ParameterList, done: DeviceEvent | None,
                 check: Callable[[Model], None]) -> None:
        self._model = model
        self._check = check  # of the means
        self._gradients: ParameterList | None = gradients  # in use by NCCL until done
        self._done = done

    def wait(self) -> None:
        """Make the current stream wait for the means.  Does not block."""
        wait(self._done)  # in each call, since another stream may be the current one
        if self._gradients is not None:
            self._gradients = None
            self._check(self._model)
