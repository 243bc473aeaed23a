"""The frames of the program, for errors and warnings, and its place that calls this package."""
from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import threading

import six  # type: ignore[import-untyped]


def _folders(package: str) -> tuple[str, ...]:
    spec = importlib.util.find_spec(package)
    return tuple(os.path.abspath(folder) + os.sep for folder in getattr(
        spec, 'submodule_search_locations', None) or ())


#: The folder of this package.
PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
#: The folder of this package, and of the package that patches Chainer.
OURS = PACKAGE, *_folders('chainer_compat')
#: Folders and files whose frames are not of the program. Chainer calls this package, context
#: managers of ours run in contextlib, and threads in threading.
PACKAGES = *OURS, *_folders('chainer'), six.__file__, contextlib.__file__, threading.__file__


def program_place() -> tuple[str, int]:
    """Return the path and line of the innermost frame of the program."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(PACKAGES):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno
