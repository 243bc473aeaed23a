"""Generates the picture and the output in docs/timeline.md by running the script on that page.

``python docs/pictures/timeline.py``, in an environment that has ChainerMN, MPI and matplotlib.
"""

import os
import pathlib
import re
import subprocess
import sys
import tempfile

import svg

from chainermn._timeline import plot, summary, trace_files

HERE = pathlib.Path(__file__).resolve().parent
PAGE = HERE.parent / 'timeline.md'
BEGIN, END = '<!-- written by pictures/timeline.py -->\n', '<!-- until here -->'


def record(ranks: int) -> trace_files.Run:
    """Run the script of the page."""
    script = re.search(r'<!-- file: train.py -->\n```python\n(.*?)```', PAGE.read_text(), re.S)[1]
    next_to_python = pathlib.Path(sys.executable).with_name('mpiexec')
    mpiexec = str(next_to_python) if next_to_python.exists() else 'mpiexec'
    env = os.environ | {'CHAINERMN_TIMELINE': 'out.json', 'OMP_NUM_THREADS': '1',
                        'OPENBLAS_NUM_THREADS': '1'}
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, 'train.py').write_text(script)
        subprocess.run([mpiexec, '-n', str(ranks), sys.executable, '-W', 'ignore', 'train.py'],
                       cwd=folder, env=env, check=True)
        return trace_files.read(sorted(pathlib.Path(folder).glob('out.*.json')))


def draw(run: trace_files.Run) -> str:
    """Return the picture as SVG, narrower than from the command, to be readable on phones."""
    figure = plot.draw(run)
    figure.set_size_inches(6.5, 5.5)
    return svg.from_figure(figure)


def main() -> None:
    """Write the picture and the output."""
    run = record(4)
    (HERE / 'timeline.svg').write_text(draw(run), encoding='utf-8')
    before, rest = PAGE.read_text().split(BEGIN)
    after = rest.split(END)[1]
    PAGE.write_text(f'{before}{BEGIN}\n```text\n{summary.text(run)}\n```\n\n{END}{after}')


if __name__ == '__main__':
    main()
