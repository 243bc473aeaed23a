"""The process that publishes metrics: on a port over HTTP, or in a file for a node exporter.

It runs as a separate program that uses only the standard library, so requests and slow disks do not
slow down training. It reads pages of metrics from a socket; each page ends with a zero byte. It
exits when the socket is closed, which happens at the latest when the process that started it exits.
Its arguments are the descriptor of the socket, then either the path of a file, or an address and a
port.
"""
from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import sys
import time
from collections.abc import AsyncIterator

_MAX_CONNECTIONS = 64
_MAX_REQUEST = 8192  # bytes
_MAX_PAGE = 1 << 26  # bytes
_TIMEOUT = 5  # seconds for a request and the response
_BIND_TIMEOUT = 10  # seconds; the previous attempt of a job may not have closed the port yet
_NICENESS = 10


class Page:
    """The newest page of metrics, and the responses to requests for it."""

    def __init__(self) -> None:
        self._body: bytes | None = None  # none yet
        self._n_connections = 0

    async def read(self, pages: AsyncIterator[bytes]) -> None:
        """Keep the newest page, until there are no more pages."""
        async for self._body in pages:
            pass

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Respond to one request, then close the connection."""
        self._n_connections += 1
        try:
            if self._n_connections <= _MAX_CONNECTIONS:
                await asyncio.wait_for(self._respond(reader, writer), _TIMEOUT)
        except (OSError, asyncio.TimeoutError, asyncio.IncompleteReadError,
                asyncio.LimitOverrunError):
            pass
        finally:
            self._n_connections -= 1
            writer.transport.abort() if writer.transport.get_write_buffer_size() else writer.close()

    async def _respond(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.readuntil(b'\r\n\r\n')
        method, _, rest = request.partition(b' ')
        status, body = b'200 OK', b''
        if method not in (b'GET', b'HEAD'):
            status = b'405 Method Not Allowed'
        elif rest.partition(b' ')[0].partition(b'?')[0] not in (b'/metrics', b'/'):
            status = b'404 Not Found'
        elif self._body is None:
            status = b'503 Service Unavailable'
        else:
            body = self._body
        writer.write(b'HTTP/1.1 %b\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n'
                     b'Content-Length: %d\r\nConnection: close\r\n\r\n' % (status, len(body)))
        if method == b'GET':
            writer.write(body)
        writer.transport.set_write_buffer_limits(0)  # drain() waits until all is sent
        await writer.drain()


async def _serve(pages: AsyncIterator[bytes], address: str, port: int) -> None:
    """Serve the newest page, until there are no more pages."""
    page = Page()
    reading = asyncio.ensure_future(page.read(pages))
    deadline = time.monotonic() + _BIND_TIMEOUT
    while not reading.done():
        try:
            await asyncio.start_server(page.handle, address, port, limit=_MAX_REQUEST)
            await reading
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                raise
            await asyncio.wait({reading}, timeout=1)


async def _write(pages: AsyncIterator[bytes], path: str) -> None:
    """Replace the file with each page, and remove it at the end."""
    part = f'{path}.part'  # a node exporter reads *.prom
    try:
        async for page in pages:
            with contextlib.suppress(FileNotFoundError):
                os.remove(part)  # O_EXCL fails if the path exists, even as a link
            descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            with open(descriptor, 'wb') as file:
                file.write(page)
            os.replace(part, path)
    finally:
        for each in part, path:
            with contextlib.suppress(OSError):
                os.remove(each)


async def _read(connection: socket.socket) -> AsyncIterator[bytes]:
    """Yield the pages from a socket."""
    reader, writer = await asyncio.open_unix_connection(sock=connection, limit=_MAX_PAGE)
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError), contextlib.closing(
            writer):
        while True:
            yield (await reader.readuntil(b'\0'))[:-1]


async def publish(connection: socket.socket, place: str, port: str | None = None) -> None:
    """Publish the pages from a socket until it is closed.

    Args:
        connection: The socket.
        place: The path of a file, or an address.
        port: The port, if ``place`` is an address.

    Raises:
        OSError: If the file or the address cannot be used.
    """
    pages = _read(connection)
    await (_write(pages, place) if port is None else _serve(pages, place, int(port)))


def main(file: str, *place: str) -> None:
    """Run the process."""
    os.nice(_NICENESS)
    try:
        asyncio.run(publish(socket.socket(fileno=int(file)), *place))
    except OSError as error:
        print(f'chainermn: cannot publish metrics of {os.uname().nodename} on '
              f'{":".join(place)}: {_problem(error, *place)}', file=sys.stderr)


def _problem(error: OSError, place: str, port: str = '') -> str:
    if error.errno == errno.EADDRINUSE:
        return (f'port {port} is already in use, for example by another job on this host. Set '
                'CHAINERMN_METRICS, or --metrics of chainermn run, to a different port.')
    return error.strerror or str(error)


if __name__ == '__main__':
    main(*sys.argv[1:])
