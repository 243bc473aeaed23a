"""Metrics in a file or over HTTP: their format, hostile requests, and the end of the process."""

import pathlib
import re
import socket
import stat
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest
from prometheus_client import parser
from time_limits import seconds, wait_until

from chainermn._process import metrics_process
from chainermn._process.prometheus import Metric, text

pytestmark = pytest.mark.mpi_skip

METRICS = [Metric('steps_total', 'counter', 'Steps.', [({'rank': '0', 'job': 'a"\\\nb'}, 3)]),
           Metric('memory_bytes', 'gauge', 'Memory.', [({}, .5)])]


@pytest.fixture
def port():
    with socket.socket() as listener:
        listener.bind(('127.0.0.1', 0))
        return listener.getsockname()[1]


def get(port, path='/metrics', method='GET'):
    request = urllib.request.Request(f'http://127.0.0.1:{port}{path}', method=method)
    end = time.monotonic() + seconds(10)
    while True:
        try:
            return urllib.request.urlopen(request, timeout=seconds(10))
        except urllib.error.HTTPError as error:
            return error
        except OSError:  # it is starting
            assert time.monotonic() < end
            time.sleep(.05)


def test_the_format():
    steps, memory = parser.text_string_to_metric_families(text(METRICS))
    assert (steps.name, steps.type, steps.documentation) == ('chainermn_steps', 'counter', 'Steps.')
    assert steps.samples[0].labels == {'rank': '0', 'job': 'a"\\\nb'}
    assert (steps.samples[0].name, steps.samples[0].value) == ('chainermn_steps_total', 3)
    assert (memory.samples[0].name, memory.samples[0].value) == ('chainermn_memory_bytes', .5)


def send(socket, page):
    socket.setblocking(True)
    socket.sendall(page.encode() + b'\0')


def read(path, page):
    """Wait until a file has some content."""
    wait_until(lambda: path.exists() and path.read_text() == page)


def wait_until_gone(path):
    wait_until(lambda: not path.exists())


def test_a_file(tmp_path):
    path, other = tmp_path / 'job.prom', tmp_path / 'other'
    other.write_text('unchanged')
    (tmp_path / 'job.prom.part').symlink_to(other)  # somebody put it there
    with metrics_process.start(str(path)) as socket:
        for page in ('', text(METRICS)):
            send(socket, page)
            read(path, page)
        assert {each.name for each in tmp_path.iterdir()} == {'job.prom', 'other'}
        assert stat.S_IMODE(path.stat().st_mode) & 0o444 == 0o444
    wait_until_gone(path)
    assert other.read_text() == 'unchanged'


def test_escapes():
    assert text(METRICS).splitlines()[2] == 'chainermn_steps_total{rank="0",job="a\\"\\\\\\nb"} 3'


@pytest.mark.parametrize('target', ['job.txt', '', ':1', 'a/b:1', '1:2:3'])
def test_wrong_targets(target):
    with pytest.raises(ValueError, match=r'must be PORT, ADDRESS:PORT or a file FILE\.prom, not '):
        metrics_process.parse(target)


@pytest.mark.parametrize('target', ['0', '99999', '65536', '0.0.0.0:99999'])
def test_wrong_ports(target):
    with pytest.raises(ValueError, match='must have a port from 1 to 65535, not '):
        metrics_process.parse(target)


@pytest.mark.parametrize('target, place', [
    ('9400', ('127.0.0.1', 9400)), ('0.0.0.0:1', ('0.0.0.0', 1)), ('[::1]:80', ('::1', 80)),
    ('node1:80', ('node1', 80)), ('/a/b.prom', '/a/b.prom'), ('65535', ('127.0.0.1', 65535))])
def test_targets(target, place):
    assert metrics_process.parse(target) == place


@pytest.mark.parametrize('target, message', [
    ('/not/there/job.prom', 'No such file or directory'), ('203.0.113.1:9400', 'bind'),
    ('no-such-host.invalid:1', '')])
def test_targets_that_cannot_be_used(capfd, target, message):
    with metrics_process.start(target) as socket:
        send(socket, '')
        socket.settimeout(seconds(10))
        assert socket.recv(1) == b''  # the process has ended
    found, end = '', time.monotonic() + seconds(10)  # it prints after it has closed the socket
    while '\n' not in found and time.monotonic() < end:
        time.sleep(.01)
        found += capfd.readouterr().err
    assert re.search(
        f'^chainermn: cannot publish metrics of .* on {re.escape(target)}: .*{message}', found)


def test_a_port(port):
    with metrics_process.start(str(port)) as socket:
        assert get(port).status == 503  # there are no metrics yet
        send(socket, text(METRICS))
        wait_until(lambda: get(port).status != 503)
        answer = get(port)
        assert answer.read().decode() == text(METRICS)
        assert answer.headers['Content-Type'] == 'text/plain; version=0.0.4; charset=utf-8'
        assert get(port, method='HEAD').read() == b''
        assert (get(port, '/other').status, get(port, method='POST').status) == (404, 405)
        hosts = subprocess.run(['cat', '/proc/net/tcp'], capture_output=True, text=True, check=True)
        assert f' 0100007F:{port:04X} ' in hosts.stdout  # loopback only


def test_a_port_that_becomes_free(port):
    """The processes of the previous attempt of a job may still exist."""
    with metrics_process.start(str(port)) as before, metrics_process.start(str(port)) as after:
        send(before, 'before')
        send(after, 'after')
        assert get(port).status in (200, 503)
        before.close()
        end = time.monotonic() + seconds(10)
        while True:
            try:
                if get(port).read() == b'after':
                    break
            except OSError:
                pass
            assert time.monotonic() < end
            time.sleep(.1)


@pytest.mark.slow
def test_hostile_requests(port):
    """Others are still answered, and memory does not grow."""
    server = metrics_process.start(str(port))
    send(server, text(METRICS))
    get(port)
    process = next(path.parent for path in pathlib.Path('/proc').glob('[0-9]*/cmdline')
                   if path.read_bytes().endswith(f'\0{port}\0'.encode()))
    before = int(re.search(r'VmRSS:\s+(\d+)', (process / 'status').read_text())[1])
    slow = []
    for _ in range(300):  # slow clients
        slow.append(socket.create_connection(('127.0.0.1', port), timeout=seconds(10)))
        slow[-1].sendall(b'GET /metrics HTTP/1.1\r\n')
    with socket.create_connection(('127.0.0.1', port), timeout=seconds(10)) as huge:
        try:
            for _ in range(1000):
                huge.sendall(b'X-Header: ' + b'x' * 65536)
        except OSError:  # it has closed the connection
            pass
    for garbage in (b'\0' * 9000, b'\r\n\r\n', b'GET\r\n\r\n', b'GET /metrics\xff\r\n\r\n'):
        with socket.create_connection(('127.0.0.1', port), timeout=seconds(10)) as connection:
            connection.sendall(garbage)
    end = time.monotonic() + seconds(30)
    while True:  # within the time limit of the slow ones
        try:
            assert get(port).read().decode() == text(METRICS)
            break
        except (OSError, ConnectionError):
            assert time.monotonic() < end
            time.sleep(.1)
    for connection in slow:
        connection.close()
    for _ in range(1000):
        with urllib.request.urlopen(f'http://127.0.0.1:{port}/', timeout=seconds(10)) as answer:
            assert answer.read().decode() == text(METRICS)
    after = int(re.search(r'VmRSS:\s+(\d+)', (process / 'status').read_text())[1])
    assert after < before + 20_000, (before, after)  # KiB
    server.close()


@pytest.mark.parametrize('how', [pytest.param('end', marks=pytest.mark.slow), 'kill'])
def test_it_ends_with_the_process(tmp_path, how):
    path = tmp_path / 'job.prom'
    program = f'''
from chainermn._process import metrics_process
socket = metrics_process.start({str(path)!r})
socket.send(b'x\\0')
input()
'''
    with subprocess.Popen([sys.executable, '-c', program], stdin=subprocess.PIPE) as process:
        read(path, 'x')
        if how == 'kill':
            process.kill()
        else:
            process.communicate(b'\n', timeout=seconds(10))
    wait_until_gone(path)
