"""Record the losses of the old programs with the versions of Chainer that they were written for.

``python record.py FOLDER`` needs FOLDER/1.24.0/bin/python with that version of Chainer, and so on
for each folder of programs here, and writes losses.json. Make them with Python 3.6::

    python3.6 -m venv 1.24.0
    1.24.0/bin/pip install 'numpy<1.14' 'setuptools<45' 'filelock<3.4' 'protobuf<3.19' six nose mock
    1.24.0/bin/pip install --no-deps chainer==1.24.0

``python record.py`` without a folder writes the table of docs/migrating.md.
"""

import ast
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).parent
LOSSES = HERE / 'losses.json'
PAGE = HERE.parents[3] / 'docs' / 'migrating.md'

#: Programs that depend on values that changed, and so need ``CHAINER_COMPAT_DIALECT``.
DIALECT = {
    '1.5.1/custom_function.py': '`y.backward()` keeps `y.grad`',
    '1.24.0/gan.py': 'the running variance starts at 0',
    '1.24.0/ctc_crf.py': 'the initial forget bias of an LSTM is 0',
    '1.24.0/multi_input.py': 'the updater passes Variables to the model',
    '2.1.0/cnn_init_scope.py': 'the order of data in later epochs; the running variance',
    '4.5.0/relational.py': 'the order of data in later epochs; the running variance',
}


#: Programs of ChainerMN 1.0 to 1.3, and what computes the same in one process.
CHAINERMN = 'chainermn'
NAMES = {CHAINERMN: 'ChainerMN 1'}
SINGLE = {path.with_name(path.name.replace('_single', '')): path
          for path in HERE.joinpath(CHAINERMN).glob('*_single.py')}


def programs():
    """Return the paths of all programs by version, oldest version first."""
    versions = [path.name for path in HERE.iterdir() if re.fullmatch(r'\d+\.\d+\.\d+', path.name)]
    versions.sort(key=lambda version: [int(number) for number in version.split('.')])
    return {folder: sorted({*HERE.joinpath(folder).glob('*.py')} - {*SINGLE.values()})
            for folder in [*versions, CHAINERMN]}


def name_of(path):
    return path.relative_to(HERE).as_posix()


def run(paths, *command, **variables):
    """Run programs; return the losses, or the error, by program."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(('CHAINER', 'PYTHON'))}
    env |= {'OMP_NUM_THREADS': '1', **variables}
    with tempfile.TemporaryDirectory() as folder:
        said = subprocess.run([*command, HERE / 'run.py', *paths], cwd=folder, env=env, check=True,
                              stdout=subprocess.PIPE, text=True).stdout
    # Of several ranks, rank 0 prints the losses.
    return {name_of(pathlib.Path(path)): result
            for path, result in map(json.loads, said.splitlines()) if result}


def record(versions):
    losses = {}
    for folder, paths in programs().items():
        version = folder if folder != CHAINERMN else '3.5.0'
        paths = [SINGLE.get(path, path) for path in paths]
        for name, result in run(paths, pathlib.Path(versions, version, 'bin', 'python')).items():
            if isinstance(result, str):
                raise SystemExit(f'{name} failed with Chainer {version}:\n{result}')
            losses[name.replace('_single', '')] = [float(f'{loss:.8g}') for loss in result]
    lines = [f'{json.dumps(name)}: {json.dumps(values)}' for name, values in losses.items()]
    LOSSES.write_text('{\n' + ',\n'.join(lines) + '\n}\n', encoding='utf-8')


def table():
    """Return the table of docs/migrating.md: what each program is, from its docstring."""
    losses = json.loads(LOSSES.read_text(encoding='utf-8'))
    lines = ['| Chainer | script | what it tests | values compared | old behavior to restore |',
             '|---|---|---|---|---|']
    for version, paths in programs().items():
        for path in paths:
            about = ast.get_docstring(ast.parse(path.read_text(encoding='utf-8'))).split('\n')[0]
            lines.append(f'| {NAMES.get(version, version)} | `{path.stem}` | {about.rstrip(".")} '
                         f'| {len(losses[name_of(path)])} | {DIALECT.get(name_of(path), "")} |')
    return '\n'.join(lines)


def write_table():
    text = PAGE.read_text(encoding='utf-8')
    before, after = '<!-- old programs -->\n', '\n<!-- end of old programs -->'
    start, end = text.index(before) + len(before), text.index(after)
    PAGE.write_text(text[:start] + table() + text[end:], encoding='utf-8')


if __name__ == '__main__':
    if sys.argv[1:]:
        record(sys.argv[1])
    write_table()
