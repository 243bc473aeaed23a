"""The process that serves metrics over HTTP, so that requests take no time of the training.

It runs as a separate program that uses only the standard library.  Arguments: the descriptor of the
listening socket, the pidfd of the process whose metrics it serves, and their file, which it removes
when that process has exited.
"""
from __future__ import annotations

import asyncio
import contextlib
import os
import pathlib
import socket
import sys

_MAX_CONNECTIONS = 64
_MAX_REQUEST = 8192  # bytes
_TIMEOUT = 5  # seconds for a request and its answer
_NICENESS = 10


class Server:
    """Serves a file.

    Args:
        path: The file.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path
        self._n_connections = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request, then close the connection."""
        self._n_connections += 1
        try:
            if self._n_connections <= _MAX_CONNECTIONS:
                await asyncio.wait_for(self._answer(reader, writer), _TIMEOUT)
        except (OSError, asyncio.TimeoutError, asyncio.IncompleteReadError,
                asyncio.LimitOverrunError):
            pass
        finally:
            self._n_connections -= 1
            writer.transport.abort() if writer.transport.get_write_buffer_size() else writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.readuntil(b'\r\n\r\n')
        method, _, rest = request.partition(b' ')
        status, body = b'200 OK', b''
        if method not in (b'GET', b'HEAD'):
            status = b'405 Method Not Allowed'
        elif rest.partition(b' ')[0].partition(b'?')[0] not in (b'/metrics', b'/'):
            status = b'404 Not Found'
        else:
            try:
                body = self._path.read_bytes()
            except OSError:
                status = b'503 Service Unavailable'  # there are no metrics yet
        writer.write(b'HTTP/1.1 %b\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n'
                     b'Content-Length: %d\r\nConnection: close\r\n\r\n' % (status, len(body)))
        if method == b'GET':
            writer.write(body)
        writer.transport.set_write_buffer_limits(0)  # drain until everything is sent
        await writer.drain()


async def serve(listener: socket.socket, process: int, path: pathlib.Path) -> None:
    """Serve a file until a process exits.

    Args:
        listener: The listening socket.
        process: The pidfd of the process.
        path: The file.
    """
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(process, ended.set)
    server = await asyncio.start_server(Server(path).handle, sock=listener, limit=_MAX_REQUEST)
    await ended.wait()
    server.close()


def main(arguments: list[str]) -> None:
    """Run the server."""
    os.nice(_NICENESS)
    path = pathlib.Path(arguments[2])
    try:
        asyncio.run(serve(socket.socket(fileno=int(arguments[0])), int(arguments[1]), path))
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
            path.parent.rmdir()


if __name__ == '__main__':
    main(sys.argv[1:])
