"""The activities of this rank's main thread, for ``top`` and the metrics.

The spans and operations are the same as on the timeline, but only their total times are kept.
Without viewers, nothing is recorded.
"""
from __future__ import annotations

import contextlib
import functools
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from threading import get_ident
from typing import Any, Protocol

from chainermn._operations.call import Call, of_thread, subscribe, unsubscribe
from chainermn._operations.table import Waits, waiting_for
from chainermn._process import runtime

OTHER, COMMUNICATION, WAITING = 'other', 'communication', 'waiting'

#: The activities, in the order of an update.
NAMES = 'data', 'forward', 'backward', COMMUNICATION, WAITING, 'update', OTHER

#: The activity until the first known one begins.
_UNKNOWN = 'unknown'

#: The activity to which a span with a different name belongs.
_SPANS = {'broadcast': COMMUNICATION, 'exchange': COMMUNICATION, 'wait for data': 'data'}

_RECEIVING = waiting_for(Waits.SENDER)
_MAX_SPANS = 256  # size of the cache of spans

NO_SPAN: AbstractContextManager[None] = contextlib.nullcontext()

now = time.perf_counter_ns


class Counted(Protocol):
    """An optimizer that counts its updates."""

    t: int  # number of updates


class _Watched(runtime.ProcessState):
    """The optimizers of this process, and its activities if there are viewers."""

    def __init__(self) -> None:
        self.optimizers: weakref.WeakSet[Counted] = weakref.WeakSet()
        self.activities: Activities | None = None


class Activities:
    """The seconds that the main thread has spent in each activity, without nested activities.

    Only the main thread changes them. No lock is needed, because Python switches threads only after
    calls, not between assignments.
    """

    def __init__(self) -> None:
        self.gpu_bytes = 0  # size of CuPy's pool
        self.gpu = ''  # the PCI bus address of CuPy's current device
        self.thread = threading.main_thread().ident
        self._nanoseconds = dict.fromkeys((*NAMES, _UNKNOWN), 0)
        # The thread may already be in an operation, which may never end, or in any span.
        self._newest = WAITING if self.thread and of_thread(self.thread) else _UNKNOWN
        self._outer: list[str] = []  # the enclosing activities
        self._since = now()
        self._is_memory_asked = True
        #: Same as :func:`span`, for the main thread.
        self.span = functools.lru_cache(_MAX_SPANS)(self._span)

    def totals(self) -> dict[str, float]:
        """Return the seconds in each known activity so far."""
        while True:
            since, found, newest = self._since, dict(self._nanoseconds), self._newest
            if since == self._since:  # no activity has begun or ended meanwhile
                break
        found[newest] += now() - since
        self._is_memory_asked = True
        return {name: found[name] / 1e9 for name in NAMES}

    def enter(self, name: str) -> None:
        """Note that an activity begins. The main thread calls it."""
        self._outer.append(self._newest if self._outer else OTHER)
        if name != self._newest:
            self._switch(name)

    def leave(self) -> None:
        """Note that the newest activity ends."""
        if self._outer:  # empty if a signal handler raised an exception in enter()
            name = self._outer.pop()
            if name != self._newest:
                self._switch(name)

    def begin(self, call: Call) -> None:
        """Note that an operation begins."""
        if get_ident() == self.thread:
            self.enter(WAITING if call.operation in _RECEIVING else COMMUNICATION)
            if self._is_memory_asked:
                self._note_memory()

    def end(self, call: Call, args: Sequence[Any], kwargs: Mapping[str, Any], result: object,
            error: BaseException | None) -> None:
        """Note that an operation ends."""
        if get_ident() == self.thread:
            self.leave()

    def _switch(self, name: str) -> None:
        time = now()
        self._nanoseconds[self._newest] += time - self._since
        self._since, self._newest = time, name

    def _note_memory(self) -> None:
        # Only the main thread may call this, because it reads that thread's current device.
        self._is_memory_asked = False
        if 'cupy' in sys.modules:
            with contextlib.suppress(Exception):
                cupy = sys.modules['cupy']
                self.gpu_bytes = cupy.get_default_memory_pool().total_bytes()
                if self.gpu_bytes:
                    self.gpu = cupy.cuda.Device().pci_bus_id

    def _span(self, name: str, category: str) -> AbstractContextManager[None]:
        if category:
            name = WAITING if category == 'wait' else COMMUNICATION
        elif ' of stage ' in name:  # of a pipeline, such as "forward of stage 1, micro-batch 2"
            name = name.partition(' ')[0]
        else:
            name = _SPANS.get(name, name)
        return _ActivitySpan(self, name) if name in NAMES else NO_SPAN


class _ActivitySpan:
    """An activity that lasts as long as a with statement. It can be entered several times."""

    __slots__ = ('_activities', '_name')

    def __init__(self, activities: Activities, name: str) -> None:
        self._activities, self._name = activities, name

    def __enter__(self) -> None:
        self._activities.enter(self._name)

    def __exit__(self, *_: object) -> None:
        self._activities.leave()


def span(name: str, category: str = '') -> AbstractContextManager[None]:
    """Count the body of the with statement as an activity if there are viewers.

    Args:
        name: The name of the span. If it is not an activity, it counts toward the enclosing one.
        category: Same as for the timeline.
    """
    activities = runtime.get(_Watched).activities
    if activities is None or get_ident() != activities.thread:
        return NO_SPAN
    return activities.span(name, category)


def start() -> Activities:
    """Start recording activities; return them."""
    process = runtime.get(_Watched)
    if process.activities is None:
        process.activities = Activities()
        subscribe(process.activities)
    return process.activities


def stop() -> None:
    """Undo :func:`start`."""
    process = runtime.get(_Watched)
    if process.activities is not None:
        unsubscribe(process.activities)
        process.activities = None


def follow(optimizer: Counted) -> None:
    """Count the updates of an optimizer as long as it exists."""
    runtime.get(_Watched).optimizers.add(optimizer)


def optimizers() -> list[Any]:
    """Return the optimizers that were passed to :func:`follow` and still exist."""
    return [*runtime.get(_Watched).optimizers]


def updates() -> int | None:
    """Return the number of updates so far, including those before a resume.

    If there are several optimizers, return the largest number; if there is none, ``None``.
    """
    with contextlib.suppress(RuntimeError):  # user code creates an optimizer at the same time
        counts = [getattr(optimizer, 't', None) for optimizer in
                  runtime.get(_Watched).optimizers]
        return max((count for count in counts if isinstance(count, int)), default=None)
    return None
