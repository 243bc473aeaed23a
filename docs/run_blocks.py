"""Run the code blocks of documentation pages in order.

``python docs/run_blocks.py [PAGE ...]``, by default all pages. For each page,

- ``python`` blocks are one program, which runs in a new folder that contains ``benchmarks``,
  ``examples`` and ``tests`` of the repository;
- ``diff`` blocks with a number of ranks or a file name show two Python programs; the second runs;
- ``sh`` blocks run in the same folder, in order with the others;
- blocks in other languages are not run.

Comments above a block modify this:

- ``<!-- ranks: 4 -->``: run on 4 ranks. All such blocks of a page are one program, which runs after
  the other blocks. The programs of all pages with the same number of ranks run one after the other
  in one job, because starting a job takes longer than most of them. Each has its own folder and
  ``__main__``.
- ``<!-- file: train.py -->``: save the block under this name, for a later block.
- ``<!-- printed -->``: the expected output of the previous block. The order of lines does not
  matter (with several ranks it varies). ``...`` matches any text, or any lines if it is alone.
- ``<!-- printed: PATTERN -->``: the same, but the pattern, which can have several lines, is
  compared with both the output and the block, which shows an example of the output.
- ``<!-- fails: TEXT -->``: the block must fail, with this text in its output.
- ``<!-- before: CODE -->``: hidden code to run before the block; can have several lines.
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
    """A block of code, with the options from the comments above it."""

    page: str
    line: int
    language: str
    code: str
    ranks: int = 1
    file: str = ''
    printed: bool = False
    pattern: str = ''
    fails: str = ''
    before: str = ''
    not_run: str = ''

    def __str__(self) -> str:
        return f'{self.page}:{self.line}'


def all_pages() -> list[str]:
    """Return the paths of the pages, relative to the root of the repository."""
    return sorted(str(path.relative_to(ROOT)) for pattern in PAGES for path in ROOT.glob(pattern))


def find_blocks(page: str) -> list[Block]:
    """Return the relevant blocks of a page."""
    text = (ROOT / page).read_text(encoding='utf-8')
    blocks = []
    for found in BLOCK.finditer(text):
        comments, indent, _, language, code = found.groups()
        line = text.count('\n', 0, found.start(3)) + 1
        block = Block(page, line, language.strip(), re.sub(f'^{indent}', '', code, flags=re.M))
        for comment in re.findall(r'<!--\s*((?:(?!-->).|\n)*?)\s*-->', comments):
            key, _, value = comment.partition(':')
            if key not in KEYS:
                raise SystemExit(f'{block}: unknown comment {key!r}; use one of {", ".join(KEYS)}')
            if key == 'printed':
                block.printed, block.pattern = True, value.strip()
                continue
            value = int(value) if key == 'ranks' else value.strip()
            setattr(block, key.replace(' ', '_'), value)
        if block.language == 'diff' and re.search('ranks:|file:', comments):
            block.language, block.code = 'python', re.sub(
                r'^(?:-.*|[+ ])', '', block.code, flags=re.M)
        if block.language == 'sh' and page.startswith('examples/') and not block.not_run:
            block.not_run = 'tests/examples runs these scripts for two steps each'
        if block.printed and blocks:
            block.ranks = blocks[-1].ranks
        if block.language in ('python', 'sh') or block.file or block.printed or block.not_run:
            blocks.append(block)
    return blocks


def run_blocks(page: str, ranks: int) -> None:
    """Run the blocks of a page for this number of ranks, in this process."""
    module = sys.modules['__main__'] = types.ModuleType('__main__')
    output = ''
    for block in find_blocks(page):
        if block.not_run or block.ranks != ranks:
            continue
        if block.file:
            pathlib.Path(block.file).write_text(block.code, encoding='utf-8')
        elif block.printed:
            check_printed(block, output)
        else:
            output = run_block(block, module)
            print(output, end='')


def run_block(block: Block, module: types.ModuleType) -> str:
    """Run a block; return its output, including an expected error."""
    failed, output = False, ''
    if block.language == 'sh':
        done = subprocess.run(['bash', '-ec', f'{block.before}\n{block.code}'], text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        failed, output = done.returncode != 0, done.stdout
    else:
        # So that line numbers in tracebacks match the page.
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
        output = printed.getvalue()
    if failed != bool(block.fails) or block.fails not in output:
        raise SystemExit(f'{block} should have {f"failed with {block.fails!r}" * bool(block.fails)}'
                         f'{"succeeded" * (not block.fails)}; its output was\n{output}')
    return output


def check_printed(block: Block, output: str) -> None:
    """Compare the expected output with the output of all ranks."""
    if block.ranks > 1:
        from mpi4py import MPI

        output = ''.join(MPI.COMM_WORLD.allgather(output))
    compare(block, block.pattern or block.code, output)
    if block.pattern:
        compare(block, block.pattern, block.code)


def compare(block: Block, pattern: str, output: str) -> None:
    """Compare output with the pattern of a block."""
    wrong = []
    expected = pattern.splitlines()
    for line in map(str.rstrip, output.splitlines()):
        for each in sorted(expected, key='...'.__eq__):  # matches everything, so it comes last
            if re.fullmatch(re.escape(each).replace(r'\.\.\.', '.*'), line):
                if each != '...':
                    expected.remove(each)
                break
        else:
            wrong.append(line)
    missing = [line for line in expected if line != '...']
    if wrong or missing:
        raise SystemExit('\n'.join([f'{block}: missing output:', *missing,
                                    'unexpected output:', *wrong]))


def run_job(pages: list[str], ranks: int, folder: str) -> str:
    """Run the blocks of these pages for this number of ranks; return what failed, or ''."""
    command = [sys.executable, '-W', 'error', __file__, *pages, '--ranks', str(ranks),
               '--folder', folder]
    if ranks > 1:
        command = ['mpiexec', '-n', str(ranks), *command]
    with subprocess.Popen(command, text=True, start_new_session=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        try:
            output, _ = process.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            return f'{output}\ntimed out after {LIMIT} s'
    return output if process.returncode else ''


def folder_of(page: str, folder: str) -> pathlib.Path:
    """Return the folder in which the blocks of a page run."""
    return pathlib.Path(folder, page.replace('/', '-'))


def main() -> None:
    """Run pages and print results, then the blocks that were not run, with reasons."""
    parser = argparse.ArgumentParser(description='Run the code blocks of documentation pages.')
    parser.add_argument('pages', nargs='*', metavar='PAGE', help='such as docs/overlap.md')
    parser.add_argument('--ranks', type=int, help='run only blocks for this number of ranks')
    parser.add_argument('--folder', help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.folder:
        for page in args.pages:
            os.chdir(folder_of(page, args.folder))
            run_blocks(page, args.ranks)
        return
    os.environ['PATH'] = f'{pathlib.Path(sys.executable).parent}:{os.environ["PATH"]}'
    os.environ.setdefault('OMP_NUM_THREADS', '1')
    pages = args.pages or all_pages()
    numbers: dict[int, dict[str, int]] = {}  # number of blocks, by ranks and page
    not_run: dict[str, dict[str, list[int]]] = {}  # line numbers, by reason and page
    for page in pages:
        for block in find_blocks(page):
            if block.not_run:
                not_run.setdefault(block.not_run, {}).setdefault(page, []).append(block.line)
            elif args.ranks in (None, block.ranks):
                of_pages = numbers.setdefault(block.ranks, {})
                of_pages[page] = of_pages.get(page, 0) + 1
    failed = 0
    with tempfile.TemporaryDirectory(prefix='chainermn-docs-') as folder, (
            concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0)))) as pool:
        for page in {page for of_pages in numbers.values() for page in of_pages}:
            folder_of(page, folder).mkdir()
            for name in ('benchmarks', 'examples', 'tests'):
                (folder_of(page, folder) / name).symlink_to(ROOT / name)
        for ranks, of_pages in sorted(numbers.items()):
            jobs = [[page] for page in of_pages] if ranks == 1 else [[*of_pages]]
            outputs = pool.map(lambda job, ranks=ranks: run_job(job, ranks, folder), jobs)
            for job, output in zip(jobs, outputs, strict=True):
                n_blocks = sum(of_pages[page] for page in job)
                print(f'{", ".join(job)}: {"FAILED" if output else "ok"} ({n_blocks} blocks, '
                      f'{ranks} rank{"s" * (ranks > 1)})', flush=True)
                if output:
                    failed += 1
                    print(f'{output}\n', flush=True)
    print('\nNot run:' if not_run else '')
    for reason, where in not_run.items():
        places = (f'{page}:{",".join(map(str, lines))}' for page, lines in where.items())
        print(f'- {reason}: {"; ".join(places)}')
    sys.exit(f'{failed} failed' if failed else 0)


if __name__ == '__main__':
    main()
