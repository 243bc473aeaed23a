"""Collects wheels for a GPU machine without a network: ``python tests/gpu/offline.py FOLDER``.

The GPU machine needs Python with pip, NumPy, and CuPy with NCCL, which are too large to carry.
``FOLDER`` gets wheels of all other packages, Chainer's built here, and a script. Copy the
repository and the folder to the machine, and run in the root of the repository::

    sh FOLDER/run.sh                            the GPU tests at 1 and 2 ranks, in ten minutes
    sh FOLDER/run.sh python benchmarks/gpu.py   any other command

The script installs ChainerMN from the repository, and those packages that the machine lacks.
"""

import argparse
import os
import pathlib
import subprocess
import sys
import tempfile

MAX_BYTES = 40_000_000
CHAINER = 'chainer==7.8.1'  # has no wheel on PyPI

#: What ChainerMN, Chainer and the GPU tests need, and setuptools to install ChainerMN.
PACKAGES = ['cloudpickle', 'filelock', 'hypothesis', 'mpi4py>=4', 'mpich', 'protobuf', 'pytest',
            'pytest-mpi', 'pytest-xdist', 'setuptools', 'six', 'typing_extensions', 'wheel']
#: PyPI has few wheels of newer ones.
PLATFORMS = [f'manylinux_2_{n}_x86_64' for n in (28, 27, 24, 17)] + ['manylinux2014_x86_64']

SCRIPT = f"""#!/bin/sh
# Written by tests/gpu/offline.py, whose docstring describes it.
set -e
wheels=$(cd "$(dirname "$0")" && pwd)
offline() {{ python3 -m pip install --quiet --no-index --no-compile "$@"; }}
offline --find-links "$wheels" {' '.join(f"'{package}'" for package in PACKAGES)}
# Another build of mpi4py might not fit this MPI.
offline --no-deps --force-reinstall "$wheels"/mpi4py-*.whl "$wheels"/mpich-*.whl
# Its build takes Chainer from the wheels.
PIP_NO_INDEX=1 PIP_FIND_LINKS=$wheels offline --no-deps --no-build-isolation --editable .
PATH=$(python3 -c 'import os, sys; print(os.path.dirname(sys.executable))'):$PATH
if [ $# -gt 0 ]; then exec "$@"; fi
python3 -c 'import cupy; cupy.cuda.runtime.getDeviceCount()' 2>/dev/null ||
    echo 'CuPy finds no GPU: all tests will be skipped.'
python3 -m chainermn check || true
# Only the plugins that the tests use: others of the machine might warn, which is an error.
export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
exec python3 tests/run_ranks.py --ranks 1,2 --keep-going -p xdist.plugin -p pytest_mpi \\
    -m gpu --stop-after 200 -rs --durations 20 tests/gpu
"""


def pip(*options: str, **env: str) -> None:
    """Run pip of this Python."""
    subprocess.run([sys.executable, '-m', 'pip', '--quiet', *options], check=True,
                   env=os.environ | env)


def collect(folder: pathlib.Path, python: str) -> int:
    """Write the wheels and the script; return the size of the wheels in bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob('*.whl'):
        old.unlink()
    with tempfile.NamedTemporaryFile('w', suffix='.txt') as constraints:
        print('setuptools<70', file=constraints, flush=True)
        pip('wheel', '--no-deps', '--wheel-dir', str(folder), CHAINER,
            PIP_CONSTRAINT=constraints.name, PIP_BUILD_CONSTRAINT=constraints.name)
    platforms = [option for name in PLATFORMS for option in ('--platform', name)]
    pip('download', '--only-binary', ':all:', '--implementation', 'cp', '--python-version', python,
        *platforms, '--dest', str(folder), *PACKAGES)
    (folder / 'run.sh').write_text(SCRIPT)
    return sum(wheel.stat().st_size for wheel in folder.glob('*.whl'))


def main() -> None:
    """Collect, and print the size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('folder', type=pathlib.Path)
    parser.add_argument('--python', default='3.12', help='of the GPU machine; default: %(default)s')
    args = parser.parse_args()
    size = collect(args.folder, args.python)
    print(f'{args.folder}: {len(list(args.folder.glob("*.whl")))} wheels, {size / 1e6:.1f} MB')
    if size > MAX_BYTES:
        sys.exit(f'more than {MAX_BYTES / 1e6:.0f} MB')


if __name__ == '__main__':
    main()
