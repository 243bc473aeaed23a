"""mpiexec: where it is, and the environment in which it starts a job."""
from __future__ import annotations

import filecmp
import os
import re
import shutil
import sys
from collections.abc import Mapping

#: What tells a process that it belongs to an MPI job; not what configures an MPI library.
_OF_A_JOB = re.compile(r'(PMIX?|HYDI|OMPI|PRTE)_(?!MCA_|ALLOW_)|MPI_LOCAL')

#: Open MPI 4 and 5: more processes than cores are no error, and each may use any core.  What they
#: run is the caller's own, so nothing is gained by refusing root.
_DEFAULTS = {
    'OMPI_ALLOW_RUN_AS_ROOT': '1', 'OMPI_ALLOW_RUN_AS_ROOT_CONFIRM': '1',
    'PRTE_MCA_rmaps_default_mapping_policy': ':oversubscribe',
    'PRTE_MCA_hwloc_default_binding_policy': 'none',
    'OMPI_MCA_rmaps_base_oversubscribe': '1', 'OMPI_MCA_hwloc_base_binding_policy': 'none',
}


#: The program of MPICH that starts the processes of a job itself.
LOCAL = 'mpiexec.gforker'


def find() -> str:
    """Returns the path of the mpiexec beside this Python, or of the first one on ``PATH``.

    Raises:
        FileNotFoundError: If there is none; says how to get one.
    """
    beside = os.path.dirname(sys.executable)
    found = shutil.which('mpiexec', path=os.pathsep.join(
        [beside, os.environ.get('PATH', os.defpath)]))
    if found is None:
        raise FileNotFoundError(
            f'there is no mpiexec in {beside}, nor on PATH. Install MPI with '
            f'"{sys.executable} -m pip install mpich", or load the one of your cluster.')
    return found


def find_local() -> str:
    """Returns the path of what starts a job on this machine only.

    That is ``mpiexec.gforker``, if it belongs to the ``mpiexec`` that :func:`find` finds, as with
    MPICH.  It listens on no port; ``mpiexec`` does, on all network interfaces.
    """
    mpiexec = find()
    hydra, local = (os.path.join(os.path.dirname(mpiexec), name)
                    for name in ('mpiexec.hydra', LOCAL))
    # Beside mpiexec can be programs of other MPI libraries.
    is_mpich = os.access(hydra, os.R_OK) and filecmp.cmp(mpiexec, hydra, shallow=False)
    return local if is_mpich and os.access(local, os.X_OK) else mpiexec


def environment(n: int, defaults: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns the environment for a job of ``n`` processes: this one's, but of no other job.

    Args:
        n: The number of processes.  Without ``OMP_NUM_THREADS`` they share the cores.
        defaults: Variables for where this process has none of that name.
    """
    cores = len(os.sched_getaffinity(0))
    mine = {name: value for name, value in os.environ.items() if not _OF_A_JOB.match(name)}
    return {'OMP_NUM_THREADS': str(max(1, cores // n)), **_DEFAULTS, **(defaults or {}), **mine}
