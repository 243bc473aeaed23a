"""Install our chainermn next to the one in the chainer wheel; pyproject.toml has the metadata.

Both cannot be ``site-packages/chainermn``, so the wheel contains ours in a separate folder,
``chainer_compat/_overlay/chainermn``, and a ``.pth`` file whose one line puts that folder
on ``sys.path`` before site-packages at Python startup. See chainer_compat/__init__.py.
"""

import atexit
import os
import pathlib
import shutil
import sys
import tempfile

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

ROOT = pathlib.Path(__file__).parent.resolve()
OVERLAY = 'chainer_compat._overlay'
EDITABLE = 'CHAINERMN_BUILD_EDITABLE' in os.environ  # set by build_backend.py

# site.py executes .pth lines that start with "import". The line must not fail if chainer_compat is
# missing, e.g. if somebody deleted the folder manually. In a virtual environment site.py reads all
# .pth files twice.
ENABLE = (
    'import sys; "chainer_compat" in sys.modules or exec("try: import chainer_compat'
    r'\nexcept ImportError: pass\nelse: chainer_compat.enable()")'
    '\n'
)


class BuildWithPth(build_py):
    """Builds the ``.pth`` file and, unless the install is editable, the packages."""

    def run(self) -> None:
        self.mkpath(self.build_lib)
        pth = pathlib.Path(self.build_lib, 'chainer_compat.pth')
        if EDITABLE:
            pth.write_text(f'{ROOT}\n{ENABLE}', encoding='utf-8')
        else:
            pth.write_text(ENABLE, encoding='utf-8')
            super().run()


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
    cmdclass={'build_py': BuildWithPth},
    options=scratch(),
    zip_safe=False,
)
