"""Finds mpiexec and prepares the environment of an MPI job."""
from __future__ import annotations

import filecmp
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping

#: Variables that mark a process as part of a job, except those that configure an MPI library.
_JOB_VARIABLES = re.compile(
    r'(PMIX?|HYDI|OMPI|PRTE)_(?!MCA_|ALLOW_)|MPI_LOCAL|CHAINERMN_RUN_(FOLDER|LINK)')

#: Open MPI 4 and 5: allow more processes than cores, do not bind them to cores, and allow root,
#: because the processes only run the caller's code.
_DEFAULTS = {
    'OMPI_ALLOW_RUN_AS_ROOT': '1', 'OMPI_ALLOW_RUN_AS_ROOT_CONFIRM': '1',
    'PRTE_MCA_rmaps_default_mapping_policy': ':oversubscribe',
    'PRTE_MCA_hwloc_default_binding_policy': 'none',
    'OMPI_MCA_rmaps_base_oversubscribe': '1', 'OMPI_MCA_hwloc_base_binding_policy': 'none',
}

#: MPICH's launcher for jobs on this node.
LOCAL = 'mpiexec.gforker'


def find() -> str:
    """Return the path of the mpiexec next to this Python, or of the first one on ``PATH``.

    Raises:
        FileNotFoundError: If there is none.
    """
    folder = os.path.dirname(sys.executable)
    found = shutil.which('mpiexec', path=os.pathsep.join(
        [folder, os.environ.get('PATH', os.defpath)]))
    if found is None:
        raise FileNotFoundError(
            f'mpiexec not found in {folder} or on PATH. Install MPI with '
            f'"{sys.executable} -m pip install mpich", or load your cluster\'s MPI module.')
    return found


def find_local() -> str:
    """Return the path of a launcher for jobs on this node.

    With MPICH, this is the ``mpiexec.gforker`` that belongs to the ``mpiexec`` of :func:`find`.
    Unlike ``mpiexec``, it does not listen on all network interfaces.
    """
    mpiexec = find()
    hydra, local = (os.path.join(os.path.dirname(mpiexec), name)
                    for name in ('mpiexec.hydra', LOCAL))
    # The same folder can contain programs of other MPI libraries.
    is_mpich = os.access(hydra, os.R_OK) and filecmp.cmp(mpiexec, hydra, shallow=False)
    return local if is_mpich and os.access(local, os.X_OK) else mpiexec


def is_open_mpi(mpiexec: str) -> bool:
    """Return whether a program is the mpiexec of Open MPI or of its PRRTE.

    Args:
        mpiexec: The path of the program.
    """
    version = subprocess.run([mpiexec, '--version'], stdin=subprocess.DEVNULL, text=True,
                             errors='replace', capture_output=True, check=False).stdout
    return re.search(r'Open ?MPI|Open ?RTE|PRRTE', version) is not None


def host_options(is_open_mpi: bool, ranks: Mapping[str, int], exported: Iterable[str] = ()
                 ) -> list[str]:
    """Return the options of mpiexec that select hosts.

    Args:
        is_open_mpi: Whether mpiexec belongs to Open MPI; otherwise, to MPICH or a derivative.
        ranks: The number of ranks on each host.
        exported: Environment variables for the ranks on all hosts. MPICH exports all variables.
    """
    hosts = ','.join(f'{host}:{n}' for host, n in ranks.items())
    if not is_open_mpi:
        return ['-hosts', hosts]
    return ['--host', hosts, *(word for name in exported for word in ('-x', name))]


def environment(n: int, defaults: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment for a job: this process's variables, without those of another job.

    Args:
        n: The number of processes. Unless ``OMP_NUM_THREADS`` is set, the cores are divided among
            them.
        defaults: Variables to set unless this process already has them.
    """
    cores = len(os.sched_getaffinity(0))
    inherited = {name: value for name, value in os.environ.items()
                 if not _JOB_VARIABLES.match(name)}
    return {'OMP_NUM_THREADS': str(max(1, cores // n)), **_DEFAULTS, **(defaults or {}),
            **inherited}
