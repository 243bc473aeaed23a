"""Transfers of device arrays on a separate CUDA stream, while the device computes.

MPI carries the messages of all communicators. NCCL would run operations in the order in which they
are posted, and ranks that post receives early do so in different orders. MPI reads and writes an
array while the host waits, so this happens on the transfer stream, where nothing else runs:

- An array to send is copied on the compute stream. Once the device has made the copy, the host
  passes the copy to MPI. Until then, the host continues and queues the next step.
- A received array is copied on the compute stream, because memory is freed and reused in stream
  order. The received array is kept in memory until the device has made the copy.
"""
from __future__ import annotations

import contextlib
from collections.abc import Sequence

import chainer

from chainermn._types import Array, DeviceEvent, Stream

#: Return value of ``cudaEventQuery`` for an event that the device has not reached yet.
_NOT_READY = 600


class Transfers:
    """The transfer stream of a rank, which is created when it is first needed."""

    def __init__(self) -> None:
        self._stream: Stream | None = None
        #: Received arrays that the device may still be copying.
        self._being_copied: list[tuple[DeviceEvent, Sequence[Array]]] = []

    def on_stream(self) -> contextlib.AbstractContextManager[object]:
        """Return a context manager in which MPI transfers arrays."""
        return contextlib.nullcontext() if self._stream is None else self._stream

    def to_send(self, arrays: Sequence[Array]) -> tuple[Sequence[Array], DeviceEvent | None]:
        """Return arrays that will not change, and the event after which they may be sent."""
        if not any(map(_on_device, arrays)):
            return arrays, None
        return [x.copy() if _on_device(x) else x for x in arrays], self._event()

    def is_reached(self, event: DeviceEvent | None) -> bool:
        """Return whether the device has reached an event. True after a device error."""
        if event is None:
            return True
        import cupy

        return bool(cupy.cuda.runtime.eventQuery(event.ptr) != _NOT_READY)

    def received(self, arrays: Sequence[Array]) -> Sequence[Array]:
        """Return the arrays, or copies in memory of the current stream."""
        if not any(map(_on_device, arrays)):
            return arrays
        self._being_copied = [
            each for each in self._being_copied if not self.is_reached(each[0])]
        copies = [x.copy() if _on_device(x) else x for x in arrays]
        self._being_copied.append((self._event(), arrays))
        return copies

    def _event(self) -> DeviceEvent:
        """Record an event on the current stream. Create the transfer stream if necessary."""
        import cupy

        if self._stream is None:
            self._stream = cupy.cuda.Stream(non_blocking=True)
        return cupy.cuda.get_current_stream().record(cupy.cuda.Event(disable_timing=True))


def _on_device(x: Array) -> bool:
    return isinstance(x, chainer.backends.cuda.ndarray)
