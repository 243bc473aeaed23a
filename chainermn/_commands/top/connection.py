"""The connection to a job: one rank on this host sends the samples of all ranks."""
from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import time
from collections.abc import Generator, Iterator, Sequence
from typing import Any

from chainermn._commands import running_ranks
from chainermn._operations.exceptions import ChainerMNError
from chainermn._process import launcher

_TIMEOUT = 8.  # seconds, for a rank to connect and for each message
_RETRY = 2.  # seconds
_MAX_TRIES = 3  # ranks


class LostError(ChainerMNError, ConnectionError):
    """The ranks on this host do not respond, or have exited before the script had finished."""


def messages(ranks: Sequence[int]) -> Generator[dict[str, Any]]:
    """Yield the messages of a job until it has finished.

    Args:
        ranks: The process IDs of the job's ranks on this host. One of them sends messages for all.

    Raises:
        LostError: If no rank responds.
    """
    while True:
        is_answered = False
        for rank in ranks[:_MAX_TRIES]:
            for message in _of_rank(rank):
                is_answered = True
                if not message['size']:
                    return
                yield message
            if is_answered:
                break
        alive = [rank for rank in ranks if running_ranks.job(rank) is not None]
        if not alive:
            raise LostError('the job ended before its script had finished: a rank failed or was '
                            'killed; see the output of the job')
        if not is_answered:
            raise LostError(
                f'no rank responded (process{"es" * (len(alive) > 1)} '
                f'{", ".join(map(str, alive))}). Possible causes: the process is stopped, it runs '
                'code that holds the GIL, it uses another version of ChainerMN, or it is a '
                'single-rank job that has not called optimizer.update yet.')
        ranks = alive


def _of_rank(process: int) -> Iterator[dict[str, Any]]:
    """Yield the messages of one rank until it exits or stops responding."""
    name = secrets.token_hex(16)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f'\0chainermn-top-{name}')
        listener.listen()
        listener.settimeout(_RETRY)
        if (connection := _accept(listener, process, name)) is None:
            return
    with connection, connection.makefile('rb') as file:
        connection.settimeout(_TIMEOUT)
        with contextlib.suppress(OSError, ValueError):
            for line in file:
                yield json.loads(line)


def _accept(listener: socket.socket, process: int, name: str) -> socket.socket | None:
    """Ask a rank to connect; return the connection, or ``None`` if it does not connect in time."""
    deadline = time.monotonic() + _TIMEOUT
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            running_ranks.request(process, f'top {name}\n'.encode())
            connection, _ = listener.accept()
            if launcher.peer(connection) == (process, os.getuid()):
                return connection
            connection.close()  # another process has seen the name
        if running_ranks.job(process) is None:  # it has exited
            return None
    return None
