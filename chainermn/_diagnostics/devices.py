"""Communication on devices, which the watchdog polls because it does not block operations."""
from __future__ import annotations

import threading
import weakref
from typing import Protocol

from chainermn._diagnostics import timeouts
from chainermn._process import runtime


class OnDevice(Protocol):
    """Communication on a device."""

    @property
    def timeout(self) -> float | None:
        """The timeout per operation in seconds; 0 for no timeout, ``None`` for the default."""

    def error(self) -> str:
        """Return an error of the device; '' if there is none."""

    def running(self) -> tuple[float, str]:
        """Return for how many seconds the newest operation has been running, and its name."""

    def abort(self) -> None:
        """Abort the running operations."""


class _Polled(runtime.ProcessState):
    def __init__(self) -> None:
        #: Replaced instead of modified, because the watchdog may be iterating over it.
        self.connections: weakref.WeakSet[OnDevice] = weakref.WeakSet()


def add(connection: OnDevice) -> None:
    """Poll the communication on a device until :func:`remove` is called."""
    polled = runtime.get(_Polled)
    polled.connections = weakref.WeakSet({*polled.connections, connection})


def remove(connection: OnDevice) -> None:
    """Undo :func:`add`."""
    polled = runtime.get(_Polled)
    polled.connections = weakref.WeakSet({*polled.connections} - {connection})


def failure(default_timeout: float) -> str:
    """Return why communication on a device has failed; '' if it has not.

    Args:
        default_timeout: The timeout per operation in seconds; 0 for no timeout.
    """
    for connection in list(runtime.get(_Polled).connections):
        if error := connection.error():
            return f'NCCL failed: {error}'
        seconds, operation = connection.running()
        timeout = default_timeout if connection.timeout is None else connection.timeout
        if timeout and seconds > timeout:
            return f'no progress for {seconds:.0f} s in {operation}; {timeouts.text(timeout)}'
    return ''


def abort() -> None:
    """Abort all communication on devices, in threads, because aborting may also block."""
    for connection in list(runtime.get(_Polled).connections):
        threading.Thread(target=connection.abort, daemon=True).start()
