"""Programs that tests run as jobs of several ranks."""

import os
import pathlib
import subprocess
import sys

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
