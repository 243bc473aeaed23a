"""Finds the frames of the user's code, for errors and warnings."""
from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import threading
from types import FrameType

import six  # type: ignore[import-untyped]


def _folders(package: str) -> tuple[str, ...]:
    spec = importlib.util.find_spec(package)
    return tuple(os.path.abspath(folder) + os.sep for folder in getattr(
        spec, 'submodule_search_locations', None) or ())


#: The folder of this package.
PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
#: The folder of this package, and of the package that patches Chainer.
OURS = PACKAGE, *_folders('chainer_compat')
#: Files and folders whose frames are not user code: this package, Chainer (which calls this
#: package), contextlib (which runs our context managers) and threading (which runs our threads).
PACKAGES = *OURS, *_folders('chainer'), six.__file__, contextlib.__file__, threading.__file__


def program_place() -> tuple[str, int]:
    """Return the path and line of the innermost frame of user code."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(PACKAGES):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def program_lines() -> tuple[str, ...]:
    """Return the lines of user code that are running, such as ``train.py:8``, innermost first."""
    lines: list[str] = []
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if not frame.f_code.co_filename.startswith(PACKAGES):
            lines.append(f'{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}')
        frame = frame.f_back
    return tuple(lines)
