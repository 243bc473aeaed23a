"""The supervisor: the parent of mpiexec; it ensures that no process of the job is left behind.

It runs as a script, ``python supervisor.py GRACE MPIEXEC ARGS...``, ends with its own parent, and
exits with the exit status of mpiexec, or 128 + signal number.  If its parent died, it also removes
``$CHAINERMN_RUN_FOLDER``, where failed ranks write their messages.

SIGINT and SIGTERM end the job: mpiexec gets the first of them, and is killed if it is still running
after GRACE seconds, or at the next SIGINT.  SIGUSR1 and SIGUSR2 are forwarded to mpiexec.
"""
from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import BinaryIO

_POLL_INTERVAL = 0.05  # seconds

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # from linux/prctl.h


def die_with_parent(number: int) -> Callable[[], None]:
    """Return a ``preexec_fn``: Linux sends the child this signal when the parent dies."""
    prctl, here = ctypes.CDLL(None).prctl, os.getpid()

    def request() -> None:
        prctl(_PR_SET_PDEATHSIG, number)
        if os.getppid() != here:
            os._exit(1)

    return request


def start(command: list[str], environment: dict[str, str], grace: float,
          output: BinaryIO | None = None) -> subprocess.Popen[bytes]:
    """Start a supervisor of mpiexec.  It ends with this thread.

    Args:
        command: The command of mpiexec.
        environment: Its environment.
        grace: The seconds that mpiexec may take to exit after a signal, before it is killed.
        output: The file for its output, if that is not to go where ours goes.
    """
    return subprocess.Popen(
        # -I -S: skipping sitecustomize and .pth files makes it start at once.
        [sys.executable, '-I', '-S', __file__, str(grace), *command],
        env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
        preexec_fn=die_with_parent(signal.SIGTERM),
        start_new_session=True)  # so that only this process gets Ctrl-C


def main(grace: float, command: list[str]) -> int:
    """Run mpiexec; return its exit status."""
    parent = os.getppid()
    signals: list[int] = []  # from the parent, or because it died
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda number, _: signals.append(number))
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)  # for _kill_children
    process = subprocess.Popen(
        # Not SIGTERM: MPICH's mpiexec only forwards it to the ranks, which may ignore it.
        command, stdin=subprocess.DEVNULL, preexec_fn=die_with_parent(signal.SIGKILL))
    kill_at = None
    while process.poll() is None:
        while signals:
            received = signals.pop(0)
            if received in (signal.SIGUSR1, signal.SIGUSR2):
                process.send_signal(received)
            elif kill_at is None:
                process.send_signal(received)
                kill_at = time.monotonic() + grace
            elif received == signal.SIGINT:
                process.kill()
        if kill_at is not None and time.monotonic() > kill_at:
            process.kill()
            process.wait()
            with contextlib.suppress(OSError):  # stderr is closed
                os.write(2, f'chainermn run: the job did not end within {grace:g} seconds '
                            '(--grace), and was killed\n'.encode())
        time.sleep(_POLL_INTERVAL)
    if process.returncode:
        _kill_children()
    if os.getppid() != parent and (folder := os.environ.get('CHAINERMN_RUN_FOLDER')):
        shutil.rmtree(folder, ignore_errors=True)
    return exit_status(process)


def exit_status(process: subprocess.Popen[bytes]) -> int:
    """Return the exit status of a process that has ended, as a shell does: 128 + signal number."""
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def _kill_children() -> None:
    """Kill leftover processes of a failed job, such as the data loaders of a killed rank.

    Orphans become children of this process, because it is a subreaper.
    """
    while children := _children():
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        for child in children:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, 0)


def _children() -> list[int]:
    here = os.getpid()
    with open(f'/proc/{here}/task/{here}/children') as file:  # this process has one thread
        return [int(child) for child in file.read().split()]


if __name__ == '__main__':
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
