"""The Python frames of all threads, which one thread reads while the others run."""
from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator
from types import FrameType

# Python 3.11 creates frame objects only when they are requested, and may collect garbage while it
# does so. A finalizer that releases the GIL, such as a GPU array's, then lets the other
# threads continue, and the process crashes or deadlocks. Python 3.11.12 fixes this for the
# innermost frames (https://github.com/python/cpython/issues/106883) but not for their callers.
# Later versions collect garbage only between bytecodes.
_COLLECTS_GARBAGE = sys.version_info[:2] == (3, 11)


@contextlib.contextmanager
def current() -> Iterator[dict[int, FrameType]]:
    """Return the innermost frames of all threads by identifier; use them only in the context."""
    pauses = _COLLECTS_GARBAGE and gc.isenabled()
    if pauses:
        gc.disable()
    try:
        yield sys._current_frames()
    finally:
        if pauses:
            gc.enable()
