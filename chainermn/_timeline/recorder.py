"""The timeline: the operations of this rank, in a file for Perfetto and chrome://tracing.

With ``CHAINERMN_TIMELINE=out.json`` in the environment of all ranks, rank 3 of COMM_WORLD writes
``out.3.json``, from the time when it creates its first communicator. The file is in Chrome's trace
event format: an array with one event per line. Events are appended, so the file can be read while
it is being written, and after the rank was killed. Without the variable, nothing is recorded.

Times are from the rank's own clock. Events named ``clock`` contain the offset of this clock from
the clock of the first rank in a group. ``chainermn timeline`` converts all times to one clock.
"""
from __future__ import annotations

import atexit
import collections
import errno
import fcntl
import functools
import json
import os
import pathlib
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TypeAlias

import numpy as np

from chainermn._process import environment, runtime, streams
from chainermn._timeline import activities
from chainermn._types import Array

VARIABLE = environment.TIMELINE

#: Nanoseconds after which the next event also writes all pending events.
_WRITE_INTERVAL = 50_000_000

#: Row, name, category, begin, end, details.
_Event: TypeAlias = tuple[int, str, str, int, int, str]

now = activities.now


class _Recorder(runtime.ProcessState):
    """The timeline of this process, if there is one."""

    def __init__(self) -> None:
        self.timeline: Timeline | None = None

    def in_child(self) -> bool:
        if self.timeline is not None:
            self.timeline.abandon()
        return False


def is_on() -> bool:
    """Return whether the environment asks for a timeline."""
    return bool(environment.text(VARIABLE))


def get() -> Timeline | None:
    """Return the timeline of this process, or ``None``."""
    return runtime.get(_Recorder).timeline


def span(name: str, category: str = '', arrays: Iterable[Array] = ()
         ) -> AbstractContextManager[None]:
    """Record the body of the with statement on the timeline, and for viewers, if there are any.

    Args:
        name: The name of the event.
        category: ``'operation'`` for communication, ``'wait'`` for waiting for other ranks.
        arrays: The arrays that are sent or received.
    """
    timeline = runtime.get(_Recorder).timeline
    watched = activities.span(name, category)
    if timeline is None:
        return watched
    return _Span(timeline, name, category, describe(arrays) if category == 'operation' else '',
                 watched)


def open_file(rank: int, size: int) -> None:
    """Start the timeline of this process.

    Raises:
        OSError: If the file cannot be created.
    """
    recorder = runtime.get(_Recorder)
    if recorder.timeline is None:
        recorder.timeline = Timeline(path_of(environment.text(VARIABLE), rank), rank, size)
        atexit.register(write)


def write() -> None:
    """Write pending events."""
    if (timeline := get()) is not None:
        timeline.write()


def close() -> None:
    """Complete the timeline; later events are not recorded."""
    recorder = runtime.get(_Recorder)
    timeline, recorder.timeline = recorder.timeline, None
    if timeline is not None:
        timeline.close()


def path_of(name: str, rank: int) -> pathlib.Path:
    """Return the file of a rank: its number precedes the suffix, which is ``.json`` by default."""
    path = pathlib.Path(name)
    return path.with_name(f'{path.stem}.{rank}{path.suffix or ".json"}')


@functools.lru_cache(maxsize=4096)
def quoted(text: str) -> str:
    """Return the text as JSON."""
    return json.dumps(text)


def describe(arrays: Iterable[Array]) -> str:
    """Return the size, dtypes and shape of arrays as members of a JSON object."""
    xs = list(arrays)
    if len(xs) == 1:
        return _described(xs[0].nbytes, (xs[0].dtype,), xs[0].shape)
    dtypes = dict.fromkeys([x.dtype for x in xs])
    return _described(sum([x.nbytes for x in xs]), tuple(dtypes), f'{len(xs)} arrays')


@functools.lru_cache(maxsize=4096)
def _described(nbytes: int, dtypes: tuple[np.dtype, ...], shape: object) -> str:
    return (f'"bytes":{nbytes},"dtype":{quoted(", ".join(map(str, dtypes)))},'
            f'"shape":{quoted(str(shape))}')


@functools.lru_cache(maxsize=4096)
def _head(pid: int, row: int, name: str, category: str) -> str:
    """Return the beginning of an event."""
    kind = f',"cat":{quoted(category)}' if category else ''
    return f'{{"ph":"X","pid":{pid},"tid":{row},"name":{quoted(name)}{kind}'


def _create(path: pathlib.Path) -> int:
    """Create the file of a timeline and lock it, unless another process is writing it."""
    try:
        existing = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        pass  # there is no file, or it is not a timeline of this user
    else:
        try:
            _lock(existing, path)
        finally:
            os.close(existing)
    path.unlink(missing_ok=True)  # another user may own the old file, or may read it
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    _lock(file, path)
    return file


def _lock(file: int, path: pathlib.Path) -> None:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # forked processes do not inherit it
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):  # not if the file system has no locks
            raise OSError(f'another job is writing {path.name}. Use a different path for each job'
                          ) from None


class Timeline:
    """Writes the events of this process. Any thread may add events.

    Args:
        path: The path of the file. An existing file is replaced. Only this user can read it.
        rank: The rank of this process in COMM_WORLD.
        size: The number of ranks.

    Raises:
        OSError: If the file cannot be created, or another process is writing its timeline to it.
    """

    def __init__(self, path: pathlib.Path, rank: int, size: int) -> None:
        self._file = _create(path)
        self.origin: int = now()
        #: Called when the file is complete.
        self.on_close: Callable[[], None] = lambda: None
        #: The number of communicators for each group of ranks, given as text.
        self.communicators: collections.Counter[str] = collections.Counter()
        #: Groups of ranks whose clocks were compared, each with a function that compares them
        #: again. The groups are in the same order on all of their ranks.
        self.compared: dict[tuple[int, ...], Callable[[], None]] = {}
        self._pid = rank
        self._path = path
        self._lock = threading.Lock()
        self._threads: dict[int, int] = {}  # rows by identifier
        # Pending: lines, and events that are formatted later.
        self._events: collections.deque[str | _Event] = collections.deque(['[\n'])
        self._write_at = 0
        self._is_closed = False
        self._add_metadata('process_name', {
            'name': f'rank {rank} ({os.uname().nodename}, process {os.getpid()})',
            'rank': rank, 'size': size, 'host': os.uname().nodename, 'started': time.time()})
        self._add_metadata('process_sort_index', {'sort_index': rank})
        self._row(threading.main_thread())
        self.write()

    def add(self, name: str, category: str, begin: int, end: int, details: str = '') -> None:
        """Add an event.

        Args:
            name: The name of the event.
            category: Same as for :func:`span`.
            begin: The start time, from :func:`now`.
            end: The end time.
            details: Members of a JSON object.
        """
        row = self._threads.get(threading.get_ident())
        if row is None:
            row = self._row(threading.current_thread())
        self._events.append((row, name, category, begin, end, details))
        if end > self._write_at and category != 'wait':  # a wait ends before its operation
            self.write()

    def add_clock(self, details: dict[str, object]) -> None:
        """Add the current offset of this clock from another one."""
        self._events.append(json.dumps({
            'ph': 'i', 's': 'p', 'pid': self._pid, 'tid': 0, 'name': 'clock', 'cat': 'clock',
            'ts': (now() - self.origin) / 1000, 'args': details}) + ',\n')
        self.write()

    def abandon(self) -> None:
        """Close the timeline in a forked child; another thread of the rank may hold the lock."""
        self._lock = threading.Lock()
        self._is_closed = True

    def write(self) -> None:
        """Write pending events."""
        with self._lock:
            lines = []
            while self._events:
                event = self._events.popleft()
                lines.append(event if isinstance(event, str) else self._line(*event))
            self._write_at = now() + _WRITE_INTERVAL
            if self._is_closed:
                return
            data = memoryview(''.join(lines).encode())
            try:
                while data:
                    data = data[os.write(self._file, data):]
            except OSError as error:  # such as a full disk; the job continues
                self._is_closed = True
                os.close(self._file)
                streams.write(f'chainermn: the timeline of rank {self._pid} ends here: cannot '
                              f'write {self._path}: {error.strerror}\n')

    def close(self) -> None:
        """Write the end of the file."""
        # The last element of a JSON array must not be followed by a comma.
        self._events.append(f'{{"ph":"M","pid":{self._pid},"name":"end","args":{{}}}}\n]\n')
        self.write()
        if not self._is_closed:
            self._is_closed = True
            os.close(self._file)
        self.on_close()

    def _line(self, row: int, name: str, category: str, begin: int, end: int, details: str) -> str:
        return (f'{_head(self._pid, row, name, category)},"ts":{(begin - self.origin) / 1000},'
                f'"dur":{(end - begin) / 1000}' + (
                    f',"args":{{{details}}}}},\n' if details else '},\n'))

    def _row(self, thread: threading.Thread) -> int:
        assert thread.ident is not None
        is_main = thread is threading.main_thread()
        with self._lock:
            row = self._threads[thread.ident] = 0 if is_main else len(self._threads)
        self._add_metadata('thread_name', {'name': 'main thread' if is_main else thread.name}, row)
        self._add_metadata('thread_sort_index', {'sort_index': row}, row)
        return row

    def _add_metadata(self, name: str, details: dict[str, object], row: int = 0) -> None:
        self._events.append(json.dumps({'ph': 'M', 'pid': self._pid, 'tid': row, 'name': name,
                                        'args': details}) + ',\n')


class _Span:
    """An event that lasts as long as a with statement."""

    __slots__ = ('_begin', '_category', '_details', '_name', '_timeline', '_watched')

    def __init__(self, timeline: Timeline, name: str, category: str, details: str,
                 watched: AbstractContextManager[None]) -> None:
        self._timeline, self._name = timeline, name
        self._category, self._details = category, details
        self._watched = watched

    def __enter__(self) -> None:
        self._watched.__enter__()
        self._begin = now()

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None,
                 tb: TracebackType | None) -> None:
        self._timeline.add(self._name, self._category, self._begin, now(), self._details)
        self._watched.__exit__(kind, value, tb)
        if kind is not None:  # this rank may exit
            self._timeline.write()
