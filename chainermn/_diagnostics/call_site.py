"""Call sites: the file and line of the program that called an operation."""
from __future__ import annotations

import contextlib
import importlib.util
import inspect
import os
import sys
import threading
from collections.abc import Iterator
from types import FrameType

import chainer

#: The folder of this package.
PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
#: The module with the wrapper of all operations.
WRAPPER = PACKAGE + os.path.join('_operations', 'call.py')
#: Folders of the layers through which every operation of a communicator passes.
LAYERS = WRAPPER, *(f'{PACKAGE}{name}{os.sep}' for name in (
    'communicators', '_collectives', '_gradients', '_transport', '_consistency', '_diagnostics',
    '_timeline'))
_COMPAT = [folder + os.sep for folder in getattr(
    importlib.util.find_spec('chainer_compat'), 'submodule_search_locations', None) or ()]
_CHAINER = os.path.dirname(os.path.abspath(chainer.__file__)) + os.sep
_RUN = inspect.unwrap(chainer.training.Trainer.run).__code__
_FUNCTIONS = f'{PACKAGE}functions{os.sep}'
#: Folders and files whose frames are never a call site. Context managers of ours run in contextlib,
#: and threads in threading.
PACKAGES = PACKAGE, _CHAINER, *_COMPAT, contextlib.__file__, threading.__file__


def _function(frame: FrameType) -> str:
    """Name the differentiable function of a frame in its package."""
    node, method = frame.f_locals.get('self'), frame.f_code.co_name
    if not isinstance(node, chainer.FunctionNode) or method not in ('forward', 'backward'):
        return ''
    name = type(node).__name__
    name = 'reduce_scatter' if name == 'ReduceScatter' else name.lower()
    return (f', in backward of chainermn.functions.{name}' if method == 'backward' else
            f', in chainermn.functions.{name}')


def outwards(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and its callers, innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def describe() -> str:
    """Describe the call site of the current operation, as the end of a sentence.

    For example ``, called at train.py:8``, or ``, in backward of chainermn.functions.allgather,
    called at train.py:8``. Frames of this package and of Chainer are skipped.
    """
    frame, through = sys._getframe(1), ''
    while frame.f_back is not None and frame.f_code.co_filename.startswith(PACKAGES):
        if frame.f_code.co_filename.startswith(_FUNCTIONS):
            through = _function(frame) or through
        frame = frame.f_back
    if frame.f_code.co_filename.startswith(PACKAGES):
        return through  # at the end of the program, or in a thread of this package
    return f'{through}, called at {os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}'


def iteration() -> int | None:
    """Return the iteration of the Trainer that calls the current operation, counted from 1."""
    names: list[str] = []  # of inner functions
    for frame in outwards(sys._getframe(1)):
        # Not the variables of others, which Python would keep alive until the function returns.
        if frame.f_code is _RUN:
            is_in_update = names[-1:] == ['update'] or 'update_core' in names
            return frame.f_locals['self'].updater.iteration + is_in_update
        names.append(frame.f_code.co_name)
    return None


def of_error(error: BaseException) -> str:
    """Return the innermost line of the program that an error passed through, or ''."""
    place, traceback = '', error.__traceback__
    while traceback is not None:
        path = traceback.tb_frame.f_code.co_filename
        if not path.startswith(PACKAGES):
            place = f'{os.path.basename(path)}:{traceback.tb_lineno}'
        traceback = traceback.tb_next
    return place


def locate() -> str:
    """Return the call site of the current operation, such as ``train.py:8``."""
    frame = sys._getframe(1)  # not outwards(), which takes longer: every isend calls this
    while frame.f_back is not None and frame.f_code.co_filename.startswith(PACKAGES):
        frame = frame.f_back
    return f'{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}'
