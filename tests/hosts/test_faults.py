"""Jobs on several hosts end, with a report, when a host or its link fails."""

import contextlib
import os
import pathlib
import re
import sys
import time

import pytest
from time_limits import seconds
from virtual_hosts import Hosts

pytestmark = [pytest.mark.full, pytest.mark.mpi_skip, pytest.mark.limit(120)]

HERE = pathlib.Path(__file__).parent
WITHIN = 30  # seconds in which a job has to end, with a timeout of TIMEOUT
TIMEOUT = 3


@contextlib.contextmanager
def job(hosts, *args, timeout=TIMEOUT):
    """A job that has taken a step; yields its process, of which ``finish`` reads the rest."""
    process = hosts.popen([sys.executable, '-W', 'ignore', HERE / 'steps.py', *map(str, args)],
                          {'CHAINERMN_TIMEOUT': str(seconds(timeout)) if timeout else ''})
    with process:
        try:
            wait_for(process, 'step 1')
            yield process
        finally:
            process.kill()


def wait_for(process, expected):
    """Read up to the expected line, but no further: ``finish`` reads the rest."""
    seen, expected = b'\n', f'\n{expected}\n'.encode()
    while not seen.endswith(expected):
        byte = os.read(process.stdout.fileno(), 1)
        assert byte, seen.decode()
        seen += byte


def check_finished(done):
    """Assert that a job has taken all steps, without a report."""
    assert done.returncode == 0, done.stdout
    assert 'finished after' in done.stdout
    assert 'chainermn:' not in done.stdout


@pytest.mark.parametrize('ranks, way', [
    ([2, 2], 'exception'), ([2, 2], 'SIGKILL'), ([4] * 8, 'SIGKILL')], ids=str)
def test_a_rank_that_fails_on_another_host(ranks, way):
    with Hosts(ranks) as hosts, job(hosts, 60, way) as process:
        done = hosts.finish(process, seconds(WITHIN))
    assert done.returncode != 0
    host = rf'\(host node{len(ranks) - 1}, process \d+\)'
    last = f'rank {sum(ranks) - 1} of {sum(ranks)} {host}'
    # mpiexec may kill the other ranks of its host before the node monitor has seen only one end.
    # UCX may crash when it sends to the killed rank.
    cause = f'{last} aborts the job: uncaught ValueError' if way == 'exception' else (
        rf'{last} (failed|ended first on its host): killed by SIGKILL|'
        r'rank \d+ of .* killed by SIGSEGV')
    assert re.search(f'chainermn: ({cause})', done.stdout), done.stdout


@pytest.mark.parametrize('ranks', [[2, 1], [2, 2]], ids=str)
def test_a_compressor_that_fails_on_one_rank(ranks):
    with Hosts(ranks) as hosts:
        done = hosts.run([sys.executable, '-W', 'ignore', HERE / 'failing.py'],
                         timeout=seconds(60))
    assert done.returncode == 0, done.stdout
    assert done.stdout.count('all right on ') == sum(ranks), done.stdout


def test_a_compressor_that_fails_ends_the_job():
    with Hosts([1, 1]) as hosts:
        done = hosts.run([sys.executable, '-W', 'ignore', HERE / 'failing.py', 'uncaught'],
                         timeout=seconds(WITHIN))
    assert done.returncode != 0
    assert 'MemoryError: multi_node_mean_grad failed on rank 1' in done.stdout, done.stdout


def test_an_error_of_all_ranks_is_printed_by_one_host():
    code = ('import chainermn; comm = chainermn.create_communicator("flat"); '
            'comm.bcast_obj(1, root=comm.rank)')
    with Hosts([2, 2]) as hosts:
        done = hosts.run([sys.executable, '-W', 'ignore', '-c', code], timeout=seconds(WITHIN))
    assert done.returncode != 0
    assert 'chainermn: rank 0 of 4 (host node0, ' in done.stdout, done.stdout
    assert done.stdout.count('aborts the job') == 1, done.stdout
    assert done.stdout.count('roots differ between ranks') == 1, done.stdout


@pytest.mark.parametrize('ranks', [[1, 1], [2, 2], [1] * 16], ids=str)
def test_a_host_that_is_disconnected(ranks):
    with Hosts(ranks) as hosts, job(hosts, 60) as process:
        hosts.cut(1)
        done = hosts.finish(process, seconds(WITHIN))
    assert done.returncode != 0
    assert 'chainermn: rank 0 of ' in done.stdout
    first = ranks[0]
    lost = 'rank 1 on node1 does' if ranks[1] == 1 else (
        f'ranks {first}-{first + ranks[1] - 1} on node1 do')
    assert f'{lost} not respond: host node1 may be unreachable' in done.stdout, done.stdout


@pytest.mark.parametrize('ranks, cut', [
    ([1, 1], 1), ([1, 1], 0), ([2, 2], 1), ([1, 1, 1], 2), ([4] * 8, 5)], ids=str)
def test_a_disconnected_host_is_detected_without_a_timeout(ranks, cut):
    """Within 30 seconds; then the ranks report it, and exit on both sides."""
    with Hosts(ranks) as hosts, job(hosts, 100, timeout=None) as process:
        hosts.cut(cut)
        start = time.monotonic()
        done = hosts.finish(process, seconds(60))
        for n in range(len(ranks)):
            wait_until_empty(hosts, n)
        assert time.monotonic() < start + seconds(60)
    assert done.returncode != 0
    # mpiexec prints the report of the hosts that it reaches.
    assert re.search(rf'chainermn: rank \d+ of \d+ \(.*\) aborts the job: host node{cut} '
                     r'\(ranks? .*\) is unreachable: no response for 24 s',
                     done.stdout), done.stdout
    assert done.stdout.count('aborts the job') == 1


def test_a_host_without_power():
    with Hosts([2, 2]) as hosts, job(hosts, 60) as process:
        hosts.cut(1)
        hosts.kill(1)
        done = hosts.finish(process, seconds(WITHIN))
    assert done.returncode != 0
    assert 'ranks 2-3 on node1 do not respond' in done.stdout, done.stdout


def test_a_host_without_power_is_detected_without_a_timeout():
    with Hosts([2, 2]) as hosts, job(hosts, 100, timeout=None) as process:
        hosts.cut(1)
        hosts.kill(1)
        done = hosts.finish(process, seconds(60))
        wait_until_empty(hosts, 0)
    assert done.returncode != 0
    assert 'aborts the job: host node1 (ranks 2-3) is unreachable' in done.stdout, done.stdout


@pytest.mark.parametrize('killed', [0, 1])
def test_a_host_whose_processes_are_killed(killed):
    with Hosts([1, 1]) as hosts, job(hosts, 60, timeout=None) as process:
        hosts.kill(killed)
        done = hosts.finish(process, seconds(WITHIN))
        assert done.returncode != 0
        wait_until_empty(hosts, 1 - killed)
    # mpiexec ends at once, usually after it has printed the report, which it may also truncate.
    reports = [line for line in done.stdout.splitlines() if line.startswith('chainermn: ')]
    assert len(reports) <= 1
    for line in reports:
        assert (f'chainermn: rank {1 - killed} of 2 (host node{1 - killed}, process ') in line
        assert f'all processes of host node{killed} (rank {killed}) have exited' in line


def wait_until_empty(hosts, n):
    """Wait until a host has no processes but its first one, and those of this command."""
    end = time.monotonic() + seconds(WITHIN)
    while True:
        with hosts.start(n, ['bash', '-c', 'echo /proc/[0-9]*'], stdout=-1) as listing:
            left = listing.communicate()[0].split()
        if len(left) == 2:
            return
        assert time.monotonic() < end, left
        time.sleep(.1)


def test_an_interruption_shorter_than_the_timeout():
    with Hosts([1, 1]) as hosts, job(hosts, 3, timeout=20) as process:
        hosts.cut(1)
        time.sleep(1)
        hosts.restore(1)
        done = hosts.finish(process, seconds(60))
    check_finished(done)


@pytest.mark.parametrize('ranks, way, before', [
    ([1, 1], '', 0),
    ([2, 2], 'pause', 9)],  # MPI has used none of its connections for a while
    ids=str)
def test_an_interruption_of_10_seconds(ranks, way, before):
    with Hosts(ranks) as hosts, job(hosts, 3, way, timeout=None) as process:
        if way:
            wait_for(process, 'step 3')
            time.sleep(before)
        hosts.cut(1)
        time.sleep(10)
        hosts.restore(1)
        done = hosts.finish(process, seconds(60))
    check_finished(done)


@pytest.mark.parametrize('way', ['lock', 'stop'])
def test_a_rank_that_does_not_answer_for_40_seconds(way):
    """The kernel of its host does."""
    with Hosts([1, 1]) as hosts, job(hosts, 3, way, timeout=None) as process:
        start = time.monotonic()
        done = hosts.finish(process, seconds(90))
    assert time.monotonic() > start + 39
    check_finished(done)


def test_a_lost_link_of_a_host_that_mpi_reaches():
    """As if only the network of the link had failed."""
    with Hosts([1, 1]) as hosts, job(hosts, 10, timeout=None) as process:
        time.sleep(2)  # until they are connected
        # The process and the node monitor have the same connection.
        close = ("port=$(ss -tnop | grep 'fd=.*fd=' | grep keepalive | sed -E "
                 "'s/.*10.231.0.2]?:([0-9]+) .*/\\1/') && ss -K -tn sport = :$port | grep -c ESTAB")
        with hosts.start(1, ['bash', '-c', close], stdout=-1) as closing:
            if closing.communicate()[0] != '1\n':
                pytest.skip('the kernel cannot close connections')
        done = hosts.finish(process, seconds(60))
    assert done.returncode == 0, done.stdout
    assert 'finished after' in done.stdout
    lines = [line for line in done.stdout.splitlines() if line.startswith('chainermn:')]
    assert len(lines) == 1, lines
    assert 'connection to host node1 (rank 1) was lost' in lines[0] and 'MPI still' in lines[0]


def test_mpiexec_leaves_other_hosts_running():
    """As srun does without -K. The node monitor of the host reports, and this ends the others."""
    with Hosts([1, 2]) as hosts:
        mpiexec = hosts.mpiexec
        hosts.mpiexec = lambda command: [
            each for part in mpiexec(command)
            for each in ([part] if part != '-localhost' else ['-disable-auto-cleanup', part])]
        with job(hosts, 60, 'SIGKILL', timeout=None) as process:
            done = hosts.finish(process, seconds(WITHIN))
    assert done.returncode != 0
    assert 'rank 2 of 3 (host node1, ' in done.stdout and 'killed by SIGKILL' in done.stdout
    # UCX may crash when it sends to the killed rank.
    assert re.search(r'all processes of host node1 \(ranks 1-2\) have exited|\(signal 11\)',
                     done.stdout), done.stdout


def test_a_slow_host_raises_no_alarm():
    """A step takes a second, and all of them longer than the timeout."""
    with Hosts([2, 2]) as hosts, job(hosts, seconds(2 * TIMEOUT)) as process:
        hosts.set_rate(1, '10mbit')
        done = hosts.finish(process, seconds(60))
    check_finished(done)


def test_messages_over_a_slow_link_are_no_deadlock():
    """Each takes several seconds, in which no rank seems to make progress."""
    with Hosts([1, 1], rate='20mbit') as hosts:
        done = hosts.run([sys.executable, '-W', 'ignore', HERE / 'slow_messages.py', 15 << 20],
                         seconds(120))
    assert (done.returncode, done.stdout.count('finished')) == (0, 2), done.stdout
    assert 'chainermn:' not in done.stdout
