"""Build a wheel that contains our packages and Chainer; pyproject.toml has the metadata.

The wheel installs into site-packages:

- ``chainer-7.8.1``: the files of Chainer's wheel, unchanged. Chainer is not a dependency, because
  it is a source distribution that current versions of setuptools cannot build.
- ``chainer_compat``, with our chainermn in ``chainer_compat/_overlay``.
- ``chainer_compat.pth``, which Python reads at startup. One line appends the folder of Chainer to
  ``sys.path``, so a Chainer in site-packages takes precedence. The other line puts our chainermn
  before all other ones, see chainer_compat/__init__.py.
"""

# Older Pythons also run this file, before pip says which Python is required.
from __future__ import annotations

import atexit
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import zipfile

import setuptools
from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

ROOT = pathlib.Path(__file__).parent.resolve()
OVERLAY = 'chainer_compat._overlay'
CHAINER = '7.8.1'
EDITABLE = 'CHAINERMN_BUILD_EDITABLE' in os.environ  # set by build_backend.py

# site.py executes .pth lines that start with "import". The line must not fail if chainer_compat is
# missing, e.g. if somebody deleted the folder manually. In a virtual environment site.py reads all
# .pth files twice.
ENABLE = (
    'import sys; "chainer_compat" in sys.modules or exec("try: import chainer_compat'
    r'\nexcept ImportError: pass\nelse: chainer_compat.enable()")'
    '\n'
)


class Build(build_py):
    """Builds the packages (unless the install is editable), the ``.pth`` file, and Chainer."""

    def run(self) -> None:
        lines = [f'chainer-{CHAINER}\n', ENABLE]
        if EDITABLE:
            lines.insert(1, f'{ROOT}\n')
        else:
            super().run()
            self.copy_example()
        self.mkpath(self.build_lib)
        pathlib.Path(self.build_lib, 'chainer_compat.pth').write_text(''.join(lines), 'utf-8')
        unpack_chainer(os.path.join(self.build_lib, f'chainer-{CHAINER}'))

    def copy_example(self) -> None:
        """Add the script of ``chainermn demo``."""
        demo = os.path.join(self.build_lib, *OVERLAY.split('.'), 'chainermn', '_commands',
                            'demo')
        self.copy_file(str(ROOT / 'examples' / 'mnist' / 'train_mnist.py'), demo)


def unpack_chainer(folder: str) -> None:
    """Build Chainer's wheel in this environment, whose setuptools is old enough."""
    with tempfile.TemporaryDirectory(prefix='chainer-') as wheels:
        pip = subprocess.run(
            [sys.executable, '-m', 'pip', '--disable-pip-version-check', 'wheel', '--quiet',
             '--no-deps', '--no-build-isolation', '--wheel-dir', wheels, f'chainer=={CHAINER}'],
            check=False, env=environment_of_pip(), stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True)
        if pip.returncode:
            raise SystemExit(f'{pip.stdout}\nChainer {CHAINER} was not built. {advice()}')
        (wheel,) = pathlib.Path(wheels).glob('*.whl')
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
    # pip uninstall only removes folders that contain a file.
    pathlib.Path(folder, 'README.txt').write_text(
        f'Chainer {CHAINER}, unchanged, which is part of the installation of ChainerMN 8.\n')


def environment_of_pip() -> dict[str, str]:
    """Return the environment variables without those that are for the build of ChainerMN only.

    The variables of pyproject_hooks name our build backend. pip rejects build constraints without
    build isolation.
    """
    ours = '_PYPROJECT_HOOKS_', 'PIP_BUILD_CONSTRAINT', 'PIP_PYTHON'
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)}


def advice() -> str:
    """Return what to do if Chainer's wheel could not be built."""
    if importlib.util.find_spec('pip') is None or int(setuptools.__version__.split('.')[0]) >= 70:
        return ("Install without the option --no-build-isolation, or run "
                "`python -m pip install pip 'setuptools<70' wheel` first.")
    return ('If your package index was not found, set environment variables for pip, such as '
            'PIP_INDEX_URL; uv also needs them.')


def scratch() -> dict[str, dict[str, str]]:
    """Return options to build outside the source tree.

    A ``build`` folder would keep renamed modules, and include them in the next wheel. With an
    ``egg-info`` folder in the root of an editable install, ``pip uninstall chainermn`` would fail.
    """
    if 'sdist' in sys.argv:  # an sdist needs its egg-info inside the tree
        return {}
    folder = tempfile.mkdtemp(prefix='chainermn-build-')
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return {'build': {'build_base': folder}, 'egg_info': {'egg_base': folder}}


packages = [
    *find_packages(include=['chainer_compat', 'chainer_compat.*']),
    *(f'{OVERLAY}.{name}' for name in find_packages(include=['chainermn', 'chainermn.*'])),
]

setup(
    packages=packages,
    package_dir={f'{OVERLAY}.chainermn': 'chainermn'},
    package_data={'': ['py.typed']},
    cmdclass={'build_py': Build},
    options=scratch(),
    zip_safe=False,
)
