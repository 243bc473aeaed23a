"""Runs all benchmarks, one after the other, and keeps what they print and draw.

``python benchmarks [NAME ...] [--quick] [--out FOLDER] [--docs docs/benchmarks.md]``

Each runs alone, for a limited time; what fails or is not in time is said at the end, and the
others run all the same.  In the folder is then a text and a PNG of each (without matplotlib, no
PNG).  With ``--docs`` all of them become a page, with the machine and the date: nobody types a
figure.  With names and a page that is there, only their sections are written anew, and each says
of when and where it is.
"""

import argparse
import ast
import datetime
import importlib.metadata
import importlib.util
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).parent
LIMITS = {  # minutes, in the order in which they run
    'startup': 10,
    'verbs': 5,
    'recent': 5,
    'timeline': 5,
    'mean_grad': 30,
    'cost_model': 10,
    'weak_scaling': 20,
    'overlap': 15,
    'scatter_dataset': 15,
    'iterator': 5,
    'checkpoint': 10,
    'kvstore_async': 5,
}
ON_MPIEXEC = {'kvstore_async': 4}  # ranks to start it on; the others start their own
TAKES_TORCH = ('mean_grad', 'weak_scaling')

PAGE = """# Benchmarks

What ChainerMN 8 costs, beside the `chainermn` that Chainer carries ("old"), plain mpi4py ("raw")
and PyTorch ("gloo"). This page was written by

<!-- not run: it takes most of an hour -->
```sh
tox -e bench -- --docs docs/benchmarks.md
```

on {when}. A section of another run says so.

Compare figures of one table only. All methods of a table took turns in one run, round by round, so
that a busy moment met all of them; a ratio is that of two methods within a round, and printed is
its median, mostly with the least and the greatest. Each process has one thread. There was one
machine: nothing here has crossed a network or used a GPU.
"""


def run(name: str, out: pathlib.Path, args: argparse.Namespace) -> str:
    """Runs one benchmark, whose output is shown and kept; returns what went wrong, or nothing."""
    command = [sys.executable, '-u', '-W', 'ignore', str(HERE / f'{name}.py')]
    if importlib.util.find_spec('matplotlib'):
        command += ['--png', str(out / f'{name}.png')]
    if name in ON_MPIEXEC:
        beside = pathlib.Path(sys.executable).with_name('mpiexec')
        mpiexec = str(beside) if beside.exists() else 'mpiexec'
        command = [mpiexec, '-n', str(ON_MPIEXEC[name]), *command]
    if name in TAKES_TORCH:
        command += ['--torch', args.torch]
    if args.quick:
        command.append('--quick')
    env = os.environ | dict.fromkeys(['OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS'], '1')
    print(f'--- {name}', flush=True)
    start = time.perf_counter()
    with open(out / f'{name}.txt', 'w') as file:
        process = subprocess.Popen(command, env=env, cwd=out, stdout=file, stdin=subprocess.DEVNULL)
        try:
            code = process.wait(LIMITS[name] * 60)
        except subprocess.TimeoutExpired:
            process.terminate()  # it then ends its own processes
            process.wait()
            code = None
    print((out / f'{name}.txt').read_text().strip())
    print(f'({time.perf_counter() - start:.0f} s)\n', flush=True)
    if code is None:
        return f'{name} was not done in {LIMITS[name]} minutes'
    return f'{name} ended with {code}' if code else ''


def machine() -> str:
    """Says what all of this runs on."""
    cpu = re.search(r'model name\s*: (.*)', pathlib.Path('/proc/cpuinfo').read_text())
    memory = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30
    versions = [f'Python {platform.python_version()}']
    for package in ('chainer', 'numpy', 'mpi4py', 'mpich', 'torch'):
        try:
            versions.append(f'{package} {importlib.metadata.version(package)}')
        except importlib.metadata.PackageNotFoundError:
            continue
    return (f'{cpu[1] if cpu else platform.machine()}, {len(os.sched_getaffinity(0))} cores, '
            f'{memory:.0f} GiB; Linux {platform.release().split("-")[0]}; {", ".join(versions)}')


def when() -> str:
    """Says of which day, commit and machine the figures are."""
    commit = subprocess.run(['git', 'rev-parse', '--short', 'HEAD'], cwd=HERE, text=True,
                            capture_output=True, check=False).stdout.strip() or 'unknown'
    return f'{datetime.date.today()} at commit {commit}, on this machine: {machine()}'


def section(name: str, page: pathlib.Path, out: pathlib.Path, of: str) -> str:
    """Returns the text of a benchmark's section; its PNG goes into a folder beside the page."""
    about = ast.get_docstring(ast.parse((HERE / f'{name}.py').read_text()))
    first, *others = about.replace('``', '`').split('\n\n')
    text = f'## {name}\n\n{first}\n'
    text += ''.join(f'\n{other}\n' for other in others)
    text += of
    text += f'\n```text\n{(out / f"{name}.txt").read_text().strip()}\n```\n'
    if (out / f'{name}.png').exists():
        images = page.with_suffix('')
        images.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(out / f'{name}.png', images / f'{name}.png')
        text += f'\n![{name}]({images.name}/{name}.png)\n'
    return text


def write_page(page: pathlib.Path, out: pathlib.Path, names: list[str], wrong: list[str]) -> None:
    """Writes a page of all results, or these sections of one that is there."""
    if page.exists() and len(names) < len(LIMITS):
        head, *rest = re.split(r'^(?=## )', page.read_text(), flags=re.MULTILINE)
        sections = {text[3:].partition('\n')[0]: text for text in rest}
        of = f'\nThese figures are of {when()}.\n'
    else:
        head, sections, of = PAGE.format(when=when()) + '\n', {}, ''
    sections |= {name: section(name, page, out, of) for name in names}
    if wrong:
        sections['Not there'] = '## Not there\n\n' + ''.join(f'- {each}\n' for each in wrong)
    order = [*LIMITS, 'Not there']
    page.write_text(head + '\n'.join(
        f'{sections[name].rstrip()}\n' for name in order if name in sections))


def main() -> None:
    """Runs those that are asked for, or all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('names', nargs='*', metavar='NAME', help=', '.join(LIMITS))
    parser.add_argument('--quick', action='store_true', help='a round of little each, as a try')
    parser.add_argument('--out', type=pathlib.Path, default=pathlib.Path('benchmark-results'),
                        metavar='FOLDER', help='for texts and PNGs; default: %(default)s')
    parser.add_argument('--docs', type=pathlib.Path, metavar='FILE',
                        help='write a page; with names only their sections, if it is there')
    parser.add_argument('--torch', default=sys.executable, metavar='PYTHON',
                        help='a Python with torch; default: this one')
    args = parser.parse_args()
    if unknown := set(args.names) - set(LIMITS):
        parser.error(f'there is no {", ".join(sorted(unknown))}')
    names = [name for name in LIMITS if not args.names or name in args.names]
    out = args.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    wrong = [each for name in names if (each := run(name, out, args))]
    if args.docs:
        write_page(args.docs, out, names, wrong)
    print('Texts and PNGs are in', out)
    if wrong:
        raise SystemExit('\n'.join(wrong))


if __name__ == '__main__':
    main()
