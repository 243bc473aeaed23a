"""Where metrics go: a port of this host, or a file for a node exporter."""
from __future__ import annotations

import os
import pathlib
import re
import socket
import subprocess
import sys
import tempfile

from chainermn._process import metrics_server
from chainermn._process.metrics_file import MetricsFile

_ADDRESS = re.compile(r'(?:(\[[0-9a-fA-F:.%\w]+\]|[^][:/]+):)?(\d+)')


def open_target(target: str) -> MetricsFile:
    """Return the file that contains the metrics, after starting a server if it needs one.

    Args:
        target: ``PORT`` of the loopback interface, ``ADDRESS:PORT``, or the path of a file.

    Raises:
        OSError: If the port is in use, or the folder does not exist.
        ValueError: If it is none of these.
    """
    found = _ADDRESS.fullmatch(target)
    if found is None:
        if not target.endswith('.prom'):
            raise ValueError(f'must be PORT, ADDRESS:PORT or a file FILE.prom, not {target!r}')
        path = pathlib.Path(target).absolute()
        if not path.parent.is_dir():
            raise FileNotFoundError(f'there is no folder {path.parent}')
        return MetricsFile(path)
    address, port = (found[1] or '127.0.0.1').strip('[]'), int(found[2])
    if not 0 < port < 1 << 16:
        raise ValueError(f'there is no port {port}')
    family = socket.AF_INET6 if ':' in address else socket.AF_INET
    with socket.socket(family) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(128)
        return MetricsFile(_start_server(listener))


def _start_server(listener: socket.socket) -> pathlib.Path:
    """Start the server; return the file that it serves."""
    if not hasattr(os, 'pidfd_open'):
        raise OSError('a port needs Linux; use a file')
    process = os.pidfd_open(os.getpid())
    path = pathlib.Path(tempfile.mkdtemp(prefix='chainermn-metrics-')) / 'metrics.prom'
    try:
        command = [sys.executable, '-I', '-S', metrics_server.__file__, str(listener.fileno()),
                   str(process), str(path)]
        # The shell exits at once, so the server is not a child that the program might wait for.
        subprocess.run(['/bin/sh', '-c', '"$0" "$@" &', *command], check=True,
                       pass_fds=(listener.fileno(), process), start_new_session=True,
                       stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                       stderr=subprocess.DEVNULL)
    finally:
        os.close(process)
    return path
