"""``chainermn top`` draws in terminals of all sizes, and restores them at exit."""

import fcntl
import io
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios

import pytest

from chainermn._commands.top import display
from chainermn._commands.top.table import TableRow
from chainermn._timeline.activities import NAMES

pytestmark = pytest.mark.mpi_skip

#: Shows tables of some ranks in the terminal forever; the second argument hides a module.
PROGRAM = '''
import argparse, fcntl, signal, sys, termios, time
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # the terminal from which Ctrl-C comes
signal.signal(signal.SIGINT, signal.default_int_handler)  # tests may run in the background
sys.modules[sys.argv[2]] = None
from chainermn._commands import top
from chainermn._commands.top.table import TableRow
from chainermn._timeline.activities import NAMES

def tables(job, count):
    while not count:
        yield [TableRow(rank, 'vm', 1, 4711, 28.81, dict.fromkeys(NAMES, .125), 1.25, 2**27, 0,
                        is_silent=False, is_straggler=rank == 30)
               for rank in range(int(sys.argv[1]))]
        time.sleep(.05)

top.jobs.find = lambda target: top.RunningJob('train.py', [])
top._tables = tables
parser = argparse.ArgumentParser()
top.add_arguments(parser)
sys.exit(top.main(parser, parser.parse_args([])))
'''


def plain(text):
    return re.sub(r'\x1b\[[0-9;]*m', '', text)


def drawn(ranks, width, height, *, hidden='none', term='xterm', is_terminated=False):
    """Return what the program draws in a terminal until Ctrl-C or SIGTERM, after 3 tables."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack('HHHH', height, width, 0, 0))
    before, text, is_ended = termios.tcgetattr(theirs), b'', False
    env = {name: value for name, value in os.environ.items() if name not in ('COLUMNS', 'LINES')}
    with subprocess.Popen([sys.executable, '-c', PROGRAM, str(ranks), hidden], stdin=theirs,
                          stdout=theirs, stderr=theirs, start_new_session=True,
                          env={**env, 'TERM': term}) as process:
        while process.poll() is None or select.select([ours], [], [], 0)[0]:
            if select.select([ours], [], [], .1)[0]:
                text += os.read(ours, 1 << 16)
            if not is_ended and text.count(b'train.py: ') > 3:
                is_ended = True
                process.terminate() if is_terminated else os.write(ours, b'\x03')
        assert process.returncode == (143 if is_terminated else 0), text
    assert termios.tcgetattr(theirs) == before
    os.close(ours)
    os.close(theirs)
    return text.decode().replace('^C', '').replace('\r\n', '\n')


@pytest.mark.parametrize('width, height, is_terminated', [
    pytest.param(140, 50, False, marks=pytest.mark.slow), (70, 12, False),
    pytest.param(20, 4, True, marks=pytest.mark.slow)])
def test_with_rich(width, height, is_terminated):
    text = drawn(40, width, height, is_terminated=is_terminated)
    start, screens, rest = re.fullmatch(
        r'(?s)(.*?)\x1b\[\?1049h(.*)\x1b\[\?1049l(.*)', text).groups()
    assert not start and '\x1b[?25l' in screens  # the cursor is hidden
    assert '\x1b[?25l' not in text.rpartition('\x1b[?25h')[2]
    frames = screens.split('\x1b[H')[2:]
    assert len(frames) >= 3
    for frame in frames[:3]:
        lines = plain(frame).split('\n')
        assert len(lines) == height and max(map(len, lines)) <= width, frame
        assert lines[0].startswith('train.py: 40 ranks')
    # The last table remains, with all ranks.
    remaining = plain(re.sub(r'\x1b\[\?\d+[hl]', '', rest)).splitlines()
    assert len([line for line in remaining if re.match(' *[0-9]', line)]) >= 40
    assert '  rank 30: straggler' in remaining


@pytest.mark.slow
@pytest.mark.parametrize('hidden, term', [
    ('rich.console', 'xterm'), ('none', 'dumb')])
def test_lines_of_text_without_rich_and_in_a_dumb_terminal(hidden, term):
    text = drawn(2, 140, 20, hidden=hidden, term=term)
    assert '\x1b' not in text
    head, columns, first, second, *_ = text.splitlines()
    assert head == 'train.py: 2 ranks on 1 host, 28.81 updates per second'
    assert columns.split() == ['rank', 'host', 'updates', 'per', 's', *NAMES, 'CPU', 'RSS', 'GPU',
                               'VRAM', 'state']
    for rank, line in enumerate((first, second)):
        assert line.split() == [str(rank), 'vm', '4711', '28.81', *['12%'] * 7, '125%', '0.12',
                                'GiB', '-', '-']
    assert text.count(head) >= 3


def rows(n, **special):
    return [TableRow(rank, 'vm', 1, 4711, 28.81, dict.fromkeys(NAMES, .125), 1.25, 2**27, 0,
                     is_silent=False, **special) if rank else TableRow(rank) for rank in range(n)]


def rendered(width, height, rows):
    from rich.console import Console
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=True)
    console.print(display.view('[b]x.py', rows))
    return console.file.getvalue()


def test_a_narrow_terminal_shortens_names_but_no_numbers():
    text = plain(rendered(80, 24, rows(3)))
    head, silent, columns, _, numbers, *_ = text.splitlines()
    assert head == '[b]x.py: 3 ranks on 1 host, 28.81 updates per second, 1 rank not responding'
    assert silent == '  rank 0: does not respond'
    assert '…' in columns and columns.endswith('VRAM')
    assert numbers.split() == ['1', 'vm', '4711', '28.81', *['12%'] * 7, '125%', '0.12', 'GiB',
                                '-', '-']


def test_use_of_a_gpu():
    row = rows(2, gpu_utilization=.87, gpu_used_bytes=2**30, gpu_total_bytes=2**33)[1]
    assert display.lines('x.py', [row])[-1].split()[-4:] == ['GiB', '87%', '1.00', 'GiB']
    pool = rows(2)[1]._replace(gpu_bytes=2**29)
    assert display.lines('x.py', [pool])[-1].split()[-3:] == ['-', '0.50', 'GiB']


def test_states_are_above_the_table_and_in_color():
    waiting = {'is_waiting': True, 'state': 'in recv_obj', 'state_seconds': 3}
    text = rendered(140, 24, rows(64, **waiting))
    assert plain(text).splitlines()[1:3] == [
        '  rank 0: does not respond', '  ranks 1-63: in recv_obj (for 3 s)']
    assert text.count('\x1b[33m') >= 63 and text.count('\x1b[31m') >= 1
