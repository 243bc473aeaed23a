"""Hosts on one machine: Linux namespaces, connected by links of a given rate.

    with Hosts(ranks=[2, 2], rate='1gbit') as hosts:
        hosts.run([sys.executable, 'train.py'], timeout=60)

Each host has its own name, network address, processes, shared memory and ``/dev/shm``, and knows
the names of the other hosts. Files are shared. Therefore, MPI sees the same environment as on a
cluster, and uses shared memory within a host and TCP between hosts. This requires root and
iproute2, and changes nothing outside of the namespaces.

The first process of each host waits at a pipe from this process. When the pipe closes, even because
this process was killed, Linux kills all processes of the host and removes its network. Therefore,
names need not be unique, and nothing can be left behind.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

NETWORK = '10.231.0'
#: The address of the switch, on which mpiexec runs.
SWITCH = f'{NETWORK}.254'
#: With this rate, links have no limit.
FULL = 'full'

# bash also collects the exit status of orphans, as the first process of a host must.
_FIRST_PROCESS = """
set -e
read pid _ < /proc/self/stat
mount -t proc proc /proc
mount -t tmpfs tmpfs /dev/shm
hostname {name}
ip link set lo up
echo $pid
read
"""
# mpiexec calls this script as "ssh [OPTION ...] ADDRESS COMMAND". The output of the command does
# not pass through the script, but through the network. Like ssh, the script does not notice the end
# of a command while the host is disconnected.
_SSH = """#!/bin/bash
while [[ $1 == -* ]]; do shift; done
address=$1; shift
case $address in
{cases}
esac
exec < /dev/null > /dev/null 2>&1
nsenter --target $pid {namespaces} --wd="$PWD" -- bash -c "$*"
status=$?
while [[ -e {folder}/$address.cut ]]; do sleep .1; done
exit $status
"""
# The ranks of all hosts share the cores of this machine.
_SHARED = {'OMP_NUM_THREADS': '1', 'MPIR_CVAR_ENABLE_HEAVY_YIELD': '1'}
_NAMESPACES = ('--net', '--uts', '--ipc', '--pid', '--mount')


def _run(*command: str) -> None:
    done = subprocess.run(command, text=True, capture_output=True, check=False)
    if done.returncode:
        raise OSError(f'{shlex.join(command)}: {done.stderr.strip()}')


class Host:
    """A host, or the switch between hosts: namespaces with one first process."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._process = subprocess.Popen(
            ['unshare', *_NAMESPACES, '--fork', '--kill-child', 'bash', '-c',
             _FIRST_PROCESS.format(name=name)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True)
        assert self._process.stdout is not None
        self.pid = self._process.stdout.readline().strip()
        if not self.pid.isdecimal():
            self.close()
            raise OSError(f'cannot create {name}: {self.pid}')

    def command(self, command: Sequence[str], namespaces: Sequence[str] = _NAMESPACES) -> list[str]:
        """Return a command that runs the given command on this host."""
        return ['nsenter', '--target', self.pid, *namespaces, f'--wd={os.getcwd()}', '--', *command]

    def call(self, *command: str) -> None:
        """Run a short command on this host."""
        _run(*self.command(command))

    def close(self) -> None:
        """End all processes of this host, and remove it."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


class Hosts(contextlib.AbstractContextManager['Hosts']):
    """Hosts ``node0``, ``node1``, ... connected by a switch.

    Args:
        ranks: The number of ranks on each host.
        rate: The rate of the link of each host, in each direction, as ``tc`` takes it.
    """

    def __init__(self, ranks: Sequence[int], rate: str = FULL) -> None:
        self.ranks = list(ranks)
        self._rate = rate

    def __enter__(self) -> Hosts:
        with contextlib.ExitStack() as stack:
            self._switch = self._host('switch', stack)
            self._folder = pathlib.Path(f'/proc/{self._switch.pid}/root/dev/shm')
            self._switch.call('ip', 'link', 'add', 'bridge', 'type', 'bridge')
            self._switch.call('ip', 'address', 'add', f'{SWITCH}/24', 'dev', 'bridge')
            self._switch.call('ip', 'link', 'set', 'bridge', 'up')
            self._hosts: list[Host] = []
            for n in range(len(self.ranks)):
                self._hosts.append(self._host(f'node{n}', stack))
                self._connect(n)
                if self._rate != FULL:
                    self.set_rate(n, self._rate)
                self._write_names(n)
            self._ssh = self._write_ssh()
            self._close = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._close.close()

    @staticmethod
    def _host(name: str, stack: contextlib.ExitStack) -> Host:
        host = Host(name)
        stack.callback(host.close)
        return host

    def _connect(self, n: int) -> None:
        host = self._hosts[n]
        _run('ip', 'link', 'add', 'eth0', 'netns', host.pid, 'type', 'veth',
             'peer', f'port{n}', 'netns', self._switch.pid)
        self._switch.call('ip', 'link', 'set', f'port{n}', 'master', 'bridge', 'up')
        host.call('ip', 'address', 'add', f'{self.address(n)}/24', 'dev', 'eth0')
        host.call('ip', 'link', 'set', 'eth0', 'up')

    def _write_names(self, n: int) -> None:
        """Write the names of all hosts into the hosts file of a host."""
        names = ''.join(f'{self.address(m)} node{m}\\n' for m in range(len(self.ranks)))
        self._hosts[n].call('bash', '-ec', f"""
            printf '127.0.0.1 localhost\\n{names}' > /dev/shm/names
            mount --bind /dev/shm/names /etc/hosts
            rm /dev/shm/names""")

    def _write_ssh(self) -> str:
        path = self._folder / 'ssh'
        path.write_text(_SSH.format(folder=self._folder, namespaces=' '.join(_NAMESPACES),
                                     cases='\n'.join(f'{self.address(n)}) pid={host.pid};;'
                                                     for n, host in enumerate(self._hosts))))
        path.chmod(0o755)
        return str(path)

    @staticmethod
    def address(n: int) -> str:
        """Return the address of a host."""
        return f'{NETWORK}.{n + 1}'

    def set_rate(self, n: int, rate: str) -> None:
        """Limit the rate of a host's link, in each direction."""
        for host, device in ((self._hosts[n], 'eth0'), (self._switch, f'port{n}')):
            host.call('tc', 'qdisc', 'replace', 'dev', device, 'root', 'tbf',
                      'rate', rate, 'burst', '256kb', 'latency', '100ms')

    def cut(self, n: int) -> None:
        """Disconnect a host: packets are lost, without an error at either end."""
        self._marker(n).touch()
        self._switch.call('bridge', 'link', 'set', 'dev', f'port{n}', 'state', 'disabled')

    def restore(self, n: int) -> None:
        """Connect a host again."""
        self._switch.call('bridge', 'link', 'set', 'dev', f'port{n}', 'state', 'forwarding')
        self._marker(n).unlink()

    def _marker(self, n: int) -> pathlib.Path:
        """The file that exists while a host is disconnected."""
        return self._folder / f'{self.address(n)}.cut'

    def kill(self, n: int) -> None:
        """Kill all processes of a host. Other hosts notice this unless the host is disconnected."""
        self._hosts[n].call('bash', '-c', 'kill -KILL -1 || :')  # there may be none

    @property
    def roots(self) -> list[str]:
        """Return the path of each host's root folder in this process, with its own ``/dev/shm``."""
        return [f'/proc/{host.pid}/root' for host in self._hosts]

    def start(self, n: int, command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """Start a command on a host, with options of :class:`subprocess.Popen`."""
        return subprocess.Popen(self._hosts[n].command(command), text=True, **options)

    def mpiexec(self, command: Sequence[str]) -> list[str]:
        """Return the command that runs an MPI program on all hosts."""
        next_to_python = pathlib.Path(sys.executable).with_name('mpiexec')
        return self._switch.command(
            [str(next_to_python) if next_to_python.exists() else 'mpiexec', *self._launcher,
             '-hosts', self._slots(','), '-n', str(sum(self.ranks)), *map(str, command)],
            ['--net'])

    def elastic(self, command: Sequence[str]) -> list[str]:
        """Return the command that runs ``chainermn run`` with all hosts.

        Args:
            command: More options, the script and its arguments.
        """
        path = self._folder / 'hosts'
        path.write_text(self._slots('\n'))
        return self._switch.command(
            [sys.executable, '-m', 'chainermn', 'run', '--hosts-file', str(path),
             '--mpiexec-args', shlex.join(self._launcher), '-n', str(sum(self.ranks)),
             *map(str, command)], ['--net'])

    @property
    def _launcher(self) -> list[str]:
        return ['-localhost', SWITCH, '-launcher', 'ssh', '-launcher-exec', self._ssh]

    def _slots(self, separator: str) -> str:
        return separator.join(f'{self.address(n)}:{ranks}' for n, ranks in enumerate(self.ranks))

    def popen(self, command: Sequence[str], env: Mapping[str, str] | None = None,
              is_elastic: bool = False) -> subprocess.Popen[str]:
        """Start an MPI program on all hosts; its output is in ``stdout``.

        Args:
            command: The program.
            env: Variables to add to its environment.
            is_elastic: Whether ``chainermn run`` starts it.
        """
        return subprocess.Popen(
            self.elastic(command) if is_elastic else self.mpiexec(command),
            env={**os.environ, **_SHARED, **(env or {})},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors='replace', start_new_session=True)

    def run(self, command: Sequence[str], timeout: float, env: Mapping[str, str] | None = None,
            ) -> subprocess.CompletedProcess[str]:
        """Run an MPI program on all hosts.

        Raises:
            subprocess.TimeoutExpired: If it takes longer than ``timeout`` seconds. The error
                contains the output.
        """
        with self.popen(command, env) as process:
            return self.finish(process, timeout)

    def finish(self, process: subprocess.Popen[str], timeout: float,
               ) -> subprocess.CompletedProcess[str]:
        """Wait for a program started by :meth:`popen`, and kill it after ``timeout`` seconds."""
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired as e:
            os.killpg(process.pid, signal.SIGKILL)
            for n in range(len(self._hosts)):
                self.kill(n)
            e.output, _ = process.communicate()
            raise
        return subprocess.CompletedProcess(process.args, process.returncode, output)


@functools.cache
def why_not() -> str:
    """Return why virtual hosts cannot be created here, or ''."""
    if sys.platform != 'linux' or os.geteuid() != 0:
        return 'needs root on Linux'
    try:
        with Hosts([0], rate='1gbit'):
            return ''
    except OSError as e:
        return f'needs namespaces and iproute2: {e}'
