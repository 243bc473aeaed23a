"""Kills a rank in every way at every place, on real processes, and checks how the job ends.

``python tests/reliability/fault_matrix.py [--ranks 2,3,4] [--only TEXT] [--slice 1/4]
[--jobs 2] [--results FILE [--missing]] [--docs docs/test_results.md] [--hosts 2,1]``

A case passes if mpiexec ends within 5 seconds of the fault (more on a slow machine) with a nonzero
status, after one message with host, rank, cause and, if available, stack, and if no process and no
shared memory is left. Before the first communicator, mpiexec reports signals (and MPICH leaves
its shared memory), and ranks only report their own hangs. ``--docs`` writes the table of all
results in the file to that page; with ``--only``, only the columns that have results.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import re
import signal
import sys
import tempfile
import time
from typing import NamedTuple

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import job_results  # noqa: E402
import program  # noqa: E402
from job_results import Result  # noqa: E402
from jobs import processes  # noqa: E402
from time_limits import seconds  # noqa: E402
from virtual_hosts import Hosts  # noqa: E402

#: Communicators for the operations; each other place determines its own.
COMMUNICATORS = ('naive', 'flat', 'dummy')
# Seconds on an idle machine.
WITHIN = 5
TIMEOUT = 1  # for cases that only a time limit ends
HANGS = 60
NO_FAULTS = [('sys.exit(0) alone', 'at exit'),  # a normal exit
             ('exception in a thread', 'in a data loader')]  # which continues
BEGIN = '<!-- written by fault_matrix.py -->'


class Case(NamedTuple):
    """A fault at a place."""

    way: str
    place: str
    communicator: str
    ranks: int


def cases(ranks: tuple[int, ...]) -> list[Case]:
    """All cases."""
    places = [(place, 'flat') for place in (*program.FIRST, *program.PLACES)] + [
        (operation, name) for name in COMMUNICATORS for operation in program.OPERATIONS]
    return [Case(way, place, name, n) for n in ranks for way in program.WAYS
            for place, name in places
            if (way, place) not in NO_FAULTS]


def run(case: Case, hosts: Hosts | None = None) -> Result:
    """Run one case, on this machine or on several hosts."""
    result, is_early = _run(case, hosts, 0.)
    if is_early:  # on a busy machine, a rank may begin so late that the others report a hang
        result, _ = _run(case, hosts, seconds(4 * TIMEOUT))
    return result


def _run(case: Case, hosts: Hosts | None, more: float) -> tuple[Result, bool]:
    """Run a case with a longer timeout; return whether that ended it before the fault."""
    needs_a_limit = _needs_a_limit(case)
    with tempfile.TemporaryDirectory(prefix='fault-matrix-') as folder:
        # The first rank that imports PyTorch would keep the others waiting until the timeout.
        env = {'OMP_NUM_THREADS': '1', 'FAULT_MATRIX': folder, 'CHAINER_USE_TORCH': 'never'}
        env['CHAINERMN_TIMEOUT'] = str(seconds(TIMEOUT) + more) if needs_a_limit else '0'
        command = [sys.executable, '-W', 'ignore', str(HERE / 'program.py'), case.way, case.place,
                   case.communicator, folder]
        process = hosts.popen(command, env) if hosts is not None else job_results.start(
            ['mpiexec', '-n', str(case.ranks), *command], {**os.environ, **env})
        output, hangs = job_results.finish(process, seconds(HANGS))
        ended = time.time()
        when = pathlib.Path(folder, 'when')
        took = ended - float(when.read_text()) if when.exists() else 0.
        host = os.uname().nodename if hosts is None else f'node{len(hosts.ranks) - 1}'
        problem = 'hangs' if hangs else _problem(
            case, host, process.returncode, output, took - more)
        has_fault = when.exists()
        if not problem and not has_fault:
            problem = 'no fault'
        roots = [] if _is_told_by_mpiexec(case) else [''] if hosts is None else hosts.roots
        if left := left_behind(folder, roots):
            problem = problem or f'left: {left}'
    return Result(problem, took, output), needs_a_limit and not hangs and not has_fault


def _needs_a_limit(case: Case) -> bool:
    """Whether only a time limit ends the case."""
    return case.way in program.HANGS or case[:2] == (
        'sys.exit(0) alone', 'before a communicator')


def _is_told_by_mpiexec(case: Case) -> bool:
    """Whether only mpiexec reports the fault; MPICH leaves its shared memory then."""
    return case.place == 'before a communicator' and not _needs_a_limit(case) and (
        case.way.startswith('SIG'))


def _problem(case: Case, host: str, status: int, output: str, took: float) -> str:
    """Return the problem of a case, or ''."""
    _, cause, stack = program.WAYS[case.way]
    rank = case.ranks - 1
    is_hang = _needs_a_limit(case)
    if case.place == 'before a communicator' and is_hang:
        rank, cause, stack = 0, 'in create_communicator', 'the state of the other ranks is unknown'
    elif _is_told_by_mpiexec(case):
        number = int(getattr(signal, case.way))
        report = rf'PID \d+ RUNNING AT {re.escape(host)}\n(.*\n)*.*signal {number}\b'
        return '' if status and re.search(report, output) else 'other message'
    elif case.place == 'in a data loader' and not is_hang:
        cause, stack = r'uncaught \w*Error', 'process'
    elif case.way == 'sys.exit(0) alone':
        is_hang = True
    elif case[:2] == ('exception in a thread', 'at exit') and "can't create new thread" in output:
        # Some versions of Python start no thread at exit.
        cause, stack = r'uncaught \w*Error in an atexit function', ''
    messages = re.findall(r'^chainermn: .*$', output, re.MULTILINE)
    if status == 0:
        return 'status 0'
    if is_hang:
        if case.place == 'in a data loader':
            cause = stack = ''
        # Another rank reports the state of each rank.
        cause = cause or '(is|are) (not in an operation|in )'
        if not any(rank in ranks_in(line) and re.search(cause, line)
                   for line in output.splitlines()):
            return 'other message'
    else:
        right = re.compile(rf'chainermn: rank {rank} of {case.ranks} \(host '
                           rf'{re.escape(host)}, process \d+\) '
                           rf'(aborts the job|failed|ended first on its host): ({cause})')
        is_common = case.place == 'in a checkpoint' and re.search(rf'rank {rank}\b', output)
        if not any(right.match(line) for line in messages) and not is_common:
            return 'other message'
        # All ranks raise a common error, which gives the rank. On several hosts, ranks that
        # mpiexec terminates print no stack.
        if is_common or ('killed by SIGTERM' in output and 'ended first' in output):
            stack = ''
    if len(messages) > 1:
        return f'{len(messages)} messages'
    if stack not in output:
        return 'no stack'
    if took > seconds(WITHIN):
        return f'{took:.1f} s'
    return ''


def ranks_in(line: str) -> set[int]:
    """The ranks in a line, such as 'ranks 0-2, 5'."""
    found: set[int] = set()
    for text in re.findall(r'ranks? (\d+(?:(?:-|, )\d+)*)', line):
        for part in text.split(', '):
            first, _, last = part.partition('-')
            found |= {*range(int(first), int(last or first) + 1)}
    return found


def left_behind(folder: str, roots: list[str]) -> str:
    """Process left by the job, and shared memory in these root folders, after a grace period."""
    give_up = time.monotonic() + seconds(WITHIN)
    while True:
        left = _processes(folder) + _shared_memory(folder, roots)
        if not left or time.monotonic() > give_up:
            return ', '.join(left)
        time.sleep(.05)


def _processes(folder: str) -> list[str]:
    """The processes that have the folder in their environment: ranks, node monitors and workers."""
    mark = f'FAULT_MATRIX={folder}'.encode()
    return [f'process {number}' for number in processes(
        lambda each: mark in (each / 'environ').read_bytes().split(b'\0'))]


def _shared_memory(folder: str, roots: list[str]) -> list[str]:
    """The remaining files of the ranks in /dev/shm, which they have recorded."""
    return [root + path for file in pathlib.Path(folder).glob('shared-*')
            for path in file.read_text().splitlines() for root in roots
            if os.path.exists(root + path)]


def table(results: dict[Case, Result]) -> str:
    """The table of results: one line per kind of place, one column per way."""
    rows = {place: [place] for place in (*program.FIRST, *program.PLACES)}
    rows |= {f'in an operation ({name})': list(program.OPERATIONS) for name in COMMUNICATORS}
    lines = ['| when the fault occurs | ' + ' | '.join(program.WAYS) + ' |',
             '|---' * (1 + len(program.WAYS)) + '|']
    for row, places in rows.items():
        name = row.partition('(')[2].rstrip(')') or 'flat'
        cells = [job_results.cell([
            result for case, result in results.items()
            if case.way == way and case.place in places and case.communicator == name])
            for way in program.WAYS]
        cells = [re.sub(r'^(\d+)/\1, (.*) s$', r'\2', cell) for cell in cells]  # all are correct
        lines.append(f'| {row} | ' + ' | '.join(cells) + ' |')
    ranks = ', '.join(map(str, sorted({case.ranks for case in results})))
    numbers, wrong = job_results.summary(results)
    lines += ['', f'{len(results)} jobs on {ranks} ranks: {numbers}; the longest took '
              f'{job_results.longest([*results.values()]):.1f} s.', *wrong]
    return '\n'.join(lines)


def with_rows(old: str, new: str, machine: str) -> str:
    """Return the text of the page, with the rows of another table that have results.

    Args:
        old: The table of the page, and what is written below it.
        new: The other table, and its numbers.
        machine: Where it was measured.
    """
    before, below = _rows(old)
    after, numbers = _rows(new)
    places = [place for place, row in [*after.items()][2:] if any(row.values())]
    before.update({place: after[place] for place in places})
    name = ', '.join(places)
    paragraphs = [each for each in below if not each.startswith(f'{name[0].upper()}{name[1:]}: ')]
    return '\n'.join(f'| {place} | {" | ".join(row.values())} |' if place else
                     '|---' * (1 + len(row)) + '|' for place, row in before.items()) + ''.join(
        f'\n\n{each}' for each in [
            *paragraphs, f'{name[0].upper()}{name[1:]}: {" ".join(numbers)} {machine}'])


def _rows(text: str) -> tuple[dict[str, dict[str, str]], list[str]]:
    """Return the cells of a table by place and way, and the paragraphs below it."""
    table, *below = text.strip().split('\n\n')
    head, *rows = ([cell.strip() for cell in line.strip('|').split('|')]
                   for line in table.splitlines())
    return {row[0].strip('-'): dict(zip(head[1:], row[1:], strict=True))
            for row in (head, *rows)}, below


def main() -> int:
    """Run the cases and print the table."""
    parser = job_results.parser_of(__doc__.splitlines()[0])
    parser.add_argument('--hosts', metavar='RANKS', help='ranks of each host, such as 2,1; '
                        'needs root. Then --ranks and --jobs have no effect')
    args = parser.parse_args()
    per_host = [int(n) for n in args.hosts.split(',')] if args.hosts else []
    if per_host:
        args.ranks, args.jobs = str(sum(per_host)), 1
    with Hosts(per_host) if per_host else contextlib.nullcontext() as hosts:
        results = job_results.run_all(args, cases(tuple(map(int, args.ranks.split(',')))), Case,
                                      functools.partial(run, hosts=hosts))
    text = table(results)
    if args.docs and args.only:
        old = args.docs.read_text().partition(BEGIN)[2].partition(job_results.END)[0]
        text = with_rows(old, text, job_results.machine())
    return job_results.show(args, results, text, BEGIN, adds_machine=not args.only)


if __name__ == '__main__':
    sys.exit(main())
