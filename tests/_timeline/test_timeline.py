"""chainermn timeline: correct summaries of complete and truncated files."""

import json
import stat
import struct
import sys

import pytest

from chainermn.__main__ import main
from chainermn._timeline import summary, trace_files

pytestmark = pytest.mark.mpi_skip

GROUP = '1 ranks 0-1'


def span(name, begin, end, category='', row=0, **details):
    """An event; times are in milliseconds."""
    return {'ph': 'X', 'pid': 0, 'tid': row, 'ts': begin * 1e3, 'dur': (end - begin) * 1e3,
            'name': name, 'cat': category, 'args': details}


def operation(name, number, begin, end, **details):
    return span(name, begin, end, 'operation', comm='ranks 0-1', number=number, **details)


def clock(at, offset, group=GROUP, error=2.):
    return {'ph': 'i', 's': 'p', 'pid': 0, 'tid': 0, 'name': 'clock', 'cat': 'clock',
            'ts': at * 1e3, 'args': {'group': group, 'offset_us': offset * 1e3, 'error_us': error}}


def write(folder, rank, events, size=2, end='{"ph":"M","name":"end","args":{}}\n]\n'):
    about = {'ph': 'M', 'pid': rank, 'tid': 0, 'name': 'process_name', 'args': {
        'name': f'rank {rank} (host, process 7)', 'rank': rank, 'size': size}}
    threads = [{'ph': 'M', 'pid': rank, 'tid': n, 'name': 'thread_name', 'args': {'name': name}}
               for n, name in enumerate(['main thread', 'chainermn mean queue'])]
    path = folder / f'out.{rank}.json'
    path.write_text('[\n' + ''.join(json.dumps(event) + ',\n' for event in [
        about, *threads, *events]) + end)
    return path


@pytest.fixture
def files(tmp_path):
    """Two ranks; the clock of the second one is 1 s late. It computes 10 ms longer, 3 times."""
    ranks: list = [[clock(0, 0)], [clock(0, 1000)]]
    for n in range(3):
        at = 100 * n
        for rank, late in (0, 0), (1, 10):
            ranks[rank] += [
                span('forward', at + 10 - 1000 * rank, at + 20 + late - 1000 * rank),
                span('exchange', at + 20 + late - 1000 * rank, at + 40 - 1000 * rank),
                operation('multi_node_mean_grad', n, at + 20 + late - 1000 * rank,
                     at + 40 - 1000 * rank, bytes=10**6),
                span('wait', at + 20 + late - 1000 * rank, at + 30 - 1000 * rank, 'wait'),
                span('update', at + 40 - 1000 * rank, at + 45 - 1000 * rank)]
    return [write(tmp_path, rank, events) for rank, events in enumerate(ranks)]


def test_clocks_are_aligned(files):
    run = trace_files.read(files)
    assert run.notes == [] and run.error == pytest.approx(2e-6)
    assert run.seconds == pytest.approx(.235)
    for rank in run.ranks:
        assert [event.begin for event in rank.events if event.name == 'update'] == pytest.approx(
            [.03, .13, .23])


def test_clock_drift(tmp_path):
    """The clock of rank 1 loses 10 ms in 1 s."""
    files = [write(tmp_path, 0, [clock(0, 0), span('x', 500, 600), clock(1000, 0)]),
             write(tmp_path, 1, [clock(0, 0), span('x', 495, 594), clock(990, 10)])]
    for rank in trace_files.read(files).ranks:
        assert rank.events[0].begin == pytest.approx(0, abs=1e-9)
        assert rank.events[0].seconds == pytest.approx(.1)


def test_shares(files):
    run = trace_files.read(files)
    first, second = map(summary.shares, run.ranks)
    assert first.spans == pytest.approx({'forward': .03, 'exchange': 0, 'update': .015})
    assert second.spans == pytest.approx({'forward': .06, 'exchange': 0, 'update': .015})
    assert (first.waiting, first.communicating) == pytest.approx((.03, .03))
    assert (second.waiting, second.communicating) == pytest.approx((0, .03))
    assert first.background == second.background == 0


def test_stragglers(files):
    worst, other = summary.stragglers(trace_files.read(files))
    assert worst == summary.Straggler(1, pytest.approx(.03), 3, 3)
    assert other == summary.Straggler(0, 0, 0, 3)


def test_operations(files):
    only, = summary.operations(trace_files.read(files))
    assert only == summary.OperationStatistics(
        'multi_node_mean_grad', 3, pytest.approx(.015), pytest.approx(.005), 1e6,
        pytest.approx(1e8))


def test_waiting_for_data(tmp_path):
    """Advice if it takes more than a twentieth of the time; also for a single rank."""
    for waited in (4, 30):
        path = write(tmp_path, 0, [span('wait for data', 0, waited), span('forward', waited, 100)],
                     size=1)
        text = summary.text(trace_files.read([path]))
        assert ('Rank 0 waited 30% of the time for data: reading takes' in text) == (waited == 30)


def test_the_exchange_in_the_background(tmp_path):
    path = write(tmp_path, 0, [span('backward', 0, 50), span('wait', 0, 10, 'wait', 1),
                               span('means', 10, 40, 'operation', 1, bytes=3000),
                               span('wait for means', 50, 55, 'operation')], size=1)
    run = trace_files.read([path])
    shares = summary.shares(run.ranks[0])
    assert shares.background == pytest.approx(.03)
    assert (shares.communicating, shares.waiting) == pytest.approx((.005, 0))
    found = {one.name: one for one in summary.operations(run)}
    assert found['means'].waiting == 0 and found['wait for means'].waiting == 0
    assert '  background  ' in summary.text(run)


def test_messages_are_waiting(tmp_path):
    path = write(tmp_path, 0, [operation('recv', 1, 0, 10, peer=1),
                               operation('send', 2, 10, 30, peer=1)], size=1)
    shares = summary.shares(trace_files.read([path]).ranks[0])
    assert (shares.waiting, shares.communicating) == pytest.approx((.01, .02))


def test_summary(files, capsys):
    assert main(['timeline', *map(str, files)]) == 0
    out = capsys.readouterr().out
    assert out.startswith(
        '2 ranks, 0.23 s; maximum clock error 2 us; 3 updates, 78.33 ms per update\n')
    assert 'The other ranks waited for rank 1, 0.03 s each: it arrived last in 3 of 3 ' in out
    assert 'It spent 0.03 s more than the others in forward' in out
    assert 'Note' not in out


def test_no_straggler(tmp_path, capsys):
    events = [clock(0, 0), operation('barrier', 1, 0, 100), span('wait', 0, 50, 'wait')]
    files = [write(tmp_path, rank, events) for rank in range(2)]
    assert main(['timeline', *map(str, files)]) == 0
    out = capsys.readouterr().out
    assert '50% of the time was communication, 50% waiting' in out
    assert 'No rank delays the others by more than 1% of the time.' in out


@pytest.mark.parametrize('cut', [1, 2, 30, 60])
def test_truncated_file(files, cut):
    """A rank that is killed while it writes leaves an incomplete last line."""
    text = files[1].read_text().removesuffix('{"ph":"M","name":"end","args":{}}\n]\n')
    files[1].write_text(text[:-cut])
    run = trace_files.read(files)
    assert len(run.ranks[1].events) in (14, 15)
    assert not run.ranks[1].is_complete and run.ranks[0].is_complete
    assert any('rank 1 failed, was killed' in note for note in run.notes)


def test_files_of_different_runs(files, tmp_path):
    files += [write(tmp_path, 2, [clock(0, 0, '0 ranks 0-3'), span('x', 0, 1)], size=4)]
    run = trace_files.read([files[1], files[2], files[0]])
    assert [rank.rank for rank in run.ranks] == [0, 1]
    assert len(run.notes) == 1 and 'out.2.json skipped: it is from a different run' in run.notes[0]
    run = trace_files.read(files[1:2])
    assert run.notes == ['missing timeline of rank 0']


def test_merged_file(files, tmp_path, capsys):
    merged = tmp_path / 'out.merged.json'
    assert main(['timeline', *map(str, files), '-o', str(merged)]) == 0
    events = json.loads(merged.read_text())
    assert {event['pid'] for event in events} == {0, 1}
    first = {rank: min(event['ts'] for event in events if event['ph'] == 'X' and
                       event['pid'] == rank) for rank in range(2)}
    assert first == {0: 0, 1: 0}
    assert stat.S_IMODE(merged.stat().st_mode) == 0o600
    # out.*.json also matches the merged file.
    capsys.readouterr()
    assert main(['timeline', *map(str, files), str(merged)]) == 0
    assert 'Note: ' in (out := capsys.readouterr().out) and 'contains several ranks' in out


def test_plot(files, tmp_path, capsys):
    png = tmp_path / 'out.png'
    for more in [], ['--between', '0.01', '0.05']:
        png.unlink(missing_ok=True)
        assert main(['timeline', *map(str, files), '--png', str(png), *more]) == 0
        data = png.read_bytes()
        assert data[:8] == b'\x89PNG\r\n\x1a\n'
        width, height = struct.unpack('>II', data[16:24])
        assert width > 900 and height > 200


@pytest.mark.parametrize('text', [
    '', 'hello', '{}', '[1]', '[\n1,\n2\n]', '[\n{"ph": "X"},\n]', '[\n' * 3000,
    '[\n{"ph":"M","name":"process_name","args":{"rank":"0","size":1}}\n]',
    '[\n{"ph":"X","name":"x","ts":"no","dur":1,"tid":0,"cat":"","args":{}},\n]'])
def test_not_a_timeline(text, tmp_path, usage_error):
    path = tmp_path / 'x.json'
    path.write_text(text)
    assert f'{path} is not a ChainerMN timeline' in usage_error('timeline', path)


def test_wrong_arguments(files, tmp_path, usage_error):
    assert 'No such file' in usage_error('timeline', tmp_path / 'missing.*.json')
    assert f'Is a directory. Pass its files: {tmp_path}/*.json' in usage_error('timeline', tmp_path)
    assert 'would overwrite' in usage_error('timeline', *files, '-o', files[0])
    assert 'takes a start and an end' in usage_error('timeline', *files, '--between', 2, 1)
    assert 'nothing was recorded after ' in usage_error(
        'timeline', *files, '--png', tmp_path / 'x.png', '--between', 5000, 6000)
    for option in '-o', '--png':
        path = tmp_path / 'none' / 'x'
        assert f'argument {option}: cannot write {path}: No such file' in usage_error(
            'timeline', *files, option, path)


def test_without_matplotlib_the_report_is_printed(files, tmp_path, capsys, monkeypatch):
    assert main(['timeline', *map(str, files)]) == 0
    report = capsys.readouterr().out
    monkeypatch.setattr('importlib.util.find_spec', lambda name: None)
    png, merged = tmp_path / 'x.png', tmp_path / 'merged.json'
    args = [*map(str, files), '--png', str(png), '-o', str(merged)]
    assert main(['timeline', *args]) == 1
    out, err = capsys.readouterr()
    assert out.startswith(report) and merged.exists()
    assert err == (f'chainermn timeline: {png} was not written, because --png requires matplotlib: '
                   f'{sys.executable} -m pip install matplotlib\n')
    assert not png.exists()


def test_names_cannot_manipulate_the_terminal(tmp_path, capsys):
    path = write(tmp_path, 0, [span('\x1b[2J', 0, 10), operation('\x1b[2J', 1, 20, 30)], size=1)
    assert main(['timeline', str(path)]) == 0
    assert '\x1b' not in capsys.readouterr().out
