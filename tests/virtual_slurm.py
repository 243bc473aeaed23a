"""A Slurm cluster on this machine, whose nodes are virtual hosts.

    with Slurm() as slurm:
        job = slurm.sbatch('job.sh', cwd=folder)
        slurm.wait(job)

``node0`` runs the controller, and is where users log in; jobs run on ``node1`` and ``node2``. This
requires root and Debian's packages slurmctld, slurmd and slurm-client. Nothing remains after it.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence

import virtual_hosts
from time_limits import seconds

CORES = 4  # number of cores that each node claims to have
PROGRAMS = ('slurmctld', 'slurmd', 'srun', 'sbatch', 'salloc', 'scontrol')
# The nodes can only reach each other, so they need no authentication.
_CONFIGURATION = """
ClusterName=virtual
SlurmctldHost=node0({controller})
SlurmUser=root
AuthType=auth/none
CredType=cred/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=pmi2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
KillWait=5
ReturnToService=2
{nodes}
PartitionName=virtual Nodes=node[1-2] Default=YES State=UP
"""


def why_not() -> str:
    """Return why a virtual cluster cannot be created here, or ''."""
    missing = [program for program in PROGRAMS if not shutil.which(program)]
    return f'needs {", ".join(missing)}' if missing else virtual_hosts.why_not()


class Slurm(contextlib.AbstractContextManager['Slurm']):
    """A cluster with a controller and two nodes."""

    def __enter__(self) -> Slurm:
        with contextlib.ExitStack() as stack:
            self.folder = stack.enter_context(tempfile.TemporaryDirectory(prefix='slurm-'))
            self.hosts = stack.enter_context(virtual_hosts.Hosts([0, 0, 0]))
            file = pathlib.Path(self.folder, 'slurm.conf')
            file.write_text(_CONFIGURATION.format(
                folder=self.folder, controller=self.hosts.address(0), nodes='\n'.join(
                    f'NodeName=node{n} NodeAddr={self.hosts.address(n)} CPUs={CORES}'
                    for n in (1, 2))))
            self._env = {**os.environ, 'SLURM_CONF': str(file), 'OMP_NUM_THREADS': '1'}
            for n, daemon in enumerate([['slurmctld', '-D'], *[['slurmd', '-D']] * 2]):
                self._daemon(n, daemon, stack)
            wait_until(lambda: self.run('sinfo', '-h', '-o', '%T').stdout == 'idle\n',
                       lambda: self._logs())
            self._close = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._close.close()

    def _daemon(self, n: int, command: Sequence[str], stack: contextlib.ExitStack) -> None:
        process = self.hosts.start(n, command, env=self._env, stdin=subprocess.DEVNULL,
                                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        stack.callback(process.wait)
        stack.callback(self.hosts.kill, n)

    def _logs(self) -> str:
        logs = sorted(pathlib.Path(self.folder).glob('*.log'))
        return '\n'.join(f'{log.name}:\n{log.read_text()}' for log in logs)

    def run(self, *command: str, cwd: os.PathLike[str] | str = '.', timeout: float = 60,
            ) -> subprocess.CompletedProcess[str]:
        """Run a command on the login node; its output is in ``stdout``."""
        process = self.hosts.start(0, ['bash', '-c', 'cd "$0" && exec "$@"', str(cwd), *command],
                                   env=self._env, stdin=subprocess.DEVNULL,
                                   stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        return self.hosts.finish(process, seconds(timeout))

    def sbatch(self, *args: str, cwd: os.PathLike[str] | str) -> str:
        """Submit a job; return its number."""
        done = self.run('sbatch', *args, cwd=cwd)
        found = re.fullmatch(r'Submitted batch job (\d+)\n', done.stdout)
        if not found:
            raise RuntimeError(done.stdout)
        return found[1]

    def state(self, job: str) -> str:
        """Return the state of a job, such as ``COMPLETED``."""
        found = re.search(r'JobState=(\w+)', self.run('scontrol', 'show', 'job', job).stdout)
        return found[1] if found else ''

    def wait(self, job: str, timeout: float = 60) -> str:
        """Wait until a job has ended; return its state."""
        states = []

        def has_ended() -> bool:
            states.append(self.state(job))
            return states[-1] not in ('PENDING', 'RUNNING', 'COMPLETING', 'CONFIGURING')
        wait_until(has_ended, lambda: self._logs(), timeout)
        return states[-1]


def wait_until(condition: Callable[[], bool], describe: Callable[[], str], timeout: float = 60,
               ) -> None:
    """Wait for a condition; fail with a description if it takes too long."""
    end = time.monotonic() + seconds(timeout)
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(describe())
        time.sleep(.2)
