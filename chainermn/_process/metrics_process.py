"""Starts the process that publishes metrics; see ``metrics_server.py``."""
from __future__ import annotations

import os
import pathlib
import re
import socket
import subprocess
import sys

_ADDRESS = re.compile(r'(?:(\[[0-9a-fA-F:.%\w]+\]|[^][:/]+):)?(\d+)')

_MAX_PORT = 65535

#: Not imported here, because it imports asyncio.
_SERVER = pathlib.Path(__file__).with_name('metrics_server.py')


def parse(target: str) -> tuple[str, int] | str:
    """Return the address and the port, or the path of a file.

    Args:
        target: ``PORT`` of the loopback interface, ``ADDRESS:PORT``, or ``FILE.prom``.

    Raises:
        ValueError: If it is none of these.
    """
    if target.endswith('.prom'):
        return os.path.abspath(target)
    found = _ADDRESS.fullmatch(target)
    if found is None:
        raise ValueError(f'must be PORT, ADDRESS:PORT or a file FILE.prom, not {target!r}')
    if not 0 < int(found[2]) <= _MAX_PORT:
        raise ValueError(f'must have a port from 1 to {_MAX_PORT}, not {found[2]}')
    return (found[1] or '127.0.0.1').strip('[]'), int(found[2])


def start(target: str) -> socket.socket:
    """Start the process; return a nonblocking socket for the pages.

    If the process cannot use the target, it prints a warning and exits.

    Args:
        target: Same as for :func:`parse`.

    Raises:
        OSError, subprocess.SubprocessError: If the process cannot be started.
        ValueError: If the target is invalid.
    """
    place = parse(target)
    arguments = [place] if isinstance(place, str) else [*map(str, place)]
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            # The shell exits immediately, so the new process is not a child of this one: user code
            # might wait for all children.
            subprocess.run(
                ['/bin/sh', '-c', '"$0" "$@" &', sys.executable, '-I', '-S', str(_SERVER),
                 str(theirs.fileno()), *arguments], check=True, pass_fds=[theirs.fileno()],
                start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
            ours.setblocking(False)
        except BaseException:
            ours.close()
            raise
    return ours
