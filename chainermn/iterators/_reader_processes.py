"""Processes that read batches, for readers in Python that would keep the GIL from training.

They are new programs, since a fork of a rank has copies of its connections and locks. Cloudpickle
sends them the batches to read, so the script needs no main guard. They exit when their connection
is shut down, or the rank has ended.
"""
from __future__ import annotations

import contextlib
import io
import itertools
import json
import logging
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Iterator

import numpy as np

from chainermn._operations import common_error
from chainermn._operations.exceptions import ChainerMNError, ShardError
from chainermn._process import mpiexec
from chainermn._process.pickler import Pickler
from chainermn._shards.batches import Batches, PlacedBatch, Position
from chainermn._shards.open_shards import explain
from chainermn._types import Object
from chainermn.iterators._columns import pack, unpack

#: Seconds for processes to end, before they are killed.
_GRACE = 3.

_PROGRAM = ('import json, sys; sys.path[:] = json.loads(sys.argv[1]); '
            f'from {__name__} import run; run(*map(int, sys.argv[2:]))')

#: Sends a message of some kind to the rank.
_Send = Callable[[str, Object], None]


class ReaderTraceback(ChainerMNError):  # noqa: N818  it is only the cause of an error
    """The traceback of an error in a process."""


class ReaderProcesses(Iterator[PlacedBatch]):
    """The batches of a rank, which processes read in turns.

    A process that is ahead waits until there is room in the buffer of its connection.

    Args:
        batches: All batches.
        position: Where to begin.
        n: Number of processes.

    Raises:
        TypeError: If the batches cannot be pickled.
    """

    def __init__(self, batches: Batches, position: Position, n: int) -> None:
        try:
            task = _dumps((batches, position))
        except Exception as error:  # pickling can run arbitrary code
            raise TypeError(f'n_processes={n}: the shards, reader or transform cannot be pickled: '
                            f'{explain(error)}') from error
        self._processes: list[_Reader] = []
        try:
            for turn in range(n):
                self._processes.append(_Reader(turn, n))
            for each in self._processes:
                each.send(task)
        except BaseException:
            self.close()
            raise
        self._turns = itertools.cycle(self._processes)

    def __next__(self) -> PlacedBatch:
        return next(self._turns).receive()

    def interrupt(self) -> None:
        """Shut down the connections. Any thread may call it."""
        for each in self._processes:
            each.interrupt()

    def close(self) -> None:
        """End the processes, and wait for them."""
        self.interrupt()
        deadline = time.monotonic() + _GRACE
        for each in self._processes:
            each.end(deadline)


class _Reader:
    """A process, and the connection to it."""

    def __init__(self, turn: int, n: int) -> None:
        path = json.dumps([entry for entry in sys.path if isinstance(entry, str)])
        self._connection, theirs = socket.socketpair()
        self._messages = self._connection.makefile('rb')
        with theirs:
            numbers = theirs.fileno(), os.getpid(), turn, n
            self._process = subprocess.Popen(
                [sys.executable, '-c', _PROGRAM, path, *map(str, numbers)],
                env=mpiexec.environment(os.cpu_count() or 1),  # one thread each
                pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)

    def send(self, task: bytes) -> None:
        with contextlib.suppress(ConnectionError):  # receive() tells why
            self._connection.sendall(task)

    def receive(self) -> PlacedBatch:
        while True:
            try:
                kind, content = pickle.load(self._messages)
            except (EOFError, OSError, pickle.UnpicklingError):
                raise ShardError(self._reason()) from None
            if kind == 'log':
                logging.getLogger('chainermn').log(*content)
            elif kind == 'batch':
                samples, after, skipped = content
                return PlacedBatch(unpack(samples), after, skipped)
            elif kind == 'end':
                raise StopIteration
            else:
                text, lines = content
                raise ShardError(text) from ReaderTraceback(f'\n{lines}')

    def _reason(self) -> str:
        status = self.end(time.monotonic() + _GRACE)
        how = f'exited with status {status}' if status >= 0 else f'was killed by signal {-status}'
        return (f'process {self._process.pid}, which read batches, {how}. If memory ran out, '
                'reduce n_processes or buffer.')

    def interrupt(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def end(self, deadline: float) -> int:
        """Wait until a time, then kill the process; return its status."""
        try:
            self._process.wait(max(0., deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._messages.close()
        self._connection.close()
        return self._process.wait()


def run(file: int, parent: int, turn: int, n: int) -> None:
    """Read batches, in a process.

    Args:
        file: Descriptor of the connection.
        parent: The rank's process.
        turn: Of this process.
        n: Number of processes.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the rank decides
    threading.Thread(target=_exit_with, args=(parent,), daemon=True).start()
    connection = socket.socket(fileno=file)

    def send(kind: str, content: Object) -> None:
        try:
            message = pickle.dumps((kind, content), protocol=5)
        except Exception:  # raised for a class that the script defines
            message = _dumps((kind, content))
        try:
            connection.sendall(message)
        except ConnectionError:
            sys.exit()  # the batches are not needed any more

    logger = logging.getLogger('chainermn')
    logger.addHandler(_LogToRank(send))
    logger.propagate = False
    try:
        with connection.makefile('rb') as tasks:
            batches, position = pickle.load(tasks)
        _seed(batches, position, turn)
        for samples, after, skipped in batches.read(position, turn, n):
            send('batch', (pack(samples), after, skipped))
        send('end', None)
    except Exception as error:
        common_error.hide_frames(error)
        reason: BaseException = error
        if isinstance(error, ShardError):
            reason = error.__cause__ or error  # the rank wraps it in a ShardError of its own
        text = str(error) if isinstance(error, ShardError) else explain(error)
        send('error', (text, ''.join(traceback.format_exception(reason))))


class _LogToRank(logging.Handler):
    def __init__(self, send: _Send) -> None:
        super().__init__()
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        self._send('log', (record.levelno, record.getMessage()))


def _exit_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _seed(batches: Batches, position: Position, turn: int) -> None:
    """Let random numbers of a transform depend on the seed, the position and the process."""
    text = repr((batches.order.settings().tolist(), position, batches.rank, turn))
    random.seed(text)
    np.random.seed(zlib.crc32(text.encode()))


def _dumps(value: Object) -> bytes:
    stream = io.BytesIO()
    Pickler(stream, protocol=5).dump(value)
    return stream.getvalue()
