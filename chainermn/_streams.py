"""What this package prints arrives, even if the program has closed or removed the stream."""
from __future__ import annotations

import contextlib
import os
import sys

#: File descriptors.  One that was closed from the start can be that of any other file by now.
_FILES = {name: number for number, name in enumerate(('stdin', 'stdout', 'stderr'))
          if getattr(sys, f'__{name}__') is not None}


def write(text: str, name: str = 'stderr') -> None:
    """Writes to ``sys.stderr`` or ``sys.stdout``, or else to the file descriptor of that name."""
    try:
        stream = getattr(sys, name)
        stream.write(text)
        stream.flush()
    except Exception:  # it is None, closed, or anything that the program has put there
        data = text.encode(errors='backslashreplace')
        with contextlib.suppress(OSError, KeyError):
            while data:
                data = data[os.write(_FILES[name], data):]
