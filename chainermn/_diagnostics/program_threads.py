"""Threads of the program that may yet use a communicator, so that their rank is not blocked."""
from __future__ import annotations

import functools
import os
import site
import sys
import sysconfig
import threading
from collections.abc import Collection, Iterator
from types import FrameType

from chainermn._diagnostics import call_site

_DEBUGGERS = ('bdb', 'pdb', 'pydevd', '_pydevd_bundle', 'debugpy')


def are_running(blocked: Collection[int]) -> bool:
    """Returns whether the program may do something that ends the wait of another rank.

    Idle are threads that are blocked in operations, that wait for other threads of this process
    without a timeout, and threads of libraries, such as those of a progress bar.

    Args:
        blocked: The identifiers of threads that are in operations.
    """
    frames = sys._current_frames()
    threads = {thread.ident: thread for thread in threading.enumerate()}
    main = frames.get(threading.main_thread().ident or 0)
    names = {_package(frame) for frame in _outwards(main) if _origin(frame) != 'stdlib'}
    names -= {'chainermn', 'chainer'}
    return any(
        _is_debugged(frame) or (ident not in blocked and not _is_idle(
            frame, isinstance(threads.get(ident), threading.Timer), names))
        for ident, frame in frames.items() if ident != threading.get_ident())


def _is_debugged(frame: FrameType) -> bool:
    return any(_package(each) in _DEBUGGERS for each in _outwards(frame))


def _is_idle(innermost: FrameType, is_timer: bool, program: Collection[str]) -> bool:
    """Returns whether a thread does nothing unless another thread does something."""
    module, function = innermost.f_globals.get('__name__'), innermost.f_code.co_name
    if (module, function) == ('concurrent.futures.thread', '_worker'):  # waits for work
        return True
    if module == 'threading' and function in ('join', 'wait', '_wait_for_tstate_lock') and (
            innermost.f_locals.get('timeout', -1) in (None, -1)):
        return True
    if is_timer:
        return False
    frames = list(_outwards(innermost))
    origins = {_origin(frame) for frame in frames}
    if 'program' in origins or any(_package(frame) in program for frame in frames):
        return False
    # Those of the standard library may call the program; those of multiprocessing pools do not.
    return origins != {'stdlib'} or any(_package(frame) == 'multiprocessing' for frame in frames)


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get('__name__')).partition('.')[0]


def _origin(frame: FrameType) -> str:
    """Returns ``'stdlib'``, ``'library'`` for installed packages and this one, or ``'program'``."""
    path = frame.f_code.co_filename
    if path.startswith(call_site.PACKAGES):
        return 'library'
    stdlib, libraries = _folders()
    if path.startswith(libraries):
        return 'library'
    return 'stdlib' if path.startswith(stdlib) else 'program'


@functools.cache
def _folders() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The folders of the standard library, which may contain those of packages, and of packages."""
    stdlib = {sysconfig.get_path('stdlib'), sysconfig.get_path('platstdlib'),
              os.path.dirname(os.__file__)}
    libraries = {sysconfig.get_path('purelib'), sysconfig.get_path('platlib'),
                 *site.getsitepackages(), site.getusersitepackages()}
    return ('<frozen', *(path + os.sep for path in stdlib)), tuple(
        path + os.sep for path in libraries)


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
