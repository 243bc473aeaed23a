"""The supervisor is the parent of mpiexec and ensures that no process of the job is left behind.

It runs as a script, ``python supervisor.py GRACE MPIEXEC ARGS...``. It stops the job when its own
parent dies. It exits with the exit status of mpiexec, or with 128 + signal number. If its parent
died, it also removes ``$CHAINERMN_RUN_FOLDER``, where failed ranks write their messages.

SIGINT and SIGTERM stop the job: mpiexec gets the first of these signals. It is killed if it is
still running after GRACE seconds, or at the next SIGINT. SIGUSR1 and SIGUSR2 are forwarded to
mpiexec.

The supervisor forwards the output of mpiexec. After a signal that stops the job, it omits the
messages that only say that the signal has terminated ranks, because this is not a failure.
"""
from __future__ import annotations

import contextlib
import ctypes
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import IO

_POLL_INTERVAL = 0.05  # seconds
_LOG_TIMEOUT = 2  # seconds for writing log files after the ranks have exited
_SIZE = 4096  # bytes that a pipe accepts at once if it accepts any

#: Lines about a signal: from ChainerMN, with or without the label of a rank; their stacks; and
#: from mpiexec.
_OURS = re.compile(
    rb'(\[\d+\] )?chainermn: rank \d+ of \d+ \(.*\) (failed: killed by SIG(INT|TERM|KILL)\b'
    rb'|ended first on its host: killed by |aborts the job: ('
    rb'sys\.exit with status \d+(, called at .*)?'
    rb'|interrupted by Ctrl-C or SIGINT)$)')
_STACK = re.compile(rb'(\[\d+\] )?(Stack \(most|  )')
_OF_MPIEXEC = re.compile(
    rb'=   (BAD TERMINATION OF ONE|PID \d+ RUNNING AT|EXIT CODE: \d|CLEANING UP REMAINING'
    rb'|YOU CAN IGNORE THE BELOW)|YOUR APPLICATION TERMINATED WITH THE EXIT STRING: '
    rb'|This typically refers to a problem with your application\.'
    rb'|Please see the FAQ page for debugging|={83}$|\[mpiexec@.*\] (Sending|Press) Ctrl-C')

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # from linux/prctl.h


def die_with_parent(number: int) -> Callable[[], None]:
    """Return a ``preexec_fn`` that makes Linux send the child a signal when the parent dies."""
    prctl, here = ctypes.CDLL(None).prctl, os.getpid()

    def request() -> None:
        prctl(_PR_SET_PDEATHSIG, number)
        if os.getppid() != here:
            os._exit(1)

    return request


def start(command: list[str], environment: dict[str, str], grace: float,
          output: IO[bytes] | None = None) -> subprocess.Popen[bytes]:
    """Start a supervisor of mpiexec. It stops the job when this thread exits.

    Args:
        command: The mpiexec command.
        environment: The environment of mpiexec.
        grace: The number of seconds mpiexec may take to exit after a signal before it is killed.
        output: The file for the output of mpiexec; ``None`` to share the outputs of this process.
    """
    return subprocess.Popen(
        # -I -S: without sitecustomize and .pth files, Python starts immediately.
        [sys.executable, '-I', '-S', __file__, str(grace), *command],
        env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
        preexec_fn=die_with_parent(signal.SIGTERM),
        start_new_session=True)  # so that only this process gets Ctrl-C


def main(grace: float, command: list[str]) -> int:
    """Run mpiexec and return its exit status."""
    parent = os.getppid()
    signals: list[int] = []  # sent by the parent, or by Linux because the parent died
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda number, _: signals.append(number))
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)  # for _kill_children
    process = subprocess.Popen(
        # Use SIGKILL: MPICH's mpiexec only forwards SIGTERM to the ranks, which may ignore it.
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=die_with_parent(signal.SIGKILL))
    assert process.stdout and process.stderr
    outputs = _ForwardedOutput(process.stdout, 1), _ForwardedOutput(process.stderr, 2)
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
                os.write(2, f'chainermn run: the job did not exit within {grace:g} seconds '
                            '(--grace) and was killed\n'.encode())
        if not any([each.forward(kill_at is not None, _POLL_INTERVAL / 2) for each in outputs]):
            time.sleep(_POLL_INTERVAL / 10)
    while any([each.forward(kill_at is not None) for each in outputs]):
        pass
    for each in outputs:
        each.end()
    if process.returncode:
        _kill_children()
    if os.getppid() != parent and (folder := os.environ.get('CHAINERMN_RUN_FOLDER')):
        shutil.rmtree(folder, ignore_errors=True)
    return exit_status(process)


class _ForwardedOutput:
    """The standard output or standard error of mpiexec.

    Args:
        source: The pipe from mpiexec.
        target: The file descriptor to forward the output to.
    """

    def __init__(self, source: IO[bytes], target: int) -> None:
        self._source, self._target = source, target
        self._rest = b''  # an incomplete line
        self._is_ending = self._is_in_stack = False
        self._blank = b''  # an empty line, which precedes the lines of mpiexec

    def forward(self, is_ending: bool, timeout: float = 0) -> bool:
        """Forward the output that has arrived; return whether there was any.

        This never waits for the target, because a stopped terminal must not delay signals.

        Args:
            is_ending: Whether the job is stopping because of a signal.
            timeout: The maximum number of seconds to wait for output.
        """
        self._is_ending = is_ending
        if self._source.closed or not select.select([self._source], [], [], timeout)[0]:
            return False
        try:
            if not select.select([], [self._target], [], 0)[1]:
                return False
            data = os.read(self._source.fileno(), _SIZE)
            self._write(self._kept(data) if is_ending else data)
        except OSError:  # the target is closed; closing the source lets mpiexec notice
            self._source.close()
            return False
        if not data:
            self._source.close()
        return bool(data)

    def end(self) -> None:
        """Forward the last line if it is incomplete."""
        with contextlib.suppress(OSError):
            self._write(self._blank + self._rest)

    def _kept(self, data: bytes) -> bytes:
        """Return the lines without those that only say that the signal has terminated ranks."""
        *lines, self._rest = (self._rest + data).split(b'\n')
        kept = b''
        for line in lines:
            self._is_in_stack = bool(_OURS.match(line)) or (
                self._is_in_stack and bool(_STACK.match(line)))
            if _OF_MPIEXEC.match(line):
                self._blank = b''
            elif not line:
                self._blank += b'\n'
            elif not self._is_in_stack:
                kept += self._blank + line + b'\n'
                self._blank = b''
        return kept

    def _write(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._target, data):]


def is_expected(report: str) -> bool:
    """Return whether the report of a rank only says that a signal to the job terminated it."""
    return _OURS.match(f'chainermn: {report}'.encode()) is not None


def exit_status(process: subprocess.Popen[bytes]) -> int:
    """Return the exit status of an exited process as a shell reports it: 128 + signal number."""
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def _kill_children() -> None:
    """Kill leftover processes of a failed job, such as the data loaders of a killed rank.

    Orphans become children of this process, because it is a subreaper. Processes that write log
    files (rank_output.py) exit by themselves when the others have exited.
    """
    deadline = time.monotonic() + _LOG_TIMEOUT
    while children := _children():
        killed = [child for child in children
                  if time.monotonic() > deadline or not _writes_log(child)]
        for child in killed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        for child in children:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child, 0 if child in killed else os.WNOHANG)
        if not killed:
            time.sleep(_POLL_INTERVAL / 10)


def _writes_log(process: int) -> bool:
    with contextlib.suppress(OSError), open(f'/proc/{process}/cmdline', 'rb') as file:
        return any(word.endswith(b'/rank_output.py') for word in file.read().split(b'\0')[:4])
    return False


def _children() -> list[int]:
    here = os.getpid()
    with open(f'/proc/{here}/task/{here}/children') as file:  # this process has one thread
        return [int(child) for child in file.read().split()]


if __name__ == '__main__':
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
