"""The process of the node monitor: waits for the ranks of its node, and reports who ended first.

It is started as a program of its own, with nothing but the standard library.  Its arguments are
the number of the socket at which it listens, and says that it is ready; the number of ranks of the
job; whether all of them are on this node; and for each rank here
``rank:process:file``: its number, that of its process, and that of the open file by which Linux
knows a process.

The ranks wait until it is ready, so it imports nothing that takes long: not even contextlib,
signal and socket, which are half of what Python takes to start.
"""
from __future__ import annotations

import _socket
import fcntl
import os
import select
import struct
import sys
import time

#: What a rank sends: a line with its number and files to remove; then stacks, and one of these when
#: it asks whether to say why it ends the job, or has reached the end of its program.  No stack has
#: such bytes.
ASKS, GOODBYE = b'\xf0', b'\xf1'
#: What it says once it looks; and the answers: only who is the first says it.
READY, YES, NO = b'r', b'y', b'n'

# Seconds. What mpiexec has not ended by then, the node monitor does.
_GRACE = 2
# For the kernel to hand a status over to who waits for the process, and then to keep it.
_STATUS_WITHIN = .1
# For mpiexec to end all ranks of a node at once, if it does.
_ALL_AT_ONCE = .2
# For a rank whose files are closed to end.
_ENDS_WITHIN = 1

_PIDFD_GET_INFO, _PIDFD_INFO_EXIT = 0xC040FF0B, 8  # of Linux 6.15
_INFO = struct.Struct('=QQ11Ii')
_SIGKILL, _SIGTERM = 9, 15


class suppress:  # noqa: N801  (that of contextlib)
    """Passes over these errors of its body."""

    def __init__(self, *kinds: type[BaseException]) -> None:
        self.kinds = kinds

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        return kind is not None and issubclass(kind, self.kinds)


class Rank:
    """A rank of this node."""

    def __init__(self, number: int, process: int, file: int) -> None:
        self.number, self.process, self.file = number, process, file
        self.heard = b''
        self.status: int | None = None  # as of wait(), if it could be found out

    def end(self) -> None:
        """Finds out how it has ended."""
        give_up = time.monotonic() + _STATUS_WITHIN
        while self.status is None and time.monotonic() < give_up:
            self._look()

    def _look(self) -> None:
        with suppress(OSError, ValueError, IndexError):  # while nobody has waited for it
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
    def is_ordinary(self) -> bool:
        """Whether the program ended normally."""
        return GOODBYE in self.heard and self.status in (0, None)

    @property
    def was_killed(self) -> bool:
        return self.status is not None and os.WIFSIGNALED(self.status) and (
            os.WTERMSIG(self.status) in (_SIGKILL, _SIGTERM))

    @property
    def why(self) -> str:
        """How it has ended, in words."""
        if self.status is None:
            return 'ended by a signal or an exit, which was not seen'
        if os.WIFSIGNALED(self.status):
            import signal

            number = os.WTERMSIG(self.status)
            with suppress(ValueError):
                name = signal.Signals(number).name
                said = signal.strsignal(number)
                more = ', which can be the kernel\'s when memory runs out' if (
                    number == _SIGKILL) else ''
                return f'killed by {name} ({said}{more})'
            return f'killed by signal {number}'
        status = os.WEXITSTATUS(self.status)
        if GOODBYE in self.heard:
            return f'exited with status {status}'
        return f'exited with status {status} before the end of its program'


def main(listener: int, size: int, is_alone: bool, ranks: list[Rank]) -> None:
    """Returns once all ranks have ended."""
    kills = _killed_for_memory()
    # Unlike poll, it gives files in the order in which they became ready: who ended first is first.
    epoll = select.epoll()
    here = {rank.number: rank for rank in ranks}
    waiting = {rank.file: rank for rank in ranks}
    connections: dict[int, tuple[_socket.socket, Rank | None, bytes]] = {}
    door = _socket.socket(fileno=listener)
    door.setblocking(False)
    for file in (listener, *waiting):
        epoll.register(file, select.EPOLLIN)
    # A process that ends closes its files, the newest first: its connection to this one before that
    # to mpiexec, which then kills the others.
    hangups: dict[int, int] = {}
    leaving: list[Rank] = []
    ended: list[Rank] = []
    seen_at = told_at = 0.
    segments: set[str] = set()
    asking: list[_socket.socket] = []

    def hear(file: int) -> None:
        connection, rank, line = connections[file]
        with suppress(BlockingIOError):
            while received := connection.recv(65536):
                if rank is None:
                    line, end, received = (line + received).partition(b'\n')
                    if end:
                        number, *files = line.decode().split()
                        rank = here.get(int(number))
                        segments.update(files)
                connections[file] = connection, rank, line
                if rank is not None:
                    rank.heard += received
                    if ASKS in received:
                        asking.append(connection)
            epoll.unregister(file)

    def accept() -> None:
        connection = _socket.socket(fileno=door._accept()[0])  # type: ignore[attr-defined]
        _, user, _ = struct.unpack('3i', connection.getsockopt(
            _socket.SOL_SOCKET, _socket.SO_PEERCRED, 12))
        if user != os.getuid():
            connection.close()
            return
        connection.setblocking(False)
        connections[connection.fileno()] = connection, None, b''
        epoll.register(connection, select.EPOLLIN)
        hangup = os.dup(connection.fileno())
        hangups[hangup] = connection.fileno()
        epoll.register(hangup, select.EPOLLRDHUP)
        connection.send(READY)

    while waiting:
        late = bool(told_at) and time.monotonic() > told_at + _GRACE
        if late:
            for rank in waiting.values():
                rank.kill()
        for file, _ in epoll.poll(.01 if seen_at > told_at else .1 if told_at else None):
            if file in waiting:
                rank = waiting.pop(file)
                epoll.unregister(file)
                rank.end()
                ended.append(rank)
                leaving.append(rank)
            elif file in hangups:
                epoll.unregister(file)
                os.close(file)
                its_connection = hangups.pop(file)
                with suppress(OSError, ValueError):
                    hear(its_connection)
                leaving += filter(None, connections[its_connection][1:2])
        with suppress(OSError):
            while True:
                accept()
        for file in list(connections):
            with suppress(OSError, ValueError, KeyError):
                hear(file)
        for connection in asking:
            with suppress(OSError):
                connection.send(NO if told_at else YES)
            told_at = told_at or time.monotonic() + 10  # who says it sees to the end
        asking.clear()
        strange = [rank for rank in ended if not rank.is_ordinary]
        # On a busy machine several can have ended before it looks: mpiexec kills the others.
        first = min(strange, key=lambda rank: (rank.was_killed, leaving.index(rank)), default=None)
        if not told_at and first is not None:
            seen_at = seen_at or time.monotonic()
            if time.monotonic() < seen_at + _ENDS_WITHIN and any(
                    rank in waiting.values() for rank in leaving[:leaving.index(first)]):
                continue
            told_at = time.monotonic()
            which = f'rank {first.number}'
            if first.was_killed and not is_alone:
                # A rank elsewhere may have ended first, and mpiexec have killed all ranks here.
                time.sleep(_ALL_AT_ONCE)
                if all(select.select([rank.file], [], [], 0)[0] for rank in waiting.values()):
                    _tell(f'all ranks of host {os.uname().nodename} were killed, {which} first, '
                          'as mpiexec does when a rank elsewhere has ended')
                    continue
            more = ''
            if first.was_killed and _killed_for_memory() > kills:
                more = '; the kernel has just killed a process of this host as memory ran out'
            lines = first.heard.translate(None, GOODBYE + ASKS).splitlines(keepends=True)
            stack = b''.join(line for line in lines if not line.startswith(b'Extension modules:'))
            _tell(f'{which} of {size} (host {os.uname().nodename}, process {first.process}) '
                  f'ended the job: {first.why}{more}', stack)

    if told_at:
        for path in segments:
            with suppress(OSError):
                os.unlink(path)


def _tell(what: str, stack: bytes = b'') -> None:
    with suppress(OSError):
        os.write(2, f'chainermn: {what}\n'.encode() + stack)
    folder = os.environ.get('CHAINERMN_RUN_FOLDER')  # of python -m chainermn run
    if folder is not None:
        with suppress(OSError):
            path = f'{folder}/{time.time_ns()}-{os.getpid()}'
            with open(f'{path}.part', 'w') as file:
                file.write(what)
            os.rename(f'{path}.part', f'{path}.txt')


def _killed_for_memory() -> int:
    """How many processes of this host the kernel has killed because memory ran out."""
    with suppress(OSError, ValueError), open('/proc/vmstat', 'rb') as file:
        for line in file:
            if line.startswith(b'oom_kill '):
                return int(line.split()[1])
    return 0


if __name__ == '__main__':
    _listener, _size, _is_alone, *_ranks = sys.argv[1:]
    main(int(_listener), int(_size), _is_alone == '1',
         [Rank(*map(int, each.split(':'))) for each in _ranks])
