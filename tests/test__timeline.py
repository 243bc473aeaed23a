"""python -m chainermn timeline: what it says is what the files say, whole or not."""

import json
import stat
import struct

import pytest
from mpi4py import MPI

from chainermn.__main__ import main
from chainermn._timeline import _read, _summary

pytestmark = pytest.mark.skipif(MPI.COMM_WORLD.size > 1, reason='reads files in one process')

GROUP = '1 ranks 0-1'


def span(name, begin, end, category='', row=0, **details):
    """An event; times are in milliseconds."""
    return {'ph': 'X', 'pid': 0, 'tid': row, 'ts': begin * 1e3, 'dur': (end - begin) * 1e3,
            'name': name, 'cat': category, 'args': details}


def verb(name, number, begin, end, **details):
    return span(name, begin, end, 'verb', comm='ranks 0-1', number=number, **details)


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
                verb('multi_node_mean_grad', n, at + 20 + late - 1000 * rank,
                     at + 40 - 1000 * rank, bytes=10**6),
                span('wait', at + 20 + late - 1000 * rank, at + 30 - 1000 * rank, 'wait'),
                span('update', at + 40 - 1000 * rank, at + 45 - 1000 * rank)]
    return [write(tmp_path, rank, events) for rank, events in enumerate(ranks)]


def test_all_ranks_are_on_one_clock(files):
    run = _read.read(files)
    assert run.notes == [] and run.error == pytest.approx(2e-6)
    assert run.seconds == pytest.approx(.235)
    for rank in run.ranks:
        assert [event.begin for event in rank.events if event.name == 'update'] == pytest.approx(
            [.03, .13, .23])


def test_clocks_drift_evenly(tmp_path):
    """The clock of rank 1 loses 10 ms in 1 s."""
    files = [write(tmp_path, 0, [clock(0, 0), span('x', 500, 600), clock(1000, 0)]),
             write(tmp_path, 1, [clock(0, 0), span('x', 495, 594), clock(990, 10)])]
    for rank in _read.read(files).ranks:
        assert rank.events[0].begin == pytest.approx(0, abs=1e-9)
        assert rank.events[0].seconds == pytest.approx(.1)


def test_where_the_time_went(files):
    run = _read.read(files)
    first, second = map(_summary.shares, run.ranks)
    assert first.spans == pytest.approx({'forward': .03, 'exchange': 0, 'update': .015})
    assert second.spans == pytest.approx({'forward': .06, 'exchange': 0, 'update': .015})
    assert (first.waiting, first.working) == pytest.approx((.03, .03))
    assert (second.waiting, second.working) == pytest.approx((0, .03))
    assert first.background == second.background == 0


def test_for_whom_the_others_waited(files):
    worst, other = _summary.stragglers(_read.read(files))
    assert worst == _summary.Straggler(1, pytest.approx(.03), 3, 3)
    assert other == _summary.Straggler(0, 0, 0, 3)


def test_verbs(files):
    only, = _summary.verbs(_read.read(files))
    assert only == _summary.Verb(
        'multi_node_mean_grad', 3, pytest.approx(.015), pytest.approx(.005), 1e6,
        pytest.approx(1e8))


def test_the_exchange_in_the_background(tmp_path):
    path = write(tmp_path, 0, [span('backward', 0, 50), span('wait', 0, 10, 'wait', 1),
                               span('means', 10, 40, 'verb', 1, bytes=3000),
                               span('wait for means', 50, 55, 'verb')], size=1)
    run = _read.read([path])
    shares = _summary.shares(run.ranks[0])
    assert (shares.background, shares.working, shares.waiting) == pytest.approx((.03, .005, 0))
    verbs = {verb.name: verb for verb in _summary.verbs(run)}
    assert verbs['means'].waiting == 0 and verbs['wait for means'].waiting == 0
    assert 'in background' in _summary.text(run)


def test_messages_are_waiting(tmp_path):
    path = write(tmp_path, 0, [verb('recv', 1, 0, 10, peer=1), verb('send', 2, 10, 30, peer=1)],
                 size=1)
    shares = _summary.shares(_read.read([path]).ranks[0])
    assert (shares.waiting, shares.working) == pytest.approx((.01, .02))


def test_the_summary_says_what_to_look_at(files, capsys):
    assert main(['timeline', *map(str, files)]) == 0
    out = capsys.readouterr().out
    assert out.startswith(
        '2 ranks, 0.23 s; the clocks agree within 2 us; 3 updates, one in 78.33 ms\n')
    assert 'The others waited for rank 1, for 0.03 s each: it came last in 3 of 3 ' in out
    assert 'It spent 0.03 s more than the others in forward' in out
    assert 'Note' not in out


def test_nobody_is_late(tmp_path, capsys):
    events = [clock(0, 0), verb('barrier', 1, 0, 100), span('wait', 0, 50, 'wait')]
    files = [write(tmp_path, rank, events) for rank in range(2)]
    assert main(['timeline', *map(str, files)]) == 0
    out = capsys.readouterr().out
    assert 'Of the time 50% went into verbs and 50% into waiting' in out
    assert 'No rank keeps the others waiting for 1% of the time.' in out


@pytest.mark.parametrize('cut', [1, 2, 30, 60])
def test_a_file_that_was_cut(files, cut):
    """As when a rank is killed while it writes: the last line is not whole, and there is no end."""
    text = files[1].read_text().removesuffix('{"ph":"M","name":"end","args":{}}\n]\n')
    files[1].write_text(text[:-cut])
    run = _read.read(files)
    assert len(run.ranks[1].events) in (14, 15)
    assert not run.ranks[1].is_whole and run.ranks[0].is_whole
    assert any('rank 1 failed or was killed' in note for note in run.notes)


def test_ranks_and_runs_that_do_not_belong_together(files, tmp_path):
    files += [write(tmp_path, 2, [clock(0, 0, '0 ranks 0-3'), span('x', 0, 1)], size=4)]
    run = _read.read([files[1], files[2], files[0]])
    assert [rank.rank for rank in run.ranks] == [0, 1]
    assert len(run.notes) == 1 and 'out.2.json is of another run' in run.notes[0]
    run = _read.read(files[1:2])
    assert run.notes == ['there is no timeline of rank 0']


def test_the_merged_file(files, tmp_path, capsys):
    merged = tmp_path / 'out.merged.json'
    assert main(['timeline', *map(str, files), '-o', str(merged)]) == 0
    events = json.loads(merged.read_text())
    assert {event['pid'] for event in events} == {0, 1}
    first = {rank: min(event['ts'] for event in events if event['ph'] == 'X' and
                       event['pid'] == rank) for rank in range(2)}
    assert first == {0: 0, 1: 0}
    assert stat.S_IMODE(merged.stat().st_mode) == 0o600
    # It is found by out.*.json the next time.
    capsys.readouterr()
    assert main(['timeline', *map(str, files), str(merged)]) == 0
    assert 'Note: ' in (out := capsys.readouterr().out) and 'has several ranks already' in out


def test_the_picture(files, tmp_path, capsys):
    png = tmp_path / 'out.png'
    for more in [], ['--between', '0.01', '0.05']:
        png.unlink(missing_ok=True)
        assert main(['timeline', *map(str, files), '--png', str(png), *more]) == 0
        data = png.read_bytes()
        assert data[:8] == b'\x89PNG\r\n\x1a\n'
        width, height = struct.unpack('>II', data[16:24])
        assert width > 900 and height > 200


def refused(args, capsys):
    with pytest.raises(SystemExit) as end:
        main(['timeline', *map(str, args)])
    assert end.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize('text', [
    '', 'hello', '{}', '[1]', '[\n1,\n2\n]', '[\n{"ph": "X"},\n]', '[\n' * 3000,
    '[\n{"ph":"M","name":"process_name","args":{"rank":"0","size":1}}\n]',
    '[\n{"ph":"X","name":"x","ts":"no","dur":1,"tid":0,"cat":"","args":{}},\n]'])
def test_what_is_no_timeline(text, tmp_path, capsys):
    path = tmp_path / 'x.json'
    path.write_text(text)
    assert f'{path} is no timeline of ChainerMN' in refused([path], capsys)


def test_what_cannot_be_done(files, tmp_path, capsys, monkeypatch):
    assert 'No such file' in refused([tmp_path / 'missing.*.json'], capsys)
    assert 'would overwrite' in refused([*files, '-o', files[0]], capsys)
    assert 'the earlier one first' in refused([*files, '--between', 2, 1], capsys)
    monkeypatch.setattr('importlib.util.find_spec', lambda name: None)
    err = refused([*files, '--png', tmp_path / 'x.png'], capsys)
    assert 'needs matplotlib: pip install matplotlib' in err and not (tmp_path / 'x.png').exists()


def test_names_cannot_steer_the_terminal(tmp_path, capsys):
    path = write(tmp_path, 0, [span('\x1b[2J', 0, 10), verb('\x1b[2J', 1, 20, 30)], size=1)
    assert main(['timeline', str(path)]) == 0
    assert '\x1b' not in capsys.readouterr().out
