"""Metrics in a file or over HTTP: their format, hostile requests, and the end of the process."""

import os
import pathlib
import re
import signal
import socket
import stat
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest
from time_limits import seconds

from chainermn._process import metrics_target
from chainermn._process.metrics_file import Metric, text

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
    parser = pytest.importorskip('prometheus_client.parser',
                                 reason='needs prometheus-client from PyPI')
    steps, memory = parser.text_string_to_metric_families(text(METRICS))
    assert (steps.name, steps.type, steps.documentation) == ('chainermn_steps', 'counter', 'Steps.')
    assert steps.samples[0].labels == {'rank': '0', 'job': 'a"\\\nb'}
    assert (steps.samples[0].name, steps.samples[0].value) == ('chainermn_steps_total', 3)
    assert (memory.samples[0].name, memory.samples[0].value) == ('chainermn_memory_bytes', .5)


def test_a_file(tmp_path):
    file = metrics_target.open_target(str(tmp_path / 'job.prom'))
    file.publish(METRICS)
    assert [path.name for path in tmp_path.iterdir()] == ['job.prom']
    assert (tmp_path / 'job.prom').read_text() == text(METRICS)
    assert text(METRICS).splitlines()[2] == 'chainermn_steps_total{rank="0",job="a\\"\\\\\\nb"} 3'
    assert stat.S_IMODE((tmp_path / 'job.prom').stat().st_mode) & 0o444 == 0o444
    file.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize('target, message', [
    ('job.txt', 'must be PORT, ADDRESS:PORT or a file FILE.prom'), ('0', 'there is no port 0'),
    ('99999', 'there is no port 99999'), ('/not/there/job.prom', 'there is no folder /not/there'),
    ('1.2.3.4:9400', 'Cannot assign'), ('a b:1', 'Name or service')])
def test_wrong_targets(target, message):
    with pytest.raises((ValueError, OSError), match=re.escape(message)):
        metrics_target.open_target(target)


def test_a_port(port):
    file = metrics_target.open_target(str(port))
    assert get(port).status == 503  # there are no metrics yet
    file.publish(METRICS)
    answer = get(port)
    assert answer.read().decode() == text(METRICS)
    assert answer.headers['Content-Type'] == 'text/plain; version=0.0.4; charset=utf-8'
    assert get(port, method='HEAD').read() == b''
    assert (get(port, '/other').status, get(port, method='POST').status) == (404, 405)
    with pytest.raises(OSError, match='in use'):
        metrics_target.open_target(str(port))
    hosts = subprocess.run(['cat', '/proc/net/tcp'], capture_output=True, text=True, check=True)
    assert f' 0100007F:{port:04X} ' in hosts.stdout  # loopback only
    file.close()
    assert get(port).status == 503


def test_hostile_requests(port):
    """Others are still answered, and memory does not grow."""
    file = metrics_target.open_target(str(port))
    file.publish(METRICS)
    get(port)
    process = next(path.parent for path in pathlib.Path('/proc').glob('[0-9]*/cmdline')
                   if str(file.path).encode() in path.read_bytes())
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
    file.close()


@pytest.mark.parametrize('how', ['end', 'kill'])
def test_it_ends_with_the_process(port, how):
    """Also if a forked child goes on."""
    program = f'''
import os, time
from chainermn._process import metrics_target
file = metrics_target.open_target('{port}')
file.publish([])
child = os.fork()
if not child:
    time.sleep(600)
print(file.path, child, flush=True)
input()
'''
    with subprocess.Popen([sys.executable, '-c', program], stdin=subprocess.PIPE, text=True,
                          stdout=subprocess.PIPE) as process:
        path, child = process.stdout.readline().split()
        assert get(port).status == 200
        if how == 'kill':
            process.kill()
        else:
            process.stdin.write('\n')
            process.stdin.flush()
        process.wait(seconds(10))
        end = time.monotonic() + seconds(10)
        while os.path.exists(os.path.dirname(path)):
            assert time.monotonic() < end
            time.sleep(.05)
        with pytest.raises(OSError), socket.create_connection(('127.0.0.1', port)):
            pass
        os.kill(int(child), signal.SIGKILL)
