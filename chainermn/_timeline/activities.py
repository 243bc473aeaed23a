"""What the main thread of this rank spends its time on, while somebody watches: ``top``, metrics.

The spans and operations are those of the timeline, but they are only added up.  If nobody watches,
nothing is recorded.
"""
from __future__ import annotations

import contextlib
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from chainermn._operations.call import Call, of_thread, subscribe, unsubscribe
from chainermn._operations.table import Waits, waiting_for
from chainermn._process import runtime

OTHER, EXCHANGE, WAITING = 'other', 'exchange', 'waiting'

#: Each part of the time, in the order of an update.
NAMES = 'data', 'forward', 'backward', EXCHANGE, WAITING, 'update', OTHER

#: Until the first activity begins.
_UNKNOWN = 'unknown'

#: The activity that a span with another name belongs to.
_SPANS = {'broadcast': EXCHANGE, 'wait for data': 'data'}

_RECEIVING = waiting_for(Waits.SENDER)
_MEMORY_INTERVAL = 1_000_000_000  # nanoseconds

NO_SPAN: AbstractContextManager[None] = contextlib.nullcontext()

now = time.perf_counter_ns


class Counted(Protocol):
    """An optimizer."""

    t: int  # number of updates


class _Watched(runtime.ProcessState):
    """The optimizers of this process, and its activities if somebody watches."""

    def __init__(self) -> None:
        self.optimizers: weakref.WeakSet[Counted] = weakref.WeakSet()
        self.activities: Activities | None = None


class Activities:
    """The seconds of the main thread by activity; each excludes those inside it."""

    def __init__(self) -> None:
        self.gpu_bytes = 0
        self._thread = threading.main_thread().ident
        self._lock = threading.RLock()  # a signal handler may run while the thread holds it
        self._nanoseconds = dict.fromkeys((*NAMES, _UNKNOWN), 0)
        # It may be in an operation already, which may last forever, or in any span.
        self._stack = [WAITING if self._thread and of_thread(self._thread) else _UNKNOWN]
        self._since = now()
        self._memory_at = 0

    def totals(self) -> dict[str, float]:
        """Return the seconds so far, as far as the activity is known."""
        with self._lock:
            found = dict(self._nanoseconds)
            found[self._stack[-1]] += now() - self._since
        return {name: found[name] / 1e9 for name in NAMES}

    def enter(self, name: str) -> None:
        """Note that an activity begins."""
        if threading.get_ident() == self._thread:
            self._switch()
            if len(self._stack) == 1:
                self._stack[0] = OTHER
            self._stack.append(name)

    def leave(self) -> None:
        """Note that the newest activity ends."""
        if threading.get_ident() == self._thread:
            self._switch()
            if len(self._stack) > 1:  # an exception of a signal handler may have come between
                self._stack.pop()

    def begin(self, call: Call) -> None:
        """Note that an operation begins."""
        self.enter(WAITING if call.operation in _RECEIVING else EXCHANGE)
        if self._since > self._memory_at + _MEMORY_INTERVAL:
            self._memory_at = self._since
            self._note_memory()

    def end(self, call: Call, args: Sequence[Any], kwargs: Mapping[str, Any], result: object,
            error: BaseException | None) -> None:
        """Note that an operation ends."""
        self.leave()

    def _switch(self) -> None:
        with self._lock:
            time, self._since = self._since, now()
            self._nanoseconds[self._stack[-1]] += self._since - time

    def _note_memory(self) -> None:
        # In the thread of the program, since the pool is that of its current device.
        if 'cupy' in sys.modules and threading.get_ident() == self._thread:
            with contextlib.suppress(Exception):
                self.gpu_bytes = sys.modules['cupy'].get_default_memory_pool().total_bytes()


class _ActivitySpan:
    """An activity that lasts as long as a with statement."""

    __slots__ = ('_activities', '_name')

    def __init__(self, activities: Activities, name: str) -> None:
        self._activities, self._name = activities, name

    def __enter__(self) -> None:
        self._activities.enter(self._name)

    def __exit__(self, *_: object) -> None:
        self._activities.leave()


def span(name: str, category: str = '') -> AbstractContextManager[None]:
    """Count the body of the with statement as an activity, if somebody watches.

    Args:
        name: The name of a span; those that are no activity belong to the one around them.
        category: As for the timeline.
    """
    activities = runtime.get(_Watched).activities
    if activities is None:
        return NO_SPAN
    if category:
        name = WAITING if category == 'wait' else EXCHANGE
    elif ' of stage ' in name:  # of a pipeline, such as "forward of stage 1, micro-batch 2"
        name = name.partition(' ')[0]
    else:
        name = _SPANS.get(name, name)
    return _ActivitySpan(activities, name) if name in NAMES else NO_SPAN


def start() -> Activities:
    """Record the activities from now on; return them."""
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
    """Count the updates of an optimizer, as long as it exists."""
    runtime.get(_Watched).optimizers.add(optimizer)


def updates() -> int | None:
    """Return the number of updates so far, including those before a resume.

    Of several optimizers, that with most updates counts.  ``None`` if there is none.
    """
    with contextlib.suppress(RuntimeError):  # the program creates an optimizer meanwhile
        counts = [getattr(optimizer, 't', None) for optimizer in
                  runtime.get(_Watched).optimizers]
        return max((count for count in counts if isinstance(count, int)), default=None)
    return None
