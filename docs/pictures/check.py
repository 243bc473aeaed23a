"""Generates the images in docs/install.md with the commands shown there.

``python docs/pictures/check.py``, in an environment that has ChainerMN, MPI and rich.
"""

import os
import pathlib
import re
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent


def main() -> None:
    """Run the check in one process and on 4 ranks."""
    next_to_python = pathlib.Path(sys.executable).with_name('mpiexec')
    mpiexec = str(next_to_python) if next_to_python.exists() else 'mpiexec'
    env = os.environ | {'OMP_NUM_THREADS': '1', 'OPENBLAS_NUM_THREADS': '1'}
    for name, before in [('check1', []), ('check4', [mpiexec, '-n', '4'])]:
        svg = HERE / f'{name}.svg'
        subprocess.run([*before, sys.executable, '-m', 'chainermn', 'check', '--svg', svg], env=env,
                       check=True, cwd='/')
        # Do not load fonts from the network.
        svg.write_text(re.sub(r'@font-face \{.*?\}\s*', '', svg.read_text(), flags=re.DOTALL))


if __name__ == '__main__':
    main()
