"""Programs that tests run as jobs of several ranks, and running processes."""

import contextlib
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable

import pytest
from time_limits import seconds, wait_until

#: Code for programs of a :class:`RunningJob`, to be run after the communicator has been created.
WRITE_PROCESS = '''
pathlib.Path(f'rank{comm.rank}').write_text(str(os.getpid()))
pathlib.Path(f'rank{comm.rank}').rename(f'process{comm.rank}')
'''


def run_job(folder: pathlib.Path, program: str, *args: str, ranks: int = 2, limit: float = 30,
            options: tuple[str, ...] = (), **env: str) -> 'subprocess.CompletedProcess[str]':
    """Run a program, as script.py in a folder, on several ranks.

    Args:
        folder: The folder of the script, which is also the working directory.
        program: The text of the script.
        *args: Arguments of the script.
        ranks: The number of ranks; 0 runs it without mpiexec.
        limit: Time limit, in seconds on a quiet machine.
        options: Options of Python.
        **env: Environment variables.

    Returns:
        The finished job; ``stdout`` contains its whole output.
    """
    (folder / 'script.py').write_text(program)
    mpiexec = ['mpiexec', '-n', str(ranks)] if ranks else []
    return subprocess.run(
        [*mpiexec, sys.executable, *options, 'script.py', *args], cwd=folder,
        env={**os.environ, **env}, text=True, timeout=seconds(limit), stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)


def run_on_hosts(folder: pathlib.Path, program: str, hosts: Iterable[str], *args: str,
                 shell: tuple[str, ...] = ()) -> 'subprocess.CompletedProcess[str]':
    """Run a program with one rank per entry of ``hosts``; this machine simulates the hosts.

    Args:
        folder: The working directory.
        program: The text of the program.
        hosts: The host name of each rank.
        *args: Arguments of the program.
        shell: A command that starts each rank.
    """
    several = len(set(hosts)) > 1
    if several and (shutil.which('unshare') is None or subprocess.run(
            ['unshare', '--uts', 'hostname', 'a'], capture_output=True, check=False).returncode):
        pytest.skip('needs permission to set a host name (unshare --uts hostname)')
    command = ['mpiexec']
    for host in hosts:
        command += ['-n', '1']
        if several:
            command += ['unshare', '--uts', 'sh', '-c', f'hostname {host} && exec "$0" "$@"']
        command += [*shell, sys.executable, '-c', program, *args, ':']
    return subprocess.run(command[:-1], capture_output=True, text=True, timeout=seconds(50),
                          check=False, cwd=folder)


class RunningJob:
    """A job in the background, which ends when a file named "end" exists.

    Args:
        folder: The working directory.
        program: The text of the program.
        ranks: The number of ranks.
        name: The file name of the program.
        wrapper: A command that starts each rank.
        **env: Environment variables.
    """

    def __init__(self, folder: pathlib.Path, program: str, ranks: int = 2,
                 name: str = 'script.py', wrapper: tuple[str, ...] = (), **env: str) -> None:
        (folder / name).write_text(program)
        self.folder = folder
        self.process = subprocess.Popen(
            ['mpiexec', '-n', str(ranks), *wrapper, sys.executable, name], cwd=folder, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            env={**os.environ, 'CHAINERMN_STALL_WARNING': '0', **env})
        #: The processes of the ranks.
        self.ranks = [int(self.text(f'process{rank}')) for rank in range(ranks)]

    def text(self, name: str) -> str:
        """Wait for a file; return its text."""
        wait_until((self.folder / name).exists, 60)
        return (self.folder / name).read_text()

    def __enter__(self) -> 'RunningJob':
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        (self.folder / 'end').touch()
        try:
            if kind is None:
                self.process.wait(seconds(60))
        finally:
            self.process.kill()
            self.process.wait()
            assert self.process.stdout is not None
            self.process.stdout.close()


def processes(condition: Callable[[pathlib.Path], bool]) -> list[str]:
    """Return the processes whose folders in /proc meet a condition."""
    found = []
    for folder in pathlib.Path('/proc').glob('[0-9]*'):
        with contextlib.suppress(OSError):  # it has ended
            if condition(folder):
                found.append(folder.name)
    return found
