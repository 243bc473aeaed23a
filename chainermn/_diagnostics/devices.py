"""Communication on devices. It does not block any operation, so the watchdog polls it."""
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
        self.exchanges: weakref.WeakSet[OnDevice] = weakref.WeakSet()


def add(exchanges: OnDevice) -> None:
    """Poll the communication on a device until :func:`remove` is called."""
    polled = runtime.get(_Polled)
    polled.exchanges = weakref.WeakSet({*polled.exchanges, exchanges})


def remove(exchanges: OnDevice) -> None:
    """Undo :func:`add`."""
    polled = runtime.get(_Polled)
    polled.exchanges = weakref.WeakSet({*polled.exchanges} - {exchanges})


def failure(default_timeout: float) -> str:
    """Return why communication on a device has failed; '' if it has not.

    Args:
        default_timeout: The timeout per operation in seconds; 0 for no timeout.
    """
    for exchanges in list(runtime.get(_Polled).exchanges):
        if error := exchanges.error():
            return f'NCCL failed: {error}'
        seconds, operation = exchanges.running()
        timeout = default_timeout if exchanges.timeout is None else exchanges.timeout
        if timeout and seconds > timeout:
            return f'no progress for {seconds:.0f} s in {operation}; {timeouts.text(timeout)}'
    return ''


def abort() -> None:
    """Abort all communication on devices, in threads, because aborting may also block."""
    for exchanges in list(runtime.get(_Polled).exchanges):
        threading.Thread(target=exchanges.abort, daemon=True).start()
