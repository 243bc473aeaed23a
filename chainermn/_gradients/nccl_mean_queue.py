"""Averages gradients in the background with NCCL, on a separate CUDA stream.

No thread is needed: each all-reduce is queued on that stream, after the work on the caller's
stream.
"""
from __future__ import annotations

from collections.abc import Callable

import numpy as np

from chainermn._diagnostics import unusable
from chainermn._diagnostics.unusable import Unusable
from chainermn._gradients.codec import GradientCodec
from chainermn._gradients.mean_queue import Gradients
from chainermn._gradients.parameters import ParameterList
from chainermn._gradients.power_sgd import PowerSGD
from chainermn._process.mpi import MPI
from chainermn._timeline import recorder
from chainermn._transport.base import Compressor
from chainermn._transport.nccl.nccl_transport import NcclTransport, is_gathered, wait
from chainermn._types import Array, DeviceEvent, Model


class NcclMeanQueue:
    """The queue that :meth:`CommunicatorBase.mean_queue` returns; see that method for its use.

    Args:
        mpi_comm: A communicator that nothing else uses.
        gradients: Function that compares the gradients of a model between ranks.
        check: Function that checks the mean gradients of a model in debug mode.
        transport: The transport that averages. Only this object uses it.
    """

    is_profitable = True

    def __init__(self, mpi_comm: MPI.Intracomm, gradients: Gradients,
                 check: Callable[[Model], None], transport: NcclTransport) -> None:
        self._control = mpi_comm
        self._transport = transport
        self._done: DeviceEvent | None = None
        self._held: list[ParameterList] = []  # alive while the stream reads them
        self._sent: list[tuple[np.dtype, int, bool]] = []  # since the last wait
        self.gradients = gradients
        self.check = check
        unusable.register(self)

    def submit(self, gradients: dict[str, Array], compressor: Compressor | PowerSGD | None = None,
               scale: float | None = None) -> list[Array]:
        """Start averaging gradients by path; return an array for the mean of each."""
        if isinstance(compressor, PowerSGD):
            raise ValueError("compression='powersgd' cannot be combined with overlap on a "
                             'communicator that uses NCCL. Omit one of them.')
        arrays = ParameterList.named(gradients)
        # Skip the consistency check, which would block.
        codec = None if compressor is None else GradientCodec(compressor, arrays, scale=scale)
        results, self._done, sent = self._transport.begin_new_mean(arrays, codec)
        self._held.append(arrays)
        self._sent.append((sent.dtype, sent.size, is_gathered(compressor)))
        if codec is not None:
            codec.finish()
        return results

    def wait(self) -> None:
        """Make the current stream wait for all submitted gradients, without blocking the host."""
        with recorder.span('wait for means', 'operation'):
            wait(self._done)
        self._done = None
        self._held.clear()
        self._sent.clear()

    @property
    def pending(self) -> bool:
        """Whether gradients are in flight."""
        return bool(self._sent)

    def cancel(self) -> None:
        """Discard all submitted gradients, as after an error. Collective: every rank calls it."""
        longest = max(self._control.allgather(self._sent), key=len)
        for sent in longest[len(self._sent):]:
            self._done = self._transport.send_zeros(*sent)
        self.wait()

    def _make_unusable(self, unusable: Unusable) -> None:
        """Make every later operation raise an error."""
        for name in ('_control', '_transport'):
            setattr(self, name, unusable)

    def free(self) -> None:
        """Free the resources of this queue. Collective: every rank calls it, once."""
        self.cancel()
        self._control.Free()
        self._make_unusable(Unusable(unusable.FREED_QUEUE))
