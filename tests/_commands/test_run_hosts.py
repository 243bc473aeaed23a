"""chainermn run --hosts-file: a job restarts on the reachable hosts, and later on all.

The hosts are this machine. mpiexec starts ranks on a host with a script in place of ssh, which
fails unless there is a file HOST.up.
"""

import contextlib
import pathlib
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import textwrap
import threading

import pytest
from mpi4py import MPI
from time_limits import seconds

from chainermn._commands.run import hosts, job_links, pool
from chainermn._process import host_connection, mpiexec

pytestmark = [pytest.mark.mpi_skip, pytest.mark.limit(180)]

if MPI.Get_library_version().startswith('Open MPI'):
    pytestmark.append(pytest.mark.skip(reason='options of MPICH'))

SSH = '''\
#!/bin/bash
while [[ $1 == -* ]]; do shift; done
host=$1; shift
if [[ ! -e $host.up ]]; then
    echo "ssh: connect to host $host port 22: No route to host" >&2
    exit 255
fi
export HOST_NAME=$host
exec sh -c "$*"
'''
LAUNCHER = '-localhost localhost -launcher ssh -launcher-exec ./ssh'

#: Prints the hosts of the ranks, and defines the number of this attempt.
START = '''
    import os, pathlib, signal, sys, time, chainermn
    comm = chainermn.create_communicator('naive')
    names = comm.gather_obj(os.environ['HOST_NAME'])
    path = pathlib.Path('attempts')
    if comm.rank == 0:
        path.write_text('x' * (len(path.read_text()) + 1 if path.exists() else 1))
        print(*names, 'of', os.environ['CHAINERMN_RUN_RANKS'], flush=True)
    comm.barrier()
    attempt = len(path.read_text())
    b = pathlib.Path('b.up')
    '''


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory, with the launcher; its temporary folder must be empty at the end."""
    temporary = tmp_path / 'temporary'
    temporary.mkdir()
    monkeypatch.setenv('TMPDIR', str(temporary))
    monkeypatch.chdir(tmp_path)
    pathlib.Path('ssh').write_text(SSH)
    pathlib.Path('ssh').chmod(0o755)
    pathlib.Path('hosts').write_text('a:2\nb slots=2\n')
    yield tmp_path
    assert list(temporary.iterdir()) == []


def write(code):
    pathlib.Path('script.py').write_text(textwrap.dedent(START) + textwrap.dedent(code))


def up(*names):
    for name in names:
        pathlib.Path(f'{name}.up').touch()


def command(*options, n=4):
    return [sys.executable, '-m', 'chainermn', 'run', '-n', str(n), '--hosts-file', 'hosts',
            '--mpiexec-args', LAUNCHER, *options, 'script.py']


def run(*options, n=4):
    return subprocess.run(command(*options, n=n), text=True, capture_output=True,
                          timeout=seconds(120))


def said(err):
    """Messages of the command, without durations."""
    return [re.sub(r'\d+:\d\d:\d\d', 'T', line)
            for line in re.findall(r'^chainermn run: (.*)', err, re.M)]


def rows(err):
    """Words of the lines of the table, without times."""
    *_, lines = err.rpartition('chainermn run: ')
    return [re.sub(r'\d{4}-\d\d-\d\d \d\d:\d\d:\d\d +\d+:\d\d:\d\d ', '', line).split()
            for line in lines.splitlines()[1:]]


@pytest.mark.slow
def test_lost_rank_lost_host_and_return(folder):
    write('''
        if attempt == 1 and comm.rank == 3:  # its host still answers
            os.kill(os.getpid(), signal.SIGKILL)
        if attempt == 2 and comm.rank == 3:
            b.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        comm.barrier()
        if attempt == 3:
            b.touch()
            time.sleep(1000)
        ''')
    up('a', 'b')
    done = run('--min-ranks', '2', '--max-restarts', '2', '--startup', '0', '--grow-after', '0')
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.endswith(' of 4')]
    assert lines == ['a a b b of 4', 'a a b b of 4', 'a a of 4', 'a a b b of 4']
    status = re.findall(r'job failed after \S+ \((exit status \d+)\); restarting', done.stderr)
    assert said(done.stderr) == [
        f'job failed after T ({status[0]}); restarting',
        f'job failed after T ({status[1]}); restarting',
        'starting 2 of 4 ranks: b is unreachable (ssh: connect to host b port 22: No route to '
        'host)',
        'job ended after T (more hosts: b:2); restarting',
        'job succeeded after 3 restarts']
    table = rows(done.stderr)
    assert table[0] == ['attempt', 'started', 'duration', 'ranks', 'result']
    assert [row for row in table[1:] if row[0] != 'rank'] == [
        ['1', '4', *status[0].split()], ['on', 'a:2,', 'b:2'],
        ['2', '4', *status[1].split()], ['on', 'a:2,', 'b:2'],
        ['3', '2', 'more', 'hosts:', 'b:2'], ['on', 'a:2'],
        ['4', '4', 'succeeded'], ['on', 'a:2,', 'b:2']]


@pytest.mark.slow
def test_this_machine_with_fewer_slots_than_ranks(folder):
    """It needs no ssh."""
    pathlib.Path('hosts').write_text('localhost:2\n')
    pathlib.Path('script.py').write_text(textwrap.dedent("""
        import os, pathlib, signal, chainermn
        comm = chainermn.create_communicator('naive')
        print(f'{comm.size} of {os.environ["CHAINERMN_RUN_RANKS"]}\\n', end='', flush=True)
        failed = pathlib.Path('failed')
        if comm.bcast_obj(not failed.exists()) and comm.rank == 1:
            failed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        comm.barrier()
        """))
    done = subprocess.run([sys.executable, '-m', 'chainermn', 'run', '-n', '4', '--min-ranks', '2',
                           '--hosts-file', 'hosts', 'script.py'],
                          text=True, capture_output=True, timeout=seconds(120))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == ['2 of 4'] * 2
    assert said(done.stderr)[::2] == [
        'starting 2 of 4 ranks: there are 2 slots in the hosts file'] * 2
    assert said(done.stderr)[3] == 'job succeeded after 1 restart'


def test_hosts_do_not_answer(folder):
    write('')
    up('a')
    done = run('--min-ranks', '3', '--host-timeout', '0')
    assert (done.returncode, done.stdout) == (1, '')
    assert said(done.stderr) == [
        'waiting for hosts: the reachable hosts have 2 of the 3 required slots; b is unreachable '
        '(ssh: connect to host b port 22: No route to host)',
        'job failed: for 0 seconds (--host-timeout), the reachable hosts had fewer than 3 slots']


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.usefixtures('default_signals')
@pytest.mark.parametrize('event', ['answer', 'signal'])
def test_waiting_for_hosts(folder, event):
    write('')
    up('a')
    with subprocess.Popen(command(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
                          ) as process:
        assert process.stderr.readline().startswith('chainermn run: waiting for hosts: the ')
        if event == 'answer':
            up('b')
        else:
            process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=seconds(120))
    if event == 'answer':
        assert (process.returncode, out, err) == (0, 'a a b b of 4\n', '')
    else:
        assert (process.returncode, out) == (-signal.SIGTERM, '')
        assert err == 'chainermn run: job terminated by SIGTERM\n'


#: The command with short intervals; it notes when the ranks are connected.
IMPATIENT = """
import pathlib, sys
from chainermn import __main__
from chainermn._commands.run import job_links, pool
pool._LOST_AFTER, pool._PROBE_INTERVAL, pool._PER_HOST = 2, .5, 0
poll = job_links.Links.poll
def note(links):
    poll(links)
    if links.are_complete:
        pathlib.Path('connected').touch()
job_links.Links.poll = note
sys.exit(__main__.main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_host_is_lost_while_the_job_starts_but_not_while_its_ranks_are_connected(folder):
    pathlib.Path('script.py').write_text(textwrap.dedent("""
        import pathlib, time, chainermn
        a, b = pathlib.Path('a.up'), pathlib.Path('b.up')
        while not pathlib.Path('second').exists():  # without a communicator
            b.unlink(missing_ok=True)
            time.sleep(.1)
        comm = chainermn.create_communicator('naive')
        while not pathlib.Path('connected').exists():
            time.sleep(.1)
        if comm.rank == 0:
            a.unlink()
            b.touch()  # a host that answers, so that a failure of all hosts is not the reason
        while not comm.bcast_obj(pathlib.Path('finish').exists()):
            time.sleep(.1)
        """))
    up('a', 'b')
    options = '--min-ranks', '2', '--grow-after', 'inf', '--grace', '1'
    with subprocess.Popen([sys.executable, '-c', IMPATIENT, *command(*options)[3:]],
                          stderr=subprocess.PIPE, text=True) as process:
        err = ''
        for line in process.stderr:
            err += line
            if '; restarting' in line:
                pathlib.Path('second').touch()
            if 'warning' in line:
                pathlib.Path('finish').touch()
    assert process.returncode == 0, err
    refused = 'ssh: connect to host {} port 22: No route to host'.format
    assert said(err) == [
        f'job failed after T (b is unreachable: {refused("b")}); restarting',
        f'starting 2 of 4 ranks: b is unreachable ({refused("b")})',
        'warning: for the last 2 seconds, no new process could be started on a:2 '
        f'({refused("a")}). The job continues, because its ranks are connected; a restart would '
        'wait for these hosts, or start without them.',
        'job succeeded after 1 restart']


class Probed:
    """The answer of a probe."""

    def __init__(self, failing):
        self.failing = failing

    def errors(self):
        return {host: 'refused' * (host in self.failing) for host in 'abc'}

    def close(self):
        pass


class Outage:
    """The watch of a job on two of three hosts, with a simulated clock."""

    def __init__(self, monkeypatch, links):
        self.now, self.links, self.failing, self.warnings = 0., links, '', []
        monkeypatch.setattr(pool.time, 'monotonic', lambda: self.now)
        three = pool.Pool({'a': 2, 'b': 2, 'c': 2}, 4, 2, lambda _: Probed(self.failing))
        self.watch = pool.Watch(three, {'a': 2, 'b': 2}, float('inf'), links, self.warnings.append)

    def go_on(self, seconds, failing):
        """Return why the job ends within these seconds; ``None`` if it does not."""
        self.failing, end = failing, self.now + seconds
        while self.now < end:
            self.now += 1
            if ending := self.watch.poll():
                return ending.reason
        return None


def connected(*numbers):
    """Links of a job with four ranks, and connections with these numbers of ranks."""
    links = job_links.Links(4)
    connections = []
    for number in numbers:
        found = []
        thread = threading.Thread(target=lambda found=found: found.append(
            host_connection.connect(host_connection.Offer.parse(str(links.offer)))))
        thread.start()
        while thread.is_alive():
            links.poll()
        found[0].sendall(number.to_bytes(4, 'big'))
        connections += found
    links.poll()
    return links, connections


def test_only_a_host_that_is_not_connected_is_lost(monkeypatch):
    links, connections = connected(1, 1, 2)
    with contextlib.closing(links):
        job = Outage(monkeypatch, links)
        assert job.go_on(600, 'a') is None
        assert len(job.warnings) == 1 and job.warnings[0].startswith(
            'warning: for the last 120 seconds, no new process could be started on a:2 (refused).')
        assert job.go_on(300, '') is None  # a second outage is another warning
        assert job.go_on(600, 'ab') is None and len(job.warnings) == 2
        connections[0].close()
        assert job.go_on(110, 'b') is None
        assert job.go_on(30, 'b') == 'b is unreachable: refused'
        for connection in connections:
            connection.close()


@pytest.mark.parametrize('numbers', [None, [], [2], [2, 1]])
def test_a_failure_of_all_hosts_ends_no_job(monkeypatch, numbers):
    """It does not matter how many ranks are connected."""
    links, connections = (None, []) if numbers is None else connected(*numbers)
    with contextlib.closing(links) if links else contextlib.nullcontext():
        job = Outage(monkeypatch, links)
        assert job.go_on(10_000, 'abc') is None
        warning, = job.warnings
        assert warning.startswith('warning: for the last 120 seconds, no new process could be '
                                  'started on a:2, b:2')
        assert 'The job continues, because no host is reachable; a restart' in warning
        assert job.go_on(110, 'ab') is None
        assert job.go_on(30, 'ab') == 'a is unreachable: refused'
        for connection in connections:
            connection.close()


def test_the_ranks_are_lost_although_all_hosts_answer(monkeypatch):
    """For example, after a power failure on all hosts, which mpiexec does not notice."""
    links, connections = connected(2, 2)
    with contextlib.closing(links):
        job = Outage(monkeypatch, links)
        reset(connections[0])
        while not links.has_lost_host:
            links.poll()
        assert job.go_on(1000, 'abc') is None
        assert job.go_on(110, '') is None
        assert job.go_on(30, '') == 'all hosts are reachable, but the connection to a rank was lost'
        connections[1].close()


def reset(connection):
    """End a connection with RST instead of FIN, like a host that has restarted."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0))
    connection.close()


def test_connections_of_strangers_are_dropped():
    links, connections = connected(2, 2)
    with contextlib.closing(links):
        assert links.are_complete
        strangers = [socket.create_connection(('127.0.0.1', links.offer.port))
                     for _ in range(job_links._MAX_STRANGERS + 1)]
        for stranger, sent in [(strangers[0], b''),  # one too many
                               (strangers[5], b'GET / HTTP/1.1\r\nHost: a\r\n\r\n')]:
            stranger.sendall(sent)
            while not select.select([stranger], [], [], 0)[0]:
                links.poll()
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(9) == b''
        assert links.are_complete and not links.has_lost_host
        connections[0].close()
        while links.are_complete:
            links.poll()
        assert not links.has_lost_host
        reset(connections[1])
        while not links.has_lost_host:
            links.poll()
        for stranger in strangers:
            stranger.close()


@pytest.mark.sample(2)
@pytest.mark.parametrize('options, message', [
    (['--min-ranks', '2'], '--min-ranks requires --hosts-file, a file with one line per host: '
                           'host, host:slots or host slots=N'),
    (['--min-ranks', '0'], 'argument --min-ranks: must be a positive integer, not 0'),
    (['--hosts-file', 'hosts', '--min-ranks', '5'], '--min-ranks 5 is greater than -n 4'),
    (['--hosts-file', 'few'], 'few has 3 slots, but -n 4 needs 4. Add slots, as in "host:4".'),
    (['--hosts-file', 'few', '--min-ranks', '4'], 'few has 3 slots, but --min-ranks 4 needs 4.'),
    (['--hosts-file', 'none'], 'cannot read --hosts-file none: No such file or directory. The file '
                               'must have one line per host'),
    (['--hosts-file', 'wrong'], 'wrong, line 2: must be "host", "host:slots" or "host slots=N" '
                                'with at least one slot, not "b 3"'),
])
def test_wrong_options(folder, usage_error, options, message):
    write('')
    pathlib.Path('few').write_text('a:3\n')
    pathlib.Path('wrong').write_text('a\nb 3\n')
    assert message in usage_error('run', '-n', 4, *options, 'script.py')


def test_hosts_file(tmp_path):
    path = tmp_path / 'hosts'
    path.write_text('# all\n\na\n b:2 # new\nc.example.org slots=3\n10.0.0.1\tslots = 12\n')
    expected = {'a': 1, 'b': 2, 'c.example.org': 3, '10.0.0.1': 12}
    assert hosts.read(str(path)) == expected
    path.write_bytes(b'\xef\xbb\xbf' + path.read_bytes().replace(b'\n', b'\r\n'))
    assert hosts.read(str(path)) == expected
    path.write_text('a\n', encoding='utf-16')
    with pytest.raises(ValueError, match='is not a UTF-8 text file: byte 0 is 0xff'):
        hosts.read(str(path))


@pytest.mark.parametrize('line, message', [
    ('b:0', 'with at least one slot, not "b:0"'), ('b:', 'not "b:"'), ('b:2:3', 'not "b:2:3"'),
    ('b slots', 'not "b slots"'), ('b,c', 'not "b,c"'), ('-oX', 'not "-oX"'),
    ('b\0', r'not "b\x00"'),
    ('a:2', 'a is already listed; write one line with all its slots')])
def test_wrong_line(tmp_path, line, message):
    path = tmp_path / 'hosts'
    path.write_text(f'a\n\n{line}\n')
    with pytest.raises(ValueError, match=f'^{re.escape(str(path))}, line 3: .*') as error:
        hosts.read(str(path))
    assert message in str(error.value)


def test_assignment():
    slots = {'a': 2, 'b': 1, 'c': 4}
    assert [hosts.assign(slots, n) for n in (1, 3, 5, 9)] == [
        {'a': 1}, {'a': 2, 'b': 1}, {'a': 2, 'b': 1, 'c': 2}, slots]
    assert hosts.text(slots) == 'a:2, b:1, c:4'
    assert hosts.text({f'n{i}': 1 for i in range(8)}).endswith('n6:1, n7:1')
    assert hosts.text({f'n{i}': 1 for i in range(9)}).endswith('n6:1, and 2 more hosts')


def test_options_of_mpiexec():
    ranks = {'a': 2, 'b': 1}
    assert mpiexec.host_options(False, ranks, ['X']) == ['-hosts', 'a:2,b:1']
    assert mpiexec.host_options(True, ranks, ['X']) == ['--host', 'a:2,b:1', '-x', 'X']
    assert not mpiexec.is_open_mpi(mpiexec.find())

