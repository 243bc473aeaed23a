"""Processes that read batches, for Python readers that would hold the GIL and delay training.

They are new Python processes rather than forks, because a fork of a rank would have copies of its
connections and locks. Cloudpickle serializes the batches to read, so the user's script needs no
main guard. A process exits when its connection is shut down or the rank has exited.
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

#: Seconds that processes may take to exit before they are killed.
_GRACE = 3.

_PROGRAM = ('import json, sys; sys.path[:] = json.loads(sys.argv[1]); '
            f'from {__name__} import run; run(*map(int, sys.argv[2:]))')

#: Function that sends a message to the rank, given the kind and the content of the message.
_Send = Callable[[str, Object], None]


class ReaderTraceback(ChainerMNError):  # noqa: N818  (only used as the cause of an error)
    """The traceback of an error in a reader process."""


class ReaderProcesses(Iterator[PlacedBatch]):
    """An iterator over the batches of a rank, which several processes read in turn.

    A process that is ahead waits until the buffer of its connection has room.

    Args:
        batches: All batches of the rank.
        position: Position of the first batch.
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
            for index in range(n):
                self._processes.append(_Reader(index, n))
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
        """Stop the processes and wait until they have exited."""
        self.interrupt()
        deadline = time.monotonic() + _GRACE
        for each in self._processes:
            each.end(deadline)


class _Reader:
    """A reader process and the connection to it."""

    def __init__(self, index: int, n: int) -> None:
        path = json.dumps([entry for entry in sys.path if isinstance(entry, str)])
        self._connection, theirs = socket.socketpair()
        self._messages = self._connection.makefile('rb')
        with theirs:
            numbers = theirs.fileno(), os.getpid(), index, n
            self._process = subprocess.Popen(
                [sys.executable, '-c', _PROGRAM, path, *map(str, numbers)],
                env=mpiexec.environment(os.cpu_count() or 1),  # one thread each
                pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)

    def send(self, task: bytes) -> None:
        with contextlib.suppress(ConnectionError):  # receive() reports the reason
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
        return (f'reader process {self._process.pid} {how}. If memory ran out, reduce n_processes '
                'or buffer.')

    def interrupt(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def end(self, deadline: float) -> int:
        """Wait for the process until the deadline, then kill it. Return its exit status."""
        try:
            self._process.wait(max(0., deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._messages.close()
        self._connection.close()
        return self._process.wait()


def run(file: int, parent: int, index: int, n: int) -> None:
    """Read batches and send them to the rank. Called in a reader process.

    Args:
        file: File descriptor of the connection.
        parent: Process ID of the rank.
        index: Index of this process among the reader processes.
        n: Number of reader processes.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the rank stops this process
    threading.Thread(target=_exit_with, args=(parent,), daemon=True).start()
    connection = socket.socket(fileno=file)

    def send(kind: str, content: Object) -> None:
        try:
            message = pickle.dumps((kind, content), protocol=5)
        except Exception:  # e.g. pickle cannot serialize a class that the script defines
            message = _dumps((kind, content))
        try:
            connection.sendall(message)
        except ConnectionError:
            sys.exit()  # the rank needs no more batches

    logger = logging.getLogger('chainermn')
    logger.addHandler(_LogToRank(send))
    logger.propagate = False
    try:
        with connection.makefile('rb') as tasks:
            batches, position = pickle.load(tasks)
        _seed(batches, position, index)
        for samples, after, skipped in batches.read(position, index, n):
            send('batch', (pack(samples), after, skipped))
        send('end', None)
    except Exception as error:
        common_error.hide_frames(error)
        reason: BaseException = error
        if isinstance(error, ShardError):
            reason = error.__cause__ or error  # the rank raises a new ShardError
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


def _seed(batches: Batches, position: Position, index: int) -> None:
    """Seed the random numbers of a transform from the seed, the position and the process."""
    text = repr((batches.order.settings().tolist(), position, batches.rank, index))
    random.seed(text)
    np.random.seed(zlib.crc32(text.encode()))


def _dumps(value: Object) -> bytes:
    stream = io.BytesIO()
    Pickler(stream, protocol=5).dump(value)
    return stream.getvalue()
