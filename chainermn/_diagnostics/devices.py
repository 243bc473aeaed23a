"""Exchanges on devices, which block no operation, so the watchdog polls them."""
from __future__ import annotations

import threading
import weakref
from typing import Protocol

from chainermn._diagnostics import timeouts
from chainermn._process import runtime


class OnDevice(Protocol):
    """Exchanges on a device."""

    @property
    def timeout(self) -> float | None:
        """Timeout per exchange in seconds, 0 for none, ``None`` for the default."""

    def error(self) -> str:
        """Return an error of the device; '' if there is none."""

    def running(self) -> tuple[float, str]:
        """Return for how many seconds the newest exchange has been running, and its name."""

    def abort(self) -> None:
        """Abort the running exchanges."""


class _Polled(runtime.ProcessState):
    def __init__(self) -> None:
        #: Replaced instead of changed, as the watchdog may iterate over it.
        self.exchanges: weakref.WeakSet[OnDevice] = weakref.WeakSet()


def add(exchanges: OnDevice) -> None:
    """Add exchanges on a device, until :func:`remove`."""
    polled = runtime.get(_Polled)
    polled.exchanges = weakref.WeakSet({*polled.exchanges, exchanges})


def remove(exchanges: OnDevice) -> None:
    """Undo :func:`add`."""
    polled = runtime.get(_Polled)
    polled.exchanges = weakref.WeakSet({*polled.exchanges} - {exchanges})


def failure(default_timeout: float) -> str:
    """Return why exchanges have failed; '' if none has.

    Args:
        default_timeout: Timeout per exchange in seconds, 0 for none.
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
    """Abort all exchanges, in threads, since this may block too."""
    for exchanges in list(runtime.get(_Polled).exchanges):
        threading.Thread(target=exchanges.abort, daemon=True).start()
