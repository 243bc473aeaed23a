"""Programs that tests run as jobs of several ranks."""

import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Iterable

import pytest
from time_limits import seconds


def run_job(folder: pathlib.Path, program: str, *args: str, ranks: int = 2, limit: float = 30,
            options: tuple[str, ...] = (), **env: str) -> 'subprocess.CompletedProcess[str]':
    """Run a program, as script.py in a folder, on several ranks.

    Args:
        folder: Also the working directory.
        program: Its text.
        *args: Its arguments.
        ranks: The number of ranks.
        limit: Seconds on a quiet machine.
        options: Options of Python.
        **env: Environment variables.

    Returns:
        The finished job; ``stdout`` has all that it has printed.
    """
    (folder / 'script.py').write_text(program)
    return subprocess.run(
        ['mpiexec', '-n', str(ranks), sys.executable, *options, 'script.py', *args], cwd=folder,
        env={**os.environ, **env}, text=True, timeout=seconds(limit), stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)


def run_on_hosts(folder: pathlib.Path, program: str, hosts: Iterable[str], *args: str,
                 shell: tuple[str, ...] = ()) -> 'subprocess.CompletedProcess[str]':
    """Run a program with one rank for each name of a host, which this machine simulates.

    Args:
        folder: The working directory.
        program: Its text.
        hosts: Names of hosts, by rank.
        *args: Its arguments.
        shell: A command that starts each rank.
    """
    several = len(set(hosts)) > 1
    if several and (shutil.which('unshare') is None or subprocess.run(
            ['unshare', '--uts', 'hostname', 'a'], capture_output=True, check=False).returncode):
        pytest.skip('needs the right to set a host name (unshare --uts hostname)')
    command = ['mpiexec']
    for host in hosts:
        command += ['-n', '1']
        if several:
            command += ['unshare', '--uts', 'sh', '-c', f'hostname {host} && exec "$0" "$@"']
        command += [*shell, sys.executable, '-c', program, *args, ':']
    return subprocess.run(command[:-1], capture_output=True, text=True, timeout=seconds(50),
                          check=False, cwd=folder)
