"""Prints messages even if user code has closed or replaced the standard streams."""
from __future__ import annotations

import contextlib
import os
import sys
import unicodedata

#: File descriptors, except those closed at startup: their numbers may belong to other files.
_FILES = {name: number for number, name in enumerate(('stdin', 'stdout', 'stderr'))
          if getattr(sys, f'__{name}__') is not None}

#: Categories of characters that can manipulate a terminal, or that it cannot display: control
#: characters, format characters (such as right-to-left marks), and surrogates.
_ESCAPED = ('Cc', 'Cf', 'Cs')


def silence_stderr() -> None:
    """Discard what C libraries write to stderr from now on."""
    if 'stderr' in _FILES:
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), _FILES['stderr'])


def printable(text: str) -> str:
    r"""Return text for a terminal: control and undecodable characters are escaped.

    Names and error messages may contain them. Tabs and newlines are not escaped.

    Example:
        >>> from chainermn._process.streams import printable
        >>> print(printable(chr(27) + '[2J'))
        \x1b[2J
    """
    if text.isprintable():
        return text
    return ''.join([
        each if each in '\n\t' or unicodedata.category(each) not in _ESCAPED
        else each.encode('unicode_escape').decode() for each in text])


def one_line(error: BaseException) -> str:
    """Return the type and the message of an error, without line breaks."""
    return ' '.join(f'{type(error).__name__}: {error}'.split())


def write(text: str, name: str = 'stderr') -> None:
    """Escape text with :func:`printable`, then write it with :func:`forward`."""
    forward(printable(text), name)


def forward(text: str, name: str) -> None:
    """Write to ``sys.stderr`` or ``sys.stdout`` or, if that fails, to its file descriptor."""
    try:
        stream = getattr(sys, name)
        stream.write(text)
        stream.flush()
    except Exception:  # None, closed, or replaced by user code
        data = text.encode(errors='backslashreplace')
        with contextlib.suppress(OSError, KeyError):
            while data:
                data = data[os.write(_FILES[name], data):]
