"""The Python frames of all threads, which one thread reads while the others run."""
from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator
from types import FrameType

# Python 3.11 creates frame objects when they are asked for, and may collect garbage meanwhile. A
# finalizer that releases the interpreter lock, such as a GPU array's, then lets the
# threads go on: the process crashes or deadlocks. Fixed in 3.11.12 for the innermost frames
# (https://github.com/python/cpython/issues/106883), not for their callers. Later versions collect
# garbage between bytecodes only.
_COLLECTS_GARBAGE = sys.version_info[:2] == (3, 11)


@contextlib.contextmanager
def current() -> Iterator[dict[int, FrameType]]:
    """Return the innermost frames of all threads by identifier; read them in the context only."""
    pauses = _COLLECTS_GARBAGE and gc.isenabled()
    if pauses:
        gc.disable()
    try:
        yield sys._current_frames()
    finally:
        if pauses:
            gc.enable()
