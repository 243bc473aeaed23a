"""Print messages even if the program has closed or replaced the standard streams."""
from __future__ import annotations

import contextlib
import os
import sys

#: File descriptors, except those closed at startup: their numbers may belong to other files.
_FILES = {name: number for number, name in enumerate(('stdin', 'stdout', 'stderr'))
          if getattr(sys, f'__{name}__') is not None}


def silence_stderr() -> None:
    """Discard what C libraries write to stderr from now on."""
    if 'stderr' in _FILES:
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), _FILES['stderr'])


def write(text: str, name: str = 'stderr') -> None:
    """Write to ``sys.stderr`` or ``sys.stdout``, or if that fails to its file descriptor."""
    try:
        stream = getattr(sys, name)
        stream.write(text)
        stream.flush()
    except Exception:  # None, closed, or replaced by the program
        data = text.encode(errors='backslashreplace')
        with contextlib.suppress(OSError, KeyError):
            while data:
                data = data[os.write(_FILES[name], data):]
