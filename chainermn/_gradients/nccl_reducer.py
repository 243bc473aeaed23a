"""Means of one list of arrays after another by NCCL, on a CUDA stream of their own.

No thread is needed: what is put is queued on the stream, after what the caller's stream was given.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from chainermn._diagnostics import unusable
from chainermn._gradients import compressed_mean


class NcclMeanQueue:
    """Made by :meth:`CommunicatorBase.mean_queue`, which says how it is used.

    Args:
        mpi_comm: The ranks; its messages are for this object alone.
        agree: Gives the gradients of a model by path, once all ranks are known to have the like.
        check: Checks the mean gradients of a model.
        start: Queues the exchange of arrays by path, with a compressor or ``None``, on a stream;
            returns the results, an event after them, and the array that travels.  The arrays
            themselves must stay as they are: backward may still read them.
        send_zeros: Queues an exchange like one of another rank, of which it gets the dtype and
            size of what travels, and whether each rank receives all of it; returns an event.
    """

    can_hide = True

    def __init__(self, mpi_comm: Any, agree: Callable[..., dict[str, Any]],
                 check: Callable[[Any], None],
                 start: Callable[[dict[str, Any], Any], tuple[list[Any], Any, Any]],
                 send_zeros: Callable[[np.dtype, int, bool], Any]) -> None:
        self._control = mpi_comm
        self._start = start
        self._send_zeros = send_zeros
        self._done: Any = None
        self._held: list[Any] = []  # what the stream reads, whatever becomes of the gradients
        self._sent: list[tuple[np.dtype, int, bool]] = []  # since the last wait
        self.agree = agree
        self.check = check
        unusable.know(self)

    def put(self, arrays: dict[str, Any], compressor: Any = None) -> list[Any]:
        """Queues the exchange of arrays by path; returns an array for the mean of each."""
        results, self._done, wire = self._start(arrays, compressor)
        self._held.append(list(arrays.values()))
        self._sent.append((wire.dtype, wire.size, compressed_mean.is_gathered(compressor)))
        return results

    def wait(self) -> None:
        """Lets the current stream wait for all that was put.  It does not block."""
        if self._done is not None:
            import cupy

            cupy.cuda.get_current_stream().wait_event(self._done)
        self._done = None
        self._held.clear()
        self._sent.clear()

    @property
    def pending(self) -> bool:
        """Whether something was put for which nobody has waited yet."""
        return bool(self._sent)

    def cancel(self) -> None:
        """Forgets what was put, as after an error.  Collective: every rank calls it."""
        longest = max(self._control.allgather(self._sent), key=len)
        for sent in longest[len(self._sent):]:
            self._done = self._send_zeros(*sent)
        self.wait()

    def give_up(self, unusable: Any) -> None:
        """Makes whatever needs the other ranks raise from now on."""
        self._control = self._start = self._send_zeros = unusable

    def free(self) -> None:
        """Frees what this object holds.  Collective: every rank calls it, once."""
        self.cancel()
        self._control.Free()
