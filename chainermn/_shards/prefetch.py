"""Batches that a thread reads in advance."""
from __future__ import annotations

import os
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

_T = TypeVar('_T')

#: Seconds to wait for a reader when the batches are no longer needed.
_GRACE = 5.


class Prefetch(Generic[_T]):
    """An iterator whose items a thread computes in advance.

    An error is raised when its turn comes, and no items follow it.

    Args:
        items: A generator, or another iterator with ``close()``. The thread runs and closes it.
        n: The number of items to compute in advance. With 0, there is no thread.
        interrupt: Function that any thread may call when the items are no longer needed.
    """

    def __init__(self, items: Iterator[_T], n: int,
                 interrupt: Callable[[], None] = lambda: None) -> None:
        self._items = items
        self._process = os.getpid()
        self._thread: _ReaderThread[_T] | None = _ReaderThread(items, n, interrupt) if n else None
        # The finalizer also runs at exit, before the interpreter is torn down.
        self._finalizer = weakref.finalize(
            self, _close, self._thread or items, self._process)

    def get(self) -> _T:
        """Return the next item.

        Raises:
            StopIteration: If there are no more items.
        """
        if self._thread is None:
            return next(self._items)
        found, error = self._thread.get()
        if error is not None:
            raise error
        return found[0]

    @property
    def is_of_this_process(self) -> bool:
        """Whether the thread belongs to this process, not to its parent."""
        return self._process == os.getpid()

    def close(self) -> None:
        """Stop the thread."""
        self._finalizer()


class _ReaderThread(threading.Thread, Generic[_T]):
    """Computes an item whenever one of ``n`` slots is free.

    Garbage collection may call ``close`` at any point, even in this thread, so the queues are
    reentrant.
    """

    def __init__(self, items: Iterator[_T], n: int, interrupt: Callable[[], None]) -> None:
        super().__init__(daemon=True, name='chainermn: reads shards')
        self._items, self._interrupt = items, interrupt
        self._done: queue.SimpleQueue[tuple[list[_T], BaseException | None]] = queue.SimpleQueue()
        self._free: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._is_needed = True
        for _ in range(n):
            self._free.put(None)
        self.start()

    def get(self) -> tuple[list[_T], BaseException | None]:
        """Return the next item in a list, or an error."""
        done = self._done.get()
        self._free.put(None)
        return done

    def run(self) -> None:
        """Compute the items."""
        try:
            while self._free.get() is None and self._is_needed:
                self._done.put(([next(self._items)], None))
        except BaseException as error:
            self._done.put(([], error))
        finally:
            self._items.close()  # type: ignore[attr-defined]

    def close(self) -> None:
        """Stop the thread, and wait for it unless its reader takes too long."""
        self._is_needed = False
        self._interrupt()
        self._free.put(None)
        if self is not threading.current_thread():
            self.join(_GRACE)


def _close(source: _ReaderThread[_T] | Iterator[_T], process: int) -> None:
    if process == os.getpid():  # otherwise the thread belongs to a parent process
        source.close()  # type: ignore[union-attr]
