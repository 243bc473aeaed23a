"""Sends that are not complete yet."""
from __future__ import annotations

from collections.abc import Iterable

from mpi4py import MPI


class Pending:
    """Keeps requests, since MPI reads what they hold, whether or not the caller keeps it."""

    def __init__(self) -> None:
        self._sends: list[tuple[str, list[MPI.Request]]] = []

    def keep(self, call: str, requests: Iterable[MPI.Request]) -> None:
        """Keeps what a call has begun to send."""
        self._forget()
        self._sends.append((call, list(requests)))

    def calls(self) -> list[str]:
        """The calls of which something was not received yet."""
        self._forget()
        return [call for call, _ in self._sends]

    def _forget(self) -> None:
        self._sends = [send for send in self._sends
                       if not all([request.Test() for request in send[1]])]
