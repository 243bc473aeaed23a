"""``python -m chainer_compat``: show versions, active shims, and whether Chainer can use a GPU.

Imports Chainer as a script would, and prints why a component is missing.
``python -m chainer_compat export`` converts a model (``conversion/command.py``), and
``python -m chainer_compat names SCRIPT`` runs a script and lists the old CuPy names that it uses.
"""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import runpy
import sys
import warnings
from collections.abc import Callable
from importlib import metadata
from typing import Any

from chainer_compat.patching import variables
from chainer_compat.pytorch.conversion import command


def main() -> None:
    """Print versions, then the shims, then the GPU backend."""
    parser = argparse.ArgumentParser(
        prog='python -m chainer_compat',
        description='Shows versions, active patches, and whether Chainer can use a GPU.')
    commands = parser.add_subparsers(dest='command', metavar='[command]')
    command.add_arguments(commands.add_parser(
        'export', help='convert a model to PyTorch or ONNX', description=command.DESCRIPTION))
    names = commands.add_parser(
        'names', help='run a script and list the old CuPy names that it uses',
        description='Runs a script with CHAINER_COMPAT_NAMES=all. When the script ends, lists the '
        'names of CuPy 1 to 12 that it used, and their current names.')
    names.add_argument('script', help='path of a Python file')
    names.add_argument('arguments', nargs=argparse.REMAINDER, help='arguments of the script')
    options = parser.parse_args()
    if options.command == 'export':
        command.main(options)
        return
    if options.command == 'names':
        if not os.path.isfile(options.script):
            names.error(f'no such file: {options.script}')
        _run_and_list(options.script, options.arguments)
        return
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # e.g. CuPy's warning about NCCL; the reason is printed
        try:
            cuda = importlib.import_module('chainer').backends.cuda
        except Exception as error:
            cuda, why = None, _one_line(error)
        for name, find in VERSIONS.items():
            print(f'{name + ":":<11}{_found(find)}')
        _print_shims()
        if cuda is None:
            print(f'\nChainer cannot be imported: {why}')
            return
        _print_backend(cuda)


def _run_and_list(script: str, arguments: list[str]) -> None:
    from chainer_compat.names import cupy_names, numpy_aliases, python_names

    os.environ[cupy_names.VARIABLE] = 'all'
    python_names.restore()
    numpy_aliases.restore(importlib.import_module('numpy'))
    sys.argv = [script, *arguments]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    try:
        runpy.run_path(script, run_name='__main__')
    finally:
        print('Old CuPy names:' if cupy_names.used else 'Old CuPy names: none')
        for old, new in sorted(cupy_names.used.items()):
            print(f'  {old:<39} {new}')


def _cuda() -> str:
    runtime = importlib.import_module('cupy').cuda.runtime
    return f'runtime {_dotted(runtime.runtimeGetVersion())}, driver {_driver(runtime)}'


def _driver(runtime: Any) -> str:
    try:
        return _dotted(runtime.driverGetVersion()) if runtime.driverGetVersion() else 'none'
    except Exception as error:
        return f'none ({_one_line(error)})'


def _nccl() -> str:
    nccl = importlib.import_module('cupy.cuda.nccl')
    if not getattr(nccl, 'available', True):
        importlib.import_module('cupy_backends.cuda.libs.nccl')  # raises the original error
    version = nccl.get_version()
    return f'{version // 10000}.{version // 100 % 100}.{version % 100}'


def _cudnn() -> str:
    return str(importlib.import_module('cupy.cuda.cudnn').getVersion())


def _torch() -> str:
    from chainer_compat.pytorch import availability

    torch = importlib.import_module('torch')
    config = importlib.import_module('chainer').config
    why = availability.why_unavailable()
    if not variables.flag('CHAINER_COMPAT', True):
        use = 'not used: CHAINER_COMPAT=0'
    elif config.use_torch == 'never':
        use = "not used: chainer.config.use_torch is 'never'"
    elif why:
        use = f'not used: {why}'
    else:
        where = 'the CPU and on GPUs' if config.use_torch == 'always' or (
            _n_gpus() and not availability.why_not_on_gpu(0)) else 'the CPU'
        use = f'computes convolutions and other functions on {where}'
        if config.torch_compute_dtype:
            use += f', matrix multiplications in {config.torch_compute_dtype}'
    return f'{torch.__version__}, {use}'


def _n_gpus() -> int:
    try:
        return importlib.import_module('cupy').cuda.runtime.getDeviceCount()
    except Exception:  # no CuPy, driver or GPU
        return 0


def _dotted(version: int) -> str:
    return f'{version // 1000}.{version % 1000 // 10}'


# The lines of the output. If a function raises, the error is printed.
VERSIONS: dict[str, Callable[[], str]] = {
    'Python': platform.python_version,
    'Chainer': lambda: metadata.version('chainer'),
    'NumPy': lambda: importlib.import_module('numpy').__version__,
    'SciPy': lambda: importlib.import_module('scipy').__version__,
    'CuPy': lambda: importlib.import_module('cupy').__version__,
    'CUDA': _cuda,
    'NCCL': _nccl,
    'cuDNN': _cudnn,
    'PyTorch': _torch,
}


def _found(find: Callable[[], str]) -> str:
    try:
        return find()
    except Exception as error:  # loading a library can fail in any way
        return f'none ({_one_line(error)})'


def _one_line(error: BaseException) -> str:
    return f'{type(error).__name__}: {" ".join(str(error).split())}'


def _print_shims() -> None:
    if not variables.flag('CHAINER_COMPAT', True):
        print('\nShims: disabled by CHAINER_COMPAT=0')
        return
    from chainer_compat import shims  # noqa: F401  (fills the registry)
    from chainer_compat.dialect import silent_changes
    from chainer_compat.patching import registry

    if selected := silent_changes.version():
        print(f'\nDialect: Chainer {selected} ({silent_changes.VARIABLE}={selected})')
    if os.environ.get('CHAINER_COMPAT_NAMES') == 'all':
        print('\nOld names of NumPy, CuPy and Python are restored (CHAINER_COMPAT_NAMES=all)')
    print('\nActive shims:')
    for shim in registry.find_shims():
        if registry.is_active(shim):
            print(f'  {shim.__name__:<30} {", ".join(registry.modules_of(shim))}')


def _print_backend(cuda: Any) -> None:
    if not cuda.available:
        print(f"\nChainer's GPU backend is not available: {_one_line(cuda._resolution_error)}")
        return
    print("\nChainer's GPU backend is available.")
    try:
        devices = cuda.cupy.cuda.runtime.getDeviceCount()
    except Exception as error:
        print(f'No GPU found: {_one_line(error)}')
    else:
        print(f'GPUs: {devices}')


if __name__ == '__main__':
    main()
