"""Runs every code block of the pages, as a reader would who takes them in order.

``python docs/run_blocks.py [PAGE ...]``, by default all pages. Of one page,

- ``python`` blocks are one program, which runs in a new folder; ``benchmarks``, ``examples`` and
  ``tests`` of the repository are in it;
- ``sh`` blocks run in that folder too, between them;
- blocks in other languages, and those without one, show what something prints or what a file holds.

Comments in the lines above a block say what is special about it:

- ``<!-- ranks: 4 -->``: it runs on 4 ranks. All such blocks of the page are one program, after the
  others.
- ``<!-- file: train.py -->``: a reader saves it under this name, which a later block uses.
- ``<!-- printed -->``: it is what the block before it has printed. The order of the lines does not
  matter (that of several ranks varies), ``...`` is anything, and alone in a line, any lines.
- ``<!-- fails: TEXT -->``: it fails, and what it says contains the text.
- ``<!-- before: CODE -->``, over several lines if need be: runs before it, and is not shown.
- ``<!-- not run: REASON -->``
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import io
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import traceback
import types

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGES = ('README.md', 'CONTRIBUTING.md', 'docs/*.md', 'docs/reference/*.md', 'examples/*/README.md')
LIMIT = 300  # seconds for a program

COMMENT = r'[ ]*<!--(?:(?!-->).|\n)*-->[ ]*\n'
BLOCK = re.compile(rf'^((?:{COMMENT})*)([ ]*)(```+)([^\n]*)\n(.*?)^\2\3[ ]*$', re.M | re.S)
KEYS = ('ranks', 'file', 'printed', 'fails', 'before', 'not run')


@dataclasses.dataclass
class Block:
    """A block of code, and what the comments above it say."""

    page: str
    line: int
    language: str
    code: str
    ranks: int = 1
    file: str = ''
    printed: bool = False
    fails: str = ''
    before: str = ''
    not_run: str = ''

    def __str__(self) -> str:
        return f'{self.page}:{self.line}'


def all_pages() -> list[str]:
    """Returns the paths of the pages, from the root of the repository."""
    return sorted(str(path.relative_to(ROOT)) for pattern in PAGES for path in ROOT.glob(pattern))


def find_blocks(page: str) -> list[Block]:
    """Returns the blocks of a page with which there is something to do."""
    text = (ROOT / page).read_text(encoding='utf-8')
    blocks = []
    for found in BLOCK.finditer(text):
        comments, indent, _, language, code = found.groups()
        line = text.count('\n', 0, found.start(3)) + 1
        block = Block(page, line, language.strip(), re.sub(f'^{indent}', '', code, flags=re.M))
        for comment in re.findall(r'<!--\s*((?:(?!-->).|\n)*?)\s*-->', comments):
            key, _, value = comment.partition(':')
            if key not in KEYS:
                raise SystemExit(f'{block}: {key!r} is none of {", ".join(KEYS)}')
            value = int(value) if key == 'ranks' else key == 'printed' or value.strip()
            setattr(block, key.replace(' ', '_'), value)
        if block.language == 'sh' and page.startswith('examples/') and not block.not_run:
            block.not_run = 'tests/examples_tests starts these scripts, for two steps each'
        if block.printed and blocks:
            block.ranks = blocks[-1].ranks
        if block.language in ('python', 'sh') or block.file or block.printed or block.not_run:
            blocks.append(block)
    return blocks


def run_blocks(page: str, ranks: int) -> None:
    """Runs the blocks of a page that have this number of ranks, in this process."""
    module = sys.modules['__main__'] = types.ModuleType('__main__')
    said = ''
    for block in find_blocks(page):
        if block.not_run or block.ranks != ranks:
            continue
        if block.file:
            pathlib.Path(block.file).write_text(block.code, encoding='utf-8')
        elif block.printed:
            check_printed(block, said)
        else:
            said = run_block(block, module)
            print(said, end='')


def run_block(block: Block, module: types.ModuleType) -> str:
    """Returns what a block prints, and what it says when it fails as it should."""
    failed, said = False, ''
    if block.language == 'sh':
        done = subprocess.run(['bash', '-ec', f'{block.before}\n{block.code}'], text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        failed, said = done.returncode != 0, done.stdout
    else:
        # The lines of a traceback are those of the page.
        code = '\n' * block.line + block.code
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(block.before, module.__dict__)
            try:
                exec(compile(code, str(ROOT / block.page), 'exec'), module.__dict__)
            except Exception:
                if not block.fails:
                    raise
                failed = True
                traceback.print_exc(file=printed)
        said = printed.getvalue()
    if failed != bool(block.fails) or block.fails not in said:
        raise SystemExit(f'{block} should have {f"failed with {block.fails!r}" * bool(block.fails)}'
                         f'{"ended well" * (not block.fails)}; it said\n{said}')
    return said


def check_printed(block: Block, said: str) -> None:
    """Compares what a page shows with what was printed by all ranks."""
    if block.ranks > 1:
        from mpi4py import MPI

        said = ''.join(MPI.COMM_WORLD.allgather(said))
    wrong = []
    expected = block.code.splitlines()
    for line in map(str.rstrip, said.splitlines()):
        for pattern in sorted(expected, key='...'.__eq__):  # which matches all, comes last
            if re.fullmatch(re.escape(pattern).replace(r'\.\.\.', '.*'), line):
                if pattern != '...':
                    expected.remove(pattern)
                break
        else:
            wrong.append(line)
    missing = [line for line in expected if line != '...']
    if wrong or missing:
        raise SystemExit('\n'.join([f'{block}: this was not printed:', *missing,
                                    'and this was, but is not on the page:', *wrong]))


def run_page(page: str) -> str:
    """Runs the programs of a page; returns what was said by one that failed."""
    with tempfile.TemporaryDirectory(prefix='chainermn-docs-') as folder:
        for name in ('benchmarks', 'examples', 'tests'):
            pathlib.Path(folder, name).symlink_to(ROOT / name)
        for ranks in sorted({block.ranks for block in find_blocks(page) if not block.not_run}):
            command = [sys.executable, '-W', 'error', __file__, page, '--ranks', str(ranks)]
            if ranks > 1:
                command = ['mpiexec', '-n', str(ranks), *command]
            with subprocess.Popen(command, cwd=folder, text=True, start_new_session=True,
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
                try:
                    said, _ = process.communicate(timeout=LIMIT)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    said, _ = process.communicate()
                    return f'{said}\nnot finished within {LIMIT} s'
            if process.returncode:
                return said
    return ''


def main() -> None:
    """Runs pages, prints what became of each, and at last what was not run, and why."""
    parser = argparse.ArgumentParser(description='Runs the code blocks of pages.')
    parser.add_argument('pages', nargs='*', metavar='PAGE', help='such as docs/overlap.md')
    parser.add_argument('--ranks', type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.ranks:
        run_blocks(args.pages[0], args.ranks)
        return
    os.environ['PATH'] = f'{pathlib.Path(sys.executable).parent}:{os.environ["PATH"]}'
    os.environ.setdefault('OMP_NUM_THREADS', '1')
    pages = args.pages or all_pages()
    failed = 0
    n_run: dict[str, int] = {}  # by page
    not_run: dict[str, dict[str, list[int]]] = {}  # lines by reason and page
    for page in pages:
        for block in find_blocks(page):
            if block.not_run:
                not_run.setdefault(block.not_run, {}).setdefault(page, []).append(block.line)
            else:
                n_run[page] = n_run.get(page, 0) + 1
    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for page, said in zip(n_run, pool.map(run_page, n_run), strict=True):
            print(f'{page}: {"FAILED" if said else "ok"} ({n_run[page]} blocks)', flush=True)
            if said:
                failed += 1
                print(f'{said}\n', flush=True)
    print('\nNot run:' if not_run else '')
    for reason, where in not_run.items():
        places = (f'{page}:{",".join(map(str, lines))}' for page, lines in where.items())
        print(f'- {reason}: {"; ".join(places)}')
    sys.exit(f'{failed} of {len(pages)} pages failed' if failed else 0)


if __name__ == '__main__':
    main()
