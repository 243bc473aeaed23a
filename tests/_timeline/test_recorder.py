"""The file of a rank: its contents, its permissions, and its state when the rank ends."""

import json
import os
import stat
import subprocess
import sys
import threading

import numpy as np
import pytest
from jobs import run_job
from mpi4py import MPI

import chainermn
from chainermn.__main__ import main
from chainermn._timeline import activities, recorder
from chainermn._timeline.recorder import Timeline, path_of

alone = pytest.mark.mpi_skip


def events(path):
    return json.loads(path.read_text())


@pytest.mark.parametrize('name, path', [
    ('out.json', 'out.3.json'), ('/a/b.c/out', '/a/b.c/out.3.json'), ('x.trace', 'x.3.trace')])
def test_names_of_files(name, path):
    assert str(path_of(name, 3)) == path


def test_what_is_in_a_file(tmp_path):
    path = tmp_path / 'out.0.json'
    timeline = Timeline(path, 2, 5)
    begin = recorder.now()
    timeline.add('a "name"', '', begin, begin + 1500, '"n":1')
    thread = threading.Thread(target=timeline.add, args=('b', 'operation', begin, begin),
                              name='another one')
    thread.start()
    thread.join()
    timeline.close()
    said = events(path)
    assert {event['pid'] for event in said} == {2}
    named = {event['name']: event['args'] for event in said if event['ph'] == 'M'}
    assert named['process_name']['rank'] == 2 and named['process_name']['size'] == 5
    assert [event['args']['name'] for event in said if event['name'] == 'thread_name'] == [
        'main thread', 'another one']
    first, second = (event for event in said if event['ph'] == 'X')
    assert (first['name'], first['dur'], first['args'], first['tid']) == (
        'a "name"', 1.5, {'n': 1}, 0)
    assert first['ts'] == pytest.approx((begin - timeline.origin) / 1000)
    assert (second['name'], second['cat'], second['dur'], second['tid']) == ('b', 'operation', 0, 1)


def test_only_the_user_can_read_it(tmp_path):
    path = tmp_path / 'out.0.json'
    path.write_text('something of yesterday that everybody could read')
    path.chmod(0o666)
    Timeline(path, 0, 1).close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert 'yesterday' not in path.read_text()


def test_it_does_not_write_through_a_link(tmp_path):
    target = tmp_path / 'target'
    target.write_text('kept')
    (tmp_path / 'out.0.json').symlink_to(target)
    Timeline(tmp_path / 'out.0.json', 0, 1).close()
    assert target.read_text() == 'kept'


FIRST = '''
import chainermn
comm = chainermn.create_communicator('naive')
comm.barrier()
print('ready', flush=True)
input()
comm.barrier()
'''


@alone
def test_two_jobs_do_not_share_a_file(tmp_path):
    """All ranks of the second job raise an error, and the first job's file stays complete."""
    variable = {recorder.VARIABLE: 'out.json'}
    with subprocess.Popen([sys.executable, '-c', FIRST], cwd=tmp_path, text=True,
                          stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          env={**os.environ, **variable}) as first:
        first.stdout.readline()
        second = run_job(tmp_path, SECOND, **variable)
        first.communicate('\n')
    for rank in range(2):
        assert (f'{rank} CHAINERMN_TIMELINE: rank 0 cannot write its timeline: another job is '
                'writing out.0.json. Use a different path for each job') in second.stdout
    assert [event['name'] for event in events(tmp_path / 'out.0.json')].count('barrier') == 2
    assert run_job(tmp_path, SECOND, **variable).stdout == ''


SECOND = '''
import chainermn
from mpi4py import MPI
try:
    chainermn.create_communicator('naive')
except OSError as error:
    print(MPI.COMM_WORLD.rank, error, flush=True)
'''


def test_a_full_disk_ends_the_timeline_and_not_the_program(tmp_path, capfd):
    timeline = Timeline(tmp_path / 'out.0.json', 0, 1)
    full = os.open('/dev/full', os.O_WRONLY)
    os.dup2(full, timeline._file)
    os.close(full)
    for _ in range(2):
        timeline.add('x', '', 0, 1)
        timeline.write()
    timeline.close()
    err = capfd.readouterr().err
    assert err == ('chainermn: the timeline of rank 0 ends here: cannot write '
                   f'{tmp_path}/out.0.json: No space left on device\n')


def test_without_the_variable_nothing_is_done(tmp_path, monkeypatch):
    monkeypatch.delenv(recorder.VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    comm = chainermn.create_communicator('naive')
    assert 'allreduce' not in vars(comm) and type(comm._context.check.mpi_comm) is MPI.Intracomm
    assert comm.span('forward') is recorder.span('anything') is activities.NO_SPAN
    with comm.span('forward'):
        comm.allreduce(np.ones(3))
    comm.finalize()
    assert list(tmp_path.iterdir()) == []


KILLED = """
import os, signal, sys, time
import numpy as np, chainermn

comm = chainermn.create_communicator('naive')
for step in range(5):
    with comm.span('compute'):
        comm.allreduce(np.ones(1000, 'f'))
time.sleep(.1)
comm.allreduce(np.ones(1000, 'f'))  # what comes late enough is written at once
if comm.rank == 1:
    {end}
comm.barrier()
"""


@alone
@pytest.mark.parametrize('end', [
    'os.kill(os.getpid(), signal.SIGKILL)',
    pytest.param('raise ValueError', marks=pytest.mark.slow)])
def test_a_run_that_fails_leaves_files_that_can_be_read(tmp_path, capsys, end):
    done = run_job(tmp_path, KILLED.format(end=end), **{recorder.VARIABLE: 'out.json'})
    assert done.returncode != 0, done.stdout
    for rank in range(2):
        text = (tmp_path / f'out.{rank}.json').read_text()
        # As its readers do with an array that has no end.
        said = json.loads(text.rstrip().removesuffix(',') + ']')
        names = [event['name'] for event in said if event['ph'] == 'X']
        assert names.count('allreduce') == 6 and names.count('compute') == 5
    assert main(['timeline', *(f'{tmp_path}/out.{rank}.json' for rank in range(2))]) == 0
    assert 'out.1.json is truncated: rank 1 failed, was killed' in capsys.readouterr().out
