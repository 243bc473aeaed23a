"""Run all benchmarks, one after the other, and save their output and plots.

``python benchmarks [NAME ...] [--quick] [--out FOLDER] [--docs docs/benchmarks.md [--format]]``

Without names, all benchmarks run that this machine supports: ``hosts`` needs root and iproute2,
``gpu_counts`` needs CuPy and the virtual GPU (``python tests/virtual_gpu/build.py``), ``gpu`` and
``gpu_step`` need a GPU. Each benchmark has a time limit; failures and timeouts are reported at the
end and do not stop the other benchmarks. The output folder contains a text file and, if matplotlib
is installed, an SVG for each benchmark.

``--docs`` generates a page with all tables and plots, the machine and the date, so that no figure
is typed by hand. The page is written after each benchmark. To complete an interrupted run, pass the
names of the missing benchmarks. A section that was measured on a different date, commit or machine
states them. ``--format`` runs no benchmark: after a change of the page format, it generates the
page again from the outputs next to it. ``python docs/pictures/training_step.py`` draws the plot at
the top.
"""

import argparse
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
from collections.abc import Callable

import _summary
import _tables
import gpu
import gpu_counts

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / 'tests'))
import virtual_hosts

HERE = pathlib.Path(__file__).resolve().parent
LIMITS = {  # minutes, in the order in which they run
    'startup': 10,
    'collectives': 10,
    'scale': 20,
    'traffic': 5,
    'job_traffic': 15,
    'recent': 5,
    'timeline': 5,
    'run_record': 10,
    'mean_grad': 30,
    'cost_model': 10,
    'weak_scaling': 20,
    'training_step': 30,
    'functions': 10,
    'updates': 5,
    'pipeline': 5,
    'overlap': 15,
    'sharded_states': 5,
    'scatter_dataset': 15,
    'iterator': 5,
    'sharded_data': 10,
    'checkpoint': 10,
    'kvstore_async': 5,
    'gpu': 10,
    'gpu_step': 10,
    'gpu_counts': 10,
    'hosts': 60,
}
#: Benchmarks that cannot run everywhere: functions that return the reason, or ''.
WHY_NOT: dict[str, Callable[[], str]] = {
    **dict.fromkeys(('gpu', 'gpu_step'), lambda: gpu.why_not() or (
        '' if gpu_counts.why_not() else 'needs a real GPU')),
    'gpu_counts': gpu_counts.why_not,
    'hosts': virtual_hosts.why_not,
}
ON_MPIEXEC = {'kvstore_async': 4}  # ranks to start it on; the others start their own
TAKES_TORCH = ('mean_grad', 'weak_scaling', 'training_step', 'pipeline', 'hosts')

PAGE = """# Benchmarks

This page compares ChainerMN 8 with ChainerMN 7, plain mpi4py and PyTorch. Data-parallel tests use
PyTorch DDP with the gloo backend.

![Time of a training step relative to PyTorch]({pictures}/training_step.svg)

## Summary

{summary}

## How this was measured

Measured in one run on {when}.

All sections are from this run, unless they state their own date. The following command generates
this page:

<!-- not run: it takes most of an hour -->
```sh
tox -e bench -- --docs docs/benchmarks.md
```

Compare figures only within a table. All methods in a table took turns in one run, round by round,
so that load on the machine affected all of them. Tables show medians; plots show all rounds. Each
ratio compares two methods within a round. Each process has one thread.
"""

LINKS = """[Method](../benchmarks/{name}.py) and [output]({folder}/{name}.txt)
"""


def run(name: str, out: pathlib.Path, args: argparse.Namespace) -> str:
    """Run one benchmark, print and save its output; return an error message, or ''."""
    command = [sys.executable, '-u', '-W', 'ignore', str(HERE / f'{name}.py')]
    if importlib.util.find_spec('matplotlib'):
        command += ['--svg', str(out / f'{name}.svg')]
    if name in ON_MPIEXEC:
        next_to_python = pathlib.Path(sys.executable).with_name('mpiexec')
        mpiexec = str(next_to_python) if next_to_python.exists() else 'mpiexec'
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
            process.terminate()  # it then terminates its own processes
            process.wait()
            code = None
    print((out / f'{name}.txt').read_text(encoding='utf-8').strip())
    print(f'({time.perf_counter() - start:.0f} s)\n', flush=True)
    if code is None:
        return f'{name} timed out after {LIMITS[name]} minutes'
    return f'{name} exited with status {code}' if code else ''


def machine() -> str:
    """Describe the machine and the installed versions."""
    cpu = re.search(r'model name\s*: (.*)', pathlib.Path('/proc/cpuinfo').read_text())
    memory = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30
    versions = [f'Python {platform.python_version()}']
    for package in ('chainer', 'numpy', 'mpi4py', 'mpich', 'cupy-cuda12x', 'torch'):
        try:
            versions.append(f'{package} {importlib.metadata.version(package)}')
        except importlib.metadata.PackageNotFoundError:
            continue
    return (f'{cpu[1] if cpu else platform.machine()}, {len(os.sched_getaffinity(0))} cores, '
            f'{memory:.0f} GiB; Linux {platform.release().split("-")[0]}; {", ".join(versions)}')


def when() -> str:
    """Return date, commit and machine of the results."""
    commit = subprocess.run(['git', 'rev-parse', '--short', 'HEAD'], cwd=HERE, text=True,
                            capture_output=True, check=False).stdout.strip() or 'unknown'
    return f'{datetime.date.today()} at commit {commit}, on this machine: {machine()}'


def section(name: str, page: pathlib.Path, out: pathlib.Path, own_date: str) -> str:
    """Return the text of a section; copy its output and SVG into a folder next to the page."""
    folder = page.with_suffix('')
    folder.mkdir(parents=True, exist_ok=True)
    if out != folder:
        for path in out.glob(f'{name}.*'):
            shutil.copyfile(path, folder / path.name)
    title, question, note = _tables.SECTIONS[name]
    parts = [f'### {title}\n', f'{question}\n', f'{note}\n' if note else '']
    parts += map(_tables.markdown, _tables.tables(
        (out / f'{name}.txt').read_text(encoding='utf-8')))
    parts += [f'![{title}]({folder.name}/{name}.svg)\n' if (out / f'{name}.svg').exists() else '',
              f'Measured on {own_date}.\n' if own_date else '',
              LINKS.format(name=name, folder=folder.name)]
    return '\n'.join(filter(None, parts))


def split(text: str) -> dict[str, str]:
    """Return the sections of a page, by benchmark."""
    sections = re.split(r'^(?=##+ )', text, flags=re.MULTILINE)
    names = (_tables.NAMES.get(each.lstrip('# ').partition('\n')[0]) for each in sections)
    return {name: each for name, each in zip(names, sections, strict=True) if name}


def write_page(page: pathlib.Path, out: pathlib.Path, names: list[str], wrong: list[str],
               measured: str, is_complete: bool) -> None:
    """Write a page, or replace sections of an existing page; its other sections remain.

    Args:
        page: Path of the page.
        out: Folder with the results.
        names: Benchmarks with new results.
        wrong: Error messages of benchmarks that failed.
        measured: Date, commit and machine of the new results.
        is_complete: Whether the new results replace all sections, so that ``measured`` applies to
            the whole page.
    """
    old = page.read_text(encoding='utf-8') if page.exists() else ''
    match = re.search(r'^Measured in one run on (.*)\.$', old, re.MULTILINE)
    before = match[1] if match else ''
    of_page = measured if is_complete or not before else before
    sections = {}
    for name, text in split(old).items():
        if before != of_page and '\nMeasured on ' not in text:
            text = text.replace('\n[Method]', f'\nMeasured on {before}.\n\n[Method]')
        sections[name] = text
    for name in names:
        sections[name] = section(name, page, out, '' if measured == of_page else measured)
    pictures = os.path.relpath(HERE.parent / 'docs' / 'pictures', page.absolute().parent)
    head = PAGE.format(
        pictures=pictures, summary=_summary.summary(page.with_suffix(''), sections), when=of_page)
    texts = []
    for group, members in _tables.GROUPS.items():
        found = [sections[name] for name in members if name in sections]
        texts += [f'## {group}', *found] if found else []
    if wrong:
        texts.append('## Failures\n\n' + ''.join(f'- {each}\n' for each in wrong))
    page.write_text('\n'.join([head, *(f'{text.rstrip()}\n' for text in texts)]),
                    encoding='utf-8')


def format_page(page: pathlib.Path) -> None:
    """Generate a page again from the outputs in the folder next to it."""
    old = page.read_text(encoding='utf-8')
    dates = {name: (re.search(r'^Measured on (.*)\.$', text, re.MULTILINE) or ['', ''])[1]
             for name, text in split(old).items()}
    for date in dict.fromkeys(dates.values()):
        names = [name for name, each in dates.items() if each == date]
        write_page(page, page.with_suffix(''), names, [], date, False)


def main() -> None:
    """Run the given benchmarks, or all that this machine supports."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('names', nargs='*', metavar='NAME', help=', '.join(LIMITS))
    parser.add_argument('--quick', action='store_true', help='one short round each, as a test')
    parser.add_argument('--out', type=pathlib.Path, default=pathlib.Path('benchmark-results'),
                        metavar='FOLDER', help='output folder; default: %(default)s')
    parser.add_argument('--docs', type=pathlib.Path, metavar='FILE',
                        help='write a page; with names, replace their sections in an existing page')
    parser.add_argument('--format', action='store_true',
                        help='run no benchmark; generate the page of --docs again from its outputs')
    parser.add_argument('--torch', default=sys.executable, metavar='PYTHON',
                        help='Python with torch; default: this one')
    args = parser.parse_args()
    if unknown := set(args.names) - set(LIMITS):
        parser.error(f'unknown benchmark: {", ".join(sorted(unknown))}')
    if args.format and not args.docs:
        parser.error('--format needs --docs')
    if args.format:
        format_page(args.docs)
        return
    names = [name for name in LIMITS if name in args.names]
    measured = when()
    if is_complete := not names:
        for name in LIMITS:
            if reason := name in WHY_NOT and WHY_NOT[name]():
                print(f'{name} is skipped: {reason}')
            else:
                names.append(name)
    out = args.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    done: list[str] = []
    wrong: list[str] = []
    for name in names:
        if problem := run(name, out, args):
            wrong.append(problem)
        else:
            done.append(name)
        if args.docs:
            write_page(args.docs, out, done, wrong, measured, is_complete)
    print('Wrote texts and SVGs to', out)
    if wrong:
        raise SystemExit('\n'.join(wrong))


if __name__ == '__main__':
    main()
