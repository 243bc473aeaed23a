"""A probe of hosts: start a process on each of them, in the same way as mpiexec starts ranks."""
from __future__ import annotations

import signal
import tempfile
from collections.abc import Mapping

from chainermn._commands.run import supervisor
from chainermn._process.running_time import RunningClock

_TIMEOUT = 10  # seconds for a host to start a process
_GRACE = 5  # seconds for mpiexec to exit after SIGTERM


class Probe:
    """Starts a process on each host, all at the same time.

    Args:
        commands: For each host, the mpiexec command that starts a process on it.
        environment: The environment of mpiexec.
    """

    def __init__(self, commands: Mapping[str, list[str]], environment: dict[str, str]) -> None:
        self._clock = RunningClock()
        self._deadline = self._clock.poll() + _TIMEOUT
        self._late: set[str] = set()
        self._outputs = {host: tempfile.TemporaryFile() for host in commands}  # noqa: SIM115
        self._processes = {
            host: supervisor.start(command, environment, _GRACE, self._outputs[host])
            for host, command in commands.items()}

    def errors(self) -> dict[str, str] | None:
        """Return why each host is unreachable (``''`` if it is not), or ``None`` while waiting."""
        waiting = {host for host, one in self._processes.items() if one.poll() is None}
        if self._clock.poll() > self._deadline:
            for host in waiting - self._late:
                self._processes[host].send_signal(signal.SIGTERM)
            self._late |= waiting
        return None if waiting else {host: self._error(host) for host in self._processes}

    def close(self) -> None:
        """Terminate the processes."""
        for process in self._processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self._processes.values():
            process.wait()
        for output in self._outputs.values():
            output.close()

    def _error(self, host: str) -> str:
        status = self._processes[host].returncode
        if status == 0:
            return ''
        if host in self._late:
            return f'no response within {_TIMEOUT} seconds'
        self._outputs[host].seek(0)
        lines = self._outputs[host].read().decode(errors='replace').split('\n')
        return next((line.strip() for line in lines if line.strip()), f'exit status {status}')
