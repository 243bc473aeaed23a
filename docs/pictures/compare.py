"""Generates the picture and the outputs in docs/comparing_runs.md by running the script there.

``python docs/pictures/compare.py``, in an environment that has ChainerMN, MPI, PyTorch and
matplotlib.
"""

import os
import pathlib
import re
import subprocess
import sys
import tempfile

import svg

from chainermn._records import plot
from chainermn._records.read import RecordedRun

HERE = pathlib.Path(__file__).resolve().parent
PAGE = HERE.parent / 'comparing_runs.md'
MISTAKE = 'RandomState(1 if comm.rank == 0 else None)  # the mistake'
#: For each output: the change to the script of the second run, and its environment variables.
EXAMPLES = {
    'augmentation': ([], {}),
    'files': ([('update(model, images, labels)', 'update(model, images[::-1], labels[::-1])')], {}),
    'library': ([], {'CHAINER_USE_TORCH': 'never'}),
    'drift': None,
}
#: Code that makes the ranks of a job drift apart.
DRIFT = '''    if step == 100 and comm.rank == 1:
        model.predictor[4].b.array += .01
'''


def run(folder: str, script: str, record: str, env: dict[str, str]) -> None:
    """Record a run of a script in a folder."""
    pathlib.Path(folder, 'train.py').write_text(script)
    next_to_python = pathlib.Path(sys.executable).with_name('mpiexec')
    subprocess.run(
        [str(next_to_python) if next_to_python.exists() else 'mpiexec', '-n', '2',
         sys.executable, 'train.py'],
        cwd=folder, check=True, env={**os.environ, 'OMP_NUM_THREADS': '1',
                                     'CHAINERMN_RECORD': record, **env})


def main() -> None:
    """Write the picture and the outputs."""
    script = re.search(r'<!-- file: train.py -->\n```python\n(.*?)```', PAGE.read_text(), re.S)[1]
    for name, example in EXAMPLES.items():
        first = script if name == 'augmentation' else script.replace(MISTAKE, 'RandomState(1)')
        with tempfile.TemporaryDirectory() as folder:
            if example is None:
                run(folder, first.replace('    optimizer.update', f'{DRIFT}    optimizer.update'),
                    'a', {})
            else:
                changes, env = example
                second = first
                for old, new in changes:
                    assert old in second
                    second = second.replace(old, new)
                run(folder, first, 'a', {})
                run(folder, second, 'b', env)
            text = subprocess.run(
                [sys.executable, '-m', 'chainermn', 'compare', *(['a', 'b'] if example else 'a')],
                cwd=folder, capture_output=True, text=True, check=False).stdout
            if name == 'library':
                a, b = (RecordedRun(pathlib.Path(folder, each)) for each in 'ab')
                figure = plot.draw(a, b)
                figure.axes[0].legend(['A: with PyTorch', 'B: without'])
                (HERE / 'compare.svg').write_text(svg.from_figure(figure), encoding='utf-8')
        begin = f'<!-- {name}: written by pictures/compare.py -->\n'
        before, rest = PAGE.read_text().split(begin)
        after = rest.split('<!-- until here -->', 1)[1]
        PAGE.write_text(f'{before}{begin}\n```text\n{text}```\n\n<!-- until here -->{after}')


if __name__ == '__main__':
    main()
