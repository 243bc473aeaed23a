"""Generates the image and the output in docs/timeline.md by running the script on that page.

``python docs/pictures/timeline.py``, in an environment that has ChainerMN, MPI and matplotlib.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
PAGE = HERE.parent / 'timeline.md'
BEGIN, END = '<!-- written by pictures/timeline.py -->\n', '<!-- until here -->'


def main() -> None:
    """Run the commands of the page."""
    page = PAGE.read_text()
    script = re.search(r'<!-- file: train.py -->\n```python\n(.*?)```', page, re.S)[1]
    beside = pathlib.Path(sys.executable).with_name('mpiexec')
    mpiexec = str(beside) if beside.exists() else 'mpiexec'
    env = os.environ | {'CHAINERMN_TIMELINE': 'out.json', 'OMP_NUM_THREADS': '1',
                        'OPENBLAS_NUM_THREADS': '1'}
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / 'train.py').write_text(script)
        subprocess.run([mpiexec, '-n', '4', sys.executable, '-W', 'ignore', 'train.py'], cwd=folder,
                       env=env, check=True)
        files = [f'out.{rank}.json' for rank in range(4)]
        shown = subprocess.run(
            [sys.executable, '-m', 'chainermn', 'timeline', *files, '--png', 'out.png'], cwd=folder,
            check=True, stdout=subprocess.PIPE, text=True).stdout
        shutil.copyfile(f'{folder}/out.png', HERE / 'timeline.png')
    text = shown.removesuffix('\nWrote out.png\n')
    before, rest = page.split(BEGIN)
    after = rest.split(END)[1]
    PAGE.write_text(f'{before}{BEGIN}\n```text\n{text.rstrip()}\n```\n\n{END}{after}')


if __name__ == '__main__':
    main()
