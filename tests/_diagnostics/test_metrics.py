"""Metrics of real jobs, scraped by Prometheus itself if it is installed."""

import json
import pathlib
import re
import shutil
import socket
import subprocess
import time
import urllib.request

import pytest
from jobs import run_job
from time_limits import seconds, wait_until

pytestmark = pytest.mark.mpi_skip

#: Rank 0 compares the metrics with what the ranks have done; the last argument is "prometheus" if a
#: server scrapes the job meanwhile.
PROGRAM = '''
import os, re, sys, time, urllib.request
import chainer, numpy as np
import chainermn

target = os.environ['CHAINERMN_METRICS']
comm = chainermn.create_communicator('naive')
model = chainer.links.Linear(3, 2)
optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.SGD(), comm).setup(model)

def loss(x):
    time.sleep(.02)
    return chainer.functions.sum(model(x))

def read():
    if target.endswith('.prom'):
        return open(target).read() if os.path.exists(target) else ''
    try:
        url = f'http://127.0.0.1:{target}/metrics'
        return urllib.request.urlopen(url, timeout=10).read().decode()
    except OSError:  # it is not ready
        return ''

def values(text, name):
    return {int(rank): float(value) for rank, value in re.findall(
        f'^chainermn_{name}{{job="script.py",host="[^"]+",rank="([0-9]+)"}} ([0-9.e+]+)$', text,
        re.MULTILINE)}

started, is_complete, text = time.monotonic(), False, ''
while not comm.bcast_obj(is_complete):
    optimizer.update(loss, np.ones((1, 3), 'f'))
    if comm.rank == 0 and optimizer.t % 20 == 0:
        text = read()
        found = values(text, 'updates_total')
        spent = [float(each) for each in re.findall(r'activity="forward"} ([0-9.]+)', text)]
        assert max(found.values(), default=0) <= optimizer.t, (found, optimizer.t)
        # On a busy machine, some are old for a while; and the first sample starts the measuring.
        is_new = len(found) == len(spent) == comm.size and (
            optimizer.t - min(found.values()) < 3 / .02) and (
            time.time() - min(values(text, 'last_sample_timestamp_seconds').values()) < 5)
        is_complete = is_new and min(found.values()) > 40 and min(spent) > 0 and (
            not sys.argv[1:] or os.path.exists('scraped'))
if comm.rank == 0:
    seconds = time.monotonic() - started
    assert min(values(text, 'resident_memory_bytes').values()) > 2**20
    assert max(spent) < seconds, (spent, seconds)
    print('right')
'''


@pytest.fixture
def port():
    with socket.socket() as listener:
        listener.bind(('127.0.0.1', 0))
        return listener.getsockname()[1]


@pytest.mark.slow
@pytest.mark.parametrize('ranks', [1, 2])
def test_a_port_and_a_file(tmp_path, port, ranks):
    target = str(port) if ranks == 2 else str(tmp_path / 'job.prom')
    job = run_job(tmp_path, PROGRAM, ranks=ranks, CHAINERMN_METRICS=target)
    assert (job.returncode, job.stdout) == (0, 'right\n'), job.stdout
    wait_until(lambda: not (tmp_path / 'job.prom').exists())


@pytest.mark.slow
def test_prometheus(tmp_path, port):
    """A real server scrapes a job, and has the right types and labels."""
    if not shutil.which('prometheus'):
        pytest.skip("needs Debian's package prometheus")
    with socket.socket() as listener:
        listener.bind(('127.0.0.1', 0))
        own = listener.getsockname()[1]
    (tmp_path / 'prometheus.yml').write_text(f'''
global: {{scrape_interval: 1s, scrape_timeout: 1s}}
scrape_configs:
  - job_name: training
    honor_labels: true
    static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
''')

    def ask(path):
        with urllib.request.urlopen(f'http://127.0.0.1:{own}/api/v1/{path}', timeout=5) as answer:
            return json.load(answer)['data']

    (tmp_path / 'script.py').write_text(PROGRAM)
    with subprocess.Popen(
            ['prometheus', '--config.file=prometheus.yml', '--storage.tsdb.path=data',
             f'--web.listen-address=127.0.0.1:{own}'], cwd=tmp_path, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL) as server:
        try:
            jobs = []
            import threading

            thread = threading.Thread(target=lambda: jobs.append(run_job(
                tmp_path, PROGRAM, 'prometheus', ranks=2, limit=60, CHAINERMN_METRICS=str(port))))
            thread.start()
            end = time.monotonic() + seconds(50)
            found = []
            while len(found) < 2:
                assert time.monotonic() < end and thread.is_alive(), jobs
                time.sleep(.2)
                try:
                    found = ask('query?query=rate(chainermn_updates_total%5B5s%5D)')['result']
                except OSError:  # the server starts
                    continue
            types = ask('metadata')
            (tmp_path / 'scraped').touch()
            thread.join()
        finally:
            server.terminate()
    assert sorted(each['metric']['rank'] for each in found) == ['0', '1']
    assert {each['metric']['job'] for each in found} == {'script.py'}
    for name, (described,) in types.items():
        if name.startswith('chainermn_'):
            assert described['type'] == ('counter' if name.endswith('_total') else 'gauge'), name
    assert types['chainermn_activity_seconds_total'][0]['help'].startswith('Time of the main')
    assert (jobs[0].returncode, jobs[0].stdout) == (0, 'right\n'), jobs[0].stdout


@pytest.mark.slow
def test_a_port_in_use_is_a_warning(tmp_path):
    with socket.socket() as listener:
        listener.bind(('127.0.0.1', 0))
        listener.listen()
        port = listener.getsockname()[1]
        job = run_job(tmp_path, f'''
import time, chainermn
comm = chainermn.create_communicator('naive')
time.sleep({seconds(15)})
comm.barrier()
''', CHAINERMN_METRICS=str(port))
    assert job.returncode == 0
    assert re.fullmatch(
        rf'chainermn: cannot publish metrics of \S+ on \S+:\d+: port {port} is already in use, for '
        r'example by another job on this host\. Set CHAINERMN_METRICS, or --metrics of chainermn '
        r'run, to a different port\.\n', job.stdout), job.stdout


def test_promtool_finds_nothing_to_improve():
    if not shutil.which('promtool'):
        pytest.skip("needs Debian's package prometheus")
    from chainermn._commands.run.run_metrics import RunMetrics
    from chainermn._diagnostics import metrics
    from chainermn._diagnostics.live_view import Sample
    from chainermn._process.nvml import GpuUse
    from chainermn._process.prometheus import text
    from chainermn._timeline.activities import NAMES

    sample = Sample(0, 'a', 1, 1., 5, 7, dict.fromkeys(NAMES, 1.), 2., 100, 0, GpuUse(.5, 1, 2),
                    {'main/loss': float('nan')}, '', True, 3.)
    texts = [text(metrics.metrics(1, [(0., sample)])),
             text(RunMetrics(None, 'train.py').metrics([], True))]
    for each in texts:
        done = subprocess.run(['promtool', 'check', 'metrics'], input=each, text=True, check=False,
                              capture_output=True)
        assert (done.returncode, done.stdout + done.stderr) == (0, '')


def test_the_pages_name_every_metric():
    from chainermn._commands.run.run_metrics import RunMetrics
    from chainermn._diagnostics import metrics

    page = (pathlib.Path(__file__).resolve().parents[2] / 'docs/monitoring.md').read_text()
    every = [*metrics.metrics(1, []), *RunMetrics(None, 'train.py').metrics([], True)]
    for metric in every:
        assert f'`chainermn_{metric.name}`' in page, metric.name


@pytest.mark.slow
def test_a_wrong_target_is_a_warning(tmp_path):
    job = run_job(tmp_path, '''
import time
import chainermn
comm = chainermn.create_communicator('naive')
time.sleep(3)
comm.barrier()
''', ranks=2, CHAINERMN_METRICS='job.txt')
    assert job.returncode == 0
    assert ("CHAINERMN_METRICS must be PORT, ADDRESS:PORT or a file FILE.prom, not 'job.txt'"
            in job.stdout), job.stdout
