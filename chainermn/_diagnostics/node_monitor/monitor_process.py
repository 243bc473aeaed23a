"""The process of the node monitor: waits for the ranks on its node and reports the first failure.

It runs as a separate program that uses only the standard library. Its arguments are the descriptor
of the socket on which it listens; the number of ranks of the job; whether all of them are on this
node; ``rank:process:file`` for each rank on this node, where the file is a pidfd; and the pidfds of
the ranks' launchers, which are the mpiexec processes on this node.

The ranks wait until the monitor is ready, so it imports nothing slow: not even contextlib, signal
and socket, which take half of Python's startup time.
"""
from __future__ import annotations

import _socket
import fcntl
import os
import select
import struct
import sys
import time

#: A rank first sends a line with its number and the files to remove. Then it sends stacks from
#: faulthandler and these bytes, which no stack contains: to ask whether it may report a failure, to
#: say that it has reached the end of the script, and, together with a socket, to pass a connection
#: to another host that must be kept open.
REQUEST, DEREGISTER, KEEP_OPEN = b'\xf0', b'\xf1', b'\xf2'
#: Messages to a rank: the monitor is ready; answers to a request (only the first one is granted).
READY, GRANTED, DENIED = b'r', b'y', b'n'
#: Message to another host: all ranks on this node have exited, and a failure was reported.
FAILED = b'f'

# Seconds. After the grace period, the monitor kills ranks that mpiexec has left running.
_GRACE = 2
_REPORT_TIMEOUT = 10  # for a rank that reports a failure to abort the job
_STATUS_TIMEOUT = .1  # for the kernel to publish the exit status of a process
_KILL_TIMEOUT = .2  # for mpiexec to kill all ranks of a node
_EXIT_TIMEOUT = 1  # for a rank to exit after its files were closed or mpiexec has killed it

_PIDFD_GET_INFO, _PIDFD_INFO_EXIT = 0xC040FF0B, 8  # since Linux 6.15
_INFO = struct.Struct('=QQ11Ii')
_SIGKILL, _SIGTERM = 9, 15


class suppress:  # noqa: N801  (as in contextlib)
    """Suppresses exceptions of the given types."""

    def __init__(self, *kinds: type[BaseException]) -> None:
        self.kinds = kinds

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        return kind is not None and issubclass(kind, self.kinds)


class MonitoredRank:
    """A rank on this node."""

    def __init__(self, number: int, process: int, file: int) -> None:
        self.number, self.process, self.file = number, process, file
        self.received = b''
        self.status: int | None = None  # as returned by wait(); None if unknown

    def read_status(self) -> None:
        """Read the exit status."""
        deadline = time.monotonic() + _STATUS_TIMEOUT
        while self.status is None and time.monotonic() < deadline:
            self._poll_status()

    def _poll_status(self) -> None:
        with suppress(OSError, ValueError, IndexError):  # readable until the parent waits for it
            with open(f'/proc/{self.process}/stat', 'rb') as file:
                words = file.read().rpartition(b')')[2].split()
            if words[0] == b'Z':
                self.status = int(words[-1])
                return
        with suppress(OSError, struct.error):
            info = bytearray(_INFO.size)
            _INFO.pack_into(info, 0, _PIDFD_INFO_EXIT, *[0] * 13)
            fcntl.ioctl(self.file, _PIDFD_GET_INFO, info)
            mask, *_, status = _INFO.unpack(info)
            if mask & _PIDFD_INFO_EXIT:
                self.status = status

    def kill(self) -> None:
        from signal import pidfd_send_signal

        with suppress(OSError):
            pidfd_send_signal(self.file, _SIGKILL)

    @property
    def has_exited(self) -> bool:
        return bool(select.select([self.file], [], [], 0)[0])

    @property
    def has_finished(self) -> bool:
        """Whether the rank reached the end of the script and exited normally."""
        return DEREGISTER in self.received and self.status in (0, None)

    @property
    def was_killed(self) -> bool:
        return self.status is not None and os.WIFSIGNALED(self.status) and (
            os.WTERMSIG(self.status) in (_SIGKILL, _SIGTERM))

    @property
    def reason(self) -> str:
        """The reason for the exit, as text."""
        if self.status is None:
            return 'exited or was killed by a signal (the status is unknown)'
        if os.WIFSIGNALED(self.status):
            import signal

            number = os.WTERMSIG(self.status)
            with suppress(ValueError):
                name, text = signal.Signals(number).name, signal.strsignal(number)
                more = ', possibly by the kernel because memory ran out' if (
                    number == _SIGKILL) else ''
                return f'killed by {name} ({text}{more})'
            return f'killed by signal {number}'
        status = os.WEXITSTATUS(self.status)
        if DEREGISTER in self.received:
            return f'exited with status {status}'
        return f'exited with status {status} before the end of its script'

    @property
    def stack(self) -> bytes:
        """The stack from faulthandler, if there is one."""
        stack = self.received.translate(None, REQUEST + DEREGISTER + KEEP_OPEN)
        return b''.join(line for line in stack.splitlines(keepends=True)
                        if not line.startswith(b'Extension modules:'))


class _Connection:
    """The connection of a rank. The rank is unknown until its first line has arrived."""

    def __init__(self, connection: _socket.socket) -> None:
        self.socket = connection
        self.rank: MonitoredRank | None = None
        self.line = b''


class Monitor:
    """Waits for the ranks on this node.

    Args:
        listener: The descriptor of the socket to which the ranks connect.
        size: The number of ranks of the job.
        is_alone: Whether all ranks are on this node.
        ranks: The ranks on this node.
        launchers: The descriptors of the ranks' launchers.
    """

    def __init__(self, listener: int, size: int, is_alone: bool, ranks: list[MonitoredRank],
                 launchers: list[int]) -> None:
        self.size, self.is_alone = size, is_alone
        self.ranks = {rank.number: rank for rank in ranks}
        self.running = {rank.file: rank for rank in ranks}
        self.exited: list[MonitoredRank] = []
        # A process that exits closes its files, the newest first: its connection to the monitor
        # before its connection to mpiexec, which then kills the other ranks.
        self.leaving: list[MonitoredRank] = []  # in the order of closed connections and of exits
        self.connections: dict[int, _Connection] = {}
        self.hangups: dict[int, int] = {}  # descriptors of connections, by a duplicate of each
        self.requests: list[_socket.socket] = []
        self.segments: set[str] = set()  # files of shared memory
        self.kept_open: list[int] = []  # connections to other hosts
        self.failed_at = self.reported_at = self.launcher_ended_at = 0.
        self.oom_kills = _oom_kills()
        self.listener = _socket.socket(fileno=listener)
        self.listener.setblocking(False)
        # Unlike poll, epoll returns files in the order in which they became ready.
        self.epoll = select.epoll()
        self.launchers = launchers
        for file in (listener, *self.running, *launchers):
            self.epoll.register(file, select.EPOLLIN)

    def run(self) -> None:
        """Wait until all ranks have exited."""
        while self.running:
            if self.reported_at and time.monotonic() > self.reported_at + _GRACE:
                for rank in self.running.values():
                    rank.kill()
            self._wait()
            with suppress(OSError):
                while True:
                    self._accept()
            for file in list(self.connections):
                with suppress(OSError, ValueError, KeyError):
                    self._receive(file)
            self._answer_requests()
            if not self.reported_at:
                self._report_failure()
            self._report_launcher()
        if self.reported_at:
            for file in self.kept_open:
                with suppress(OSError):
                    os.write(file, FAILED)
            for path in self.segments:
                with suppress(OSError):
                    os.unlink(path)

    def _wait(self) -> None:
        """Wait for an event; record ranks that have exited or closed their connection."""
        interval = None
        if self.failed_at > self.reported_at:
            interval = .01
        elif self.reported_at or self.launcher_ended_at:
            interval = .1
        for file, _ in self.epoll.poll(interval):
            if file in self.launchers:
                self.epoll.unregister(file)
                self.launcher_ended_at = time.monotonic()
            elif file in self.running:
                rank = self.running.pop(file)
                self.epoll.unregister(file)
                rank.read_status()
                self.exited.append(rank)
                self.leaving.append(rank)
            elif file in self.hangups:
                self.epoll.unregister(file)
                os.close(file)
                connection = self.hangups.pop(file)
                with suppress(OSError, ValueError):
                    self._receive(connection)
                closed = self.connections[connection].rank
                if closed is not None:
                    self.leaving.append(closed)

    def _accept(self) -> None:
        file = self.listener._accept()[0]  # type: ignore[attr-defined]
        connection = _socket.socket(fileno=file)
        _, user, _ = struct.unpack('3i', connection.getsockopt(
            _socket.SOL_SOCKET, _socket.SO_PEERCRED, 12))
        if user != os.getuid():
            connection.close()
            return
        connection.setblocking(False)
        self.connections[file] = _Connection(connection)
        self.epoll.register(file, select.EPOLLIN)
        hangup = os.dup(file)
        self.hangups[hangup] = file
        self.epoll.register(hangup, select.EPOLLRDHUP)
        connection.send(READY)

    def _receive(self, file: int) -> None:
        """Read from the connection of a rank."""
        connection = self.connections[file]
        with suppress(BlockingIOError):
            while received := self._recv(connection.socket):
                if connection.rank is None:
                    connection.line, end, received = (
                        connection.line + received).partition(b'\n')
                    if end:
                        number, *files = connection.line.decode().split()
                        connection.rank = self.ranks.get(int(number))
                        self.segments.update(files)
                if connection.rank is not None:
                    connection.rank.received += received
                    if REQUEST in received:
                        self.requests.append(connection.socket)
            self.epoll.unregister(file)

    def _recv(self, connection: _socket.socket) -> bytes:
        received, messages, *_ = connection.recvmsg(65536, _socket.CMSG_SPACE(4))
        for level, kind, data in messages:
            if (level, kind) == (_socket.SOL_SOCKET, _socket.SCM_RIGHTS):
                self.kept_open += struct.unpack('i', data)
        return received

    def _answer_requests(self) -> None:
        for connection in self.requests:
            with suppress(OSError):
                connection.send(DENIED if self.reported_at else GRANTED)
            self.reported_at = self.reported_at or time.monotonic() + _REPORT_TIMEOUT
        self.requests.clear()

    def _report_launcher(self) -> None:
        """Kill the ranks if their launcher exited before them, because then mpiexec has failed."""
        if self.launcher_ended_at and time.monotonic() > self.launcher_ended_at + _EXIT_TIMEOUT:
            self.launcher_ended_at = 0.
            if not self.reported_at:
                self.reported_at = time.monotonic()
                _report(f'the mpiexec process on host {os.uname().nodename} exited before its '
                        'ranks, possibly killed because memory ran out. Its ranks are killed now.')
            for rank in self.running.values():
                rank.kill()

    def _report_failure(self) -> None:
        """Report the rank that failed first, once it is known."""
        failed = [rank for rank in self.exited if not rank.has_finished]
        if not failed:
            return
        # On a busy node, mpiexec may kill other ranks before the monitor polls.
        first = min(failed, key=lambda rank: (rank.was_killed, self.leaving.index(rank)))
        self.failed_at = self.failed_at or time.monotonic()
        if time.monotonic() < self.failed_at + _EXIT_TIMEOUT and any(
                rank in self.running.values()
                for rank in self.leaving[:self.leaving.index(first)]):
            return
        self.reported_at = time.monotonic()
        name = (f'rank {first.number} of {self.size} (host {os.uname().nodename}, process '
                f'{first.process})')
        if first.was_killed and not self.is_alone:
            # A rank on another node may have failed first, so that mpiexec killed all ranks here.
            time.sleep(_KILL_TIMEOUT)
            if all(rank.has_exited for rank in self.running.values()):
                _report(f'{name} ended first on its host: {first.reason}. If a rank on another '
                        'host failed earlier, mpiexec killed this one because of it.')
                return
        more = ''
        if first.was_killed and _oom_kills() > self.oom_kills:
            more = '; the kernel has just killed a process on this host because memory ran out'
        _report(f'{name} failed: {first.reason}{more}', first.stack)


def _report(text: str, stack: bytes = b'') -> None:
    with suppress(OSError):
        os.write(2, f'chainermn: {text}\n'.encode() + stack)
    folder = os.environ.get('CHAINERMN_RUN_FOLDER')  # set by chainermn run
    if folder is not None:
        with suppress(OSError):
            path = f'{folder}/{time.time_ns()}-{os.getpid()}'
            with open(f'{path}.part', 'w') as file:
                file.write(text)
            os.rename(f'{path}.part', f'{path}.txt')


def _oom_kills() -> int:
    """Return how many processes on this host the kernel has killed because memory ran out."""
    with suppress(OSError, ValueError), open('/proc/vmstat', 'rb') as file:
        for line in file:
            if line.startswith(b'oom_kill '):
                return int(line.split()[1])
    return 0


if __name__ == '__main__':
    _listener, _size, _is_alone, *_processes = sys.argv[1:]
    Monitor(int(_listener), int(_size), _is_alone == '1',
            [MonitoredRank(*map(int, each.split(':'))) for each in _processes if ':' in each],
            [int(each) for each in _processes if ':' not in each]).run()
