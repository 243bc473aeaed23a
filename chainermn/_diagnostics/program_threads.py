"""Finds threads of user code that may still use a communicator: their rank is not blocked."""
from __future__ import annotations

import enum
import functools
import os
import signal
import site
import sys
import threading
from collections.abc import Collection, Mapping
from types import FrameType

from chainermn._diagnostics import thread_frames
from chainermn._diagnostics.call_site import outwards
from chainermn._operations import call
from chainermn._process.program_place import PACKAGES

_DEBUGGERS = ('bdb', 'pdb', 'pydevd', '_pydevd_bundle', 'debugpy')


class _Activity(enum.Enum):
    """The activity of a thread outside of operations."""

    RUNS = enum.auto()  # runs user code, or code that may call user code
    WAITS_FOR_WORK = enum.auto()  # waits for work from a queue that another thread fills
    LIBRARY = enum.auto()  # runs code of an installed package
    IDLE = enum.auto()  # runs nothing that concerns user code


def are_running(blocked: Collection[int], is_finished: bool = False) -> bool:
    """Return whether user code may do something that ends the wait of another rank.

    If in doubt, return True. Return False if all threads are blocked in operations, wait for work
    from other threads, or belong to a library, such as a progress bar.

    Args:
        blocked: The identifiers of threads that are in operations.
        is_finished: Whether the main thread is at the end of the script. Then only threads that
            have used a communicator count.
    """
    with thread_frames.current() as frames:
        return _are_running(frames, blocked, is_finished)


def _are_running(frames: Mapping[int, FrameType], blocked: Collection[int], is_finished: bool
                 ) -> bool:
    users = call.threads()
    if is_finished:
        frames = {ident: frame for ident, frame in frames.items()
                  if ident in users or ident in blocked}
    main = threading.main_thread().ident
    if main is None:
        return True
    is_ending = _module(frames[main]) == 'threading' and (  # waits for the other threads
        frames[main].f_code.co_name == '_shutdown')
    if main not in blocked and not is_ending:
        return True  # even if it waits: signal handlers run in the main thread
    if signal.getitimer(signal.ITIMER_REAL)[0] > 0:  # its handler may run during an operation
        return True
    timers = {thread.ident for thread in threading.enumerate()
              if isinstance(thread, threading.Timer)}
    spec = getattr(sys.modules['__main__'], '__spec__', None)  # None unless started by python -m
    program = {'' if spec is None else spec.name.partition('.')[0], *(
        _package(frame) for frame in outwards(frames[main]) if _origin(frame) != 'stdlib')
    } - {'chainermn', 'chainer'}
    activities = {
        _activity(frame, program, ident in users) for ident, frame in frames.items()
        if ident not in blocked and ident != threading.get_ident()
        and not (ident == main and is_ending)}
    return not timers.isdisjoint(frames) or any(map(_is_debugged, frames.values())) or (
        _Activity.RUNS in activities
        or {_Activity.WAITS_FOR_WORK, _Activity.LIBRARY} <= activities)  # which may feed the queue


def _is_debugged(frame: FrameType) -> bool:
    return any(_package(each) in _DEBUGGERS for each in outwards(frame))


def _activity(innermost: FrameType, program: Collection[str], is_user: bool) -> _Activity:
    modules = [_module(frame) for frame in outwards(innermost)]
    function = innermost.f_code.co_name
    if 'concurrent.futures.thread' in modules:
        waits = (modules[0], function) == ('concurrent.futures.thread', '_worker')
        return _Activity.WAITS_FOR_WORK if waits else _Activity.RUNS
    if modules[:2] == ['threading', 'queue'] and function == 'wait':  # queue.Queue
        waits = innermost.f_locals.get('timeout', 0) is None
        return _Activity.WAITS_FOR_WORK if waits else _Activity.RUNS
    origins = {_origin(frame) for frame in outwards(innermost)}
    if 'program' in origins or any(_package(frame) in program for frame in outwards(innermost)):
        return _Activity.RUNS
    if 'library' in origins:
        return _Activity.RUNS if is_user else _Activity.LIBRARY
    # Other threads of the standard library, such as servers, call user code.
    is_idle = 'ours' in origins or any(_is_pool(frame) for frame in outwards(innermost))
    return _Activity.IDLE if is_idle else _Activity.RUNS


def _is_pool(frame: FrameType) -> bool:
    """Return whether a function belongs to a multiprocessing pool or queue, without callbacks."""
    if _module(frame) == 'multiprocessing.queues':
        return True
    return _module(frame) == 'multiprocessing.pool' and not any(
        getattr(job, '_callback', None) or getattr(job, '_error_callback', None)
        for job in list((frame.f_locals.get('cache') or {}).values()))


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get('__name__'))


def _package(frame: FrameType) -> str:
    return _module(frame).partition('.')[0]


def _origin(frame: FrameType) -> str:
    """Return ``'ours'`` (including Chainer), ``'stdlib'``, ``'library'`` or ``'program'``."""
    path = frame.f_code.co_filename
    if path.startswith(PACKAGES):
        return 'ours'
    stdlib, libraries = _folders()
    if path.startswith(libraries):
        return 'library'
    return 'stdlib' if path.startswith(stdlib) else 'program'


@functools.cache
def _folders() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the folders of the standard library and of installed packages."""
    import sysconfig  # takes 1 to 2 ms, and most scripts never need it

    stdlib = {sysconfig.get_path('stdlib'), sysconfig.get_path('platstdlib'),
              os.path.dirname(os.__file__)}
    libraries = {sysconfig.get_path('purelib'), sysconfig.get_path('platlib'),
                 *site.getsitepackages(), site.getusersitepackages()}
    return ('<frozen', *(path + os.sep for path in stdlib)), tuple(
        path + os.sep for path in libraries)
