"""Batches that a thread reads in advance."""
from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Iterator
from typing import Generic, TypeVar

_T = TypeVar('_T')

#: Seconds to wait for a reader when the batches are not needed any more.
_GRACE = 5.


class Prefetch(Generic[_T]):
    """An iterator whose items a thread computes in advance.

    An error is raised in its turn, and is the last item.

    Args:
        items: A generator.  It runs in the thread, and is closed there.
        n: Number of items in advance; with 0, there is no thread.
    """

    def __init__(self, items: Iterator[_T], n: int) -> None:
        self._items = items
        self._process = os.getpid()
        self._thread: threading.Thread | None = None
        if n:
            self._queue: queue.Queue[tuple[list[_T], BaseException | None]] = queue.Queue(n)
            self._is_needed = threading.Event()
            self._is_needed.set()
            # Neither thread nor generator may refer to this object, or it would never be deleted.
            self._thread = threading.Thread(
                target=_run, args=(items, self._queue, self._is_needed), daemon=True,
                name='chainermn: reads shards')
            self._thread.start()

    def get(self) -> _T:
        """Return the next item.

        Raises:
            StopIteration: If there is none.
        """
        if self._thread is None:
            return next(self._items)
        found, error = self._queue.get()
        if error is not None:
            raise error
        return found[0]

    @property
    def is_of_this_process(self) -> bool:
        """Whether the thread is not that of a parent process."""
        return self._process == os.getpid()

    def close(self) -> None:
        """Stop the thread."""
        if self._thread is None:
            self._items.close()  # type: ignore[attr-defined]
        elif self.is_of_this_process:
            self._is_needed.clear()
            deadline = time.monotonic() + _GRACE
            while self._thread.is_alive() and time.monotonic() < deadline:
                try:  # it may wait for a free place
                    self._queue.get(timeout=.01)
                except queue.Empty:
                    self._thread.join(.01)


def _run(items: Iterator[_T], done: queue.Queue[tuple[list[_T], BaseException | None]],
         is_needed: threading.Event) -> None:
    try:
        for item in items:
            done.put(([item], None))
            if not is_needed.is_set():
                return
        done.put(([], StopIteration()))
    except BaseException as error:
        done.put(([], error))
    finally:
        items.close()  # type: ignore[attr-defined]
