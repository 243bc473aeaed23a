"""The timeline: what this rank does when, in a file that Perfetto and chrome://tracing read.

With ``CHAINERMN_TIMELINE=out.json`` in the environment of all ranks, rank 3 of COMM_WORLD writes
``out.3.json``, from its first communicator on.  It is in Chrome's trace event format, as an array
with an event per line, to which events are appended: so it can be read while it is written, and
after a rank was killed, too.  Without the variable nothing is done.

Times are those of the rank's own clock; events named ``clock`` say how it stands to that of the
first rank of a group, and ``python -m chainermn timeline`` puts all on one clock.
"""
from __future__ import annotations

import atexit
import collections
import contextlib
import functools
import json
import os
import pathlib
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

from chainermn import _environment, _streams

VARIABLE = _environment.TIMELINE

_NOTHING: AbstractContextManager[Any] = contextlib.nullcontext()

#: Nanoseconds after which what happened is written, once something else happens.
_WRITTEN_AFTER = 50_000_000

now = time.perf_counter_ns

_current: Timeline | None = None


def is_on() -> bool:
    """Whether the environment asks for a timeline."""
    return bool(_environment.text(VARIABLE))


def get() -> Timeline | None:
    """The timeline of this process, or ``None``."""
    return _current


def span(name: str, category: str = '', arrays: Iterable[Any] = ()
         ) -> AbstractContextManager[Any]:
    """Puts what runs inside the with statement on the timeline, if there is one.

    Args:
        name: What it is.
        category: ``'verb'`` for what communicates, ``'wait'`` for waiting for other ranks.
        arrays: What is exchanged.
    """
    if _current is None:
        return _NOTHING
    return _Span(_current, name, category, described(arrays) if category == 'verb' else '')


def open_file(rank: int, size: int) -> None:
    """Begins the timeline of this process.

    Raises:
        OSError: If there can be no such file.
    """
    global _current
    if _current is None or _current.process != os.getpid():
        _current = Timeline(path_of(_environment.text(VARIABLE), rank), rank, size)
        atexit.register(write)


def write() -> None:
    """Writes what is not written yet."""
    if _current is not None:
        _current.write()


def close() -> None:
    """Ends the timeline; what happens from now on is not on it."""
    global _current
    timeline, _current = _current, None
    if timeline is not None:
        timeline.close()


def path_of(name: str, rank: int) -> pathlib.Path:
    """The file of a rank: its number goes before the suffix, which is ``.json`` by default."""
    path = pathlib.Path(name)
    return path.with_name(f'{path.stem}.{rank}{path.suffix or ".json"}')


@functools.lru_cache(maxsize=4096)
def quoted(text: str) -> str:
    """The text as JSON."""
    return json.dumps(text)


def described(arrays: Iterable[Any]) -> str:
    """Bytes, dtypes and shape of arrays, as members of a JSON object."""
    xs = list(arrays)
    if len(xs) == 1:
        return _described(xs[0].nbytes, (xs[0].dtype,), xs[0].shape)
    dtypes = dict.fromkeys([x.dtype for x in xs])
    return _described(sum([x.nbytes for x in xs]), tuple(dtypes), f'{len(xs)} arrays')


@functools.lru_cache(maxsize=4096)
def _described(nbytes: int, dtypes: tuple[Any, ...], shape: Any) -> str:
    return (f'"bytes":{nbytes},"dtype":{quoted(", ".join(map(str, dtypes)))},'
            f'"shape":{quoted(str(shape))}')


@functools.lru_cache(maxsize=4096)
def _head(pid: int, row: int, name: str, category: str) -> str:
    """The beginning of an event."""
    kind = f',"cat":{quoted(category)}' if category else ''
    return f'{{"ph":"X","pid":{pid},"tid":{row},"name":{quoted(name)}{kind}'


class Timeline:
    """Writes the events of this process; any thread may add some.

    Args:
        path: Of the file, which is made anew, readable by this user only.
        rank: Of this process in COMM_WORLD.
        size: How many there are.
    """

    def __init__(self, path: pathlib.Path, rank: int, size: int) -> None:
        path.unlink(missing_ok=True)  # whoever it belongs to, and whoever can read it
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        self.process = os.getpid()
        self.origin = now()
        #: How many communicators there have been, by the names of their ranks.
        self.communicators: collections.Counter[str] = collections.Counter()
        #: Groups of ranks whose clocks were compared, with what does that once more; in an order
        #: that is the same on all their ranks.
        self.compared: dict[tuple[int, ...], Callable[[], None]] = {}
        self._pid = rank
        self._lock = threading.Lock()
        os.register_at_fork(after_in_child=self._in_child)
        self._threads: dict[int, int] = {}  # rows by identifier
        # What is not written yet: lines, and events, of which lines are made then.
        self._events: collections.deque[Any] = collections.deque(['[\n'])
        self._write_at = 0
        self._is_closed = False
        self._say('process_name', {
            'name': f'rank {rank} ({os.uname().nodename}, process {os.getpid()})',
            'rank': rank, 'size': size, 'host': os.uname().nodename, 'started': time.time()})
        self._say('process_sort_index', {'sort_index': rank})
        self._row(threading.main_thread())
        self.write()

    def add(self, name: str, category: str, begin: int, end: int, details: str = '') -> None:
        """Adds what lasted from one time to another, both as :func:`now` gives them.

        Args:
            name: What it was.
            category: Of what kind.
            begin: When it began.
            end: When it ended.
            details: Members of a JSON object.
        """
        row = self._threads.get(threading.get_ident())
        if row is None:
            row = self._row(threading.current_thread())
        self._events.append((row, name, category, begin, end, details))
        if end > self._write_at and category != 'wait':  # what waits is not over yet
            self.write()

    def say_clock(self, details: dict[str, Any]) -> None:
        """Adds how the clock of this rank stands to another one just now."""
        self._events.append(json.dumps({
            'ph': 'i', 's': 'p', 'pid': self._pid, 'tid': 0, 'name': 'clock', 'cat': 'clock',
            'ts': (now() - self.origin) / 1000, 'args': details}) + ',\n')
        self.write()

    def _in_child(self) -> None:
        """The file is for the rank alone, of which another thread can have the lock."""
        self._lock = threading.Lock()
        self._is_closed = True

    def write(self) -> None:
        """Writes what was added."""
        with self._lock:
            lines = []
            while self._events:
                event = self._events.popleft()
                lines.append(event if isinstance(event, str) else self._line(*event))
            self._write_at = now() + _WRITTEN_AFTER
            if self._is_closed:
                return
            data = memoryview(''.join(lines).encode())
            try:
                while data:
                    data = data[os.write(self._file, data):]
            except OSError as error:  # the disk is full; the program has other things to do
                self._is_closed = True
                os.close(self._file)
                _streams.write(f'chainermn: the timeline of rank {self._pid} ends here: {error}\n')

    def close(self) -> None:
        """Writes the end of the file."""
        # An array does not end with a comma.
        self._events.append(f'{{"ph":"M","pid":{self._pid},"name":"end","args":{{}}}}\n]\n')
        self.write()
        if not self._is_closed:
            self._is_closed = True
            os.close(self._file)

    def _line(self, row: int, name: str, category: str, begin: int, end: int, details: str) -> str:
        return (f'{_head(self._pid, row, name, category)},"ts":{(begin - self.origin) / 1000},'
                f'"dur":{(end - begin) / 1000}' + (
                    f',"args":{{{details}}}}},\n' if details else '},\n'))

    def _row(self, thread: threading.Thread) -> int:
        assert thread.ident is not None
        is_main = thread is threading.main_thread()
        with self._lock:
            row = self._threads[thread.ident] = 0 if is_main else len(self._threads)
        self._say('thread_name', {'name': 'main thread' if is_main else thread.name}, row)
        self._say('thread_sort_index', {'sort_index': row}, row)
        return row

    def _say(self, name: str, details: dict[str, Any], row: int = 0) -> None:
        self._events.append(json.dumps({'ph': 'M', 'pid': self._pid, 'tid': row, 'name': name,
                                        'args': details}) + ',\n')


class _Span:
    """What runs inside a with statement."""

    __slots__ = ('_begin', '_category', '_details', '_name', '_timeline')

    def __init__(self, timeline: Timeline, name: str, category: str, details: str) -> None:
        self._timeline, self._name = timeline, name
        self._category, self._details = category, details

    def __enter__(self) -> None:
        self._begin = now()

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None,
                 tb: TracebackType | None) -> None:
        self._timeline.add(self._name, self._category, self._begin, now(), self._details)
        if kind is not None:  # it may be the last thing that this rank does
            self._timeline.write()
