"""Incomplete sends."""
from __future__ import annotations

import threading
from collections.abc import Iterable

from chainermn._process.mpi import MPI


class Pending:
    """Keeps requests and their buffers alive while MPI reads them."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._sends: list[tuple[str, list[MPI.Request]]] = []

    def record(self, call: str, requests: Iterable[MPI.Request]) -> None:
        """Record the requests of a call."""
        with self._lock:
            self._drop_complete()
            self._sends.append((call, list(requests)))

    def calls(self) -> list[str]:
        """Return the calls with incomplete requests."""
        with self._lock:
            self._drop_complete()
            return [call for call, _ in self._sends]

    def _drop_complete(self) -> None:
        self._sends = [send for send in self._sends
                       if not all([request.Test() for request in send[1]])]
