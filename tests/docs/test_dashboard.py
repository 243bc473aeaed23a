"""The dashboard of Grafana and the alerts of Prometheus fit the metrics of a real job."""

import json
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import textwrap
import time
import urllib.error
import urllib.parse
import urllib.request

import pytest
import yaml
from prometheus_client import parser
from time_limits import seconds

pytestmark = pytest.mark.mpi_skip

FOLDER = pathlib.Path(__file__).resolve().parents[2] / 'deploy/monitoring'
DASHBOARD = json.loads((FOLDER / 'dashboard.json').read_text())
RULES = yaml.safe_load((FOLDER / 'alerts.yml').read_text())['groups'][0]['rules']

#: Fails once; the second attempt trains until the file "end" exists. Rank 0 keeps its pages.
PROGRAM = '''
import os, sys, chainer, numpy as np, chainermn
comm = chainermn.create_communicator('naive')
if not os.path.exists('again'):
    comm.barrier()
    if comm.rank == 0:
        open('again', 'w').close()
        sys.exit(3)
    comm.barrier()
optimizer = chainermn.create_multi_node_optimizer(chainer.optimizers.SGD(), comm).setup(
    chainer.links.Classifier(chainer.links.Linear(3, 2)))
data = [(np.ones(3, 'f'), np.int32(0))] * 4
updater = chainer.training.StandardUpdater(chainer.iterators.SerialIterator(data, 2), optimizer)
trainer = chainer.training.Trainer(updater, lambda _: comm.bcast_obj(os.path.exists('end')))
log = chainer.training.extensions.LogReport(trigger=(5, 'iteration'), filename=None)
trainer.extend(chainermn.extensions.create_multi_node_report(log, comm))
trainer.run()
'''


@pytest.fixture(scope='module')
def job(tmp_path_factory):
    """The pages of metrics of a running job, by the name of a file."""
    folder = tmp_path_factory.mktemp('job')
    (folder / 'train.py').write_text(PROGRAM)
    (folder / 'pages').mkdir()
    pages = [folder / 'pages/ranks.prom', folder / 'pages/run.prom']
    with subprocess.Popen(
            [sys.executable, '-m', 'chainermn', 'run', '-n', '2', '--metrics', pages[1],
             '--startup', '0', 'train.py'], cwd=folder, stderr=subprocess.DEVNULL,
            env={**os.environ, 'CHAINERMN_METRICS': str(pages[0])}) as process:
        texts, end = ['', ''], time.monotonic() + seconds(50)
        while texts[0].count('main/loss') < 2 or 'activity="update"' not in texts[0]:
            assert process.poll() is None and time.monotonic() < end, texts
            time.sleep(.2)
            texts = [page.read_text() if page.exists() else '' for page in pages]
        yield pages
        (folder / 'end').touch()
        assert process.wait(seconds(30)) == 0


@pytest.fixture(scope='module')
def families(job):
    """The metrics by name."""
    return {family.name + '_total' * (family.type == 'counter'): family
            for page in job for family in parser.text_string_to_metric_families(page.read_text())}


def queries():
    """Yield all expressions, as the dashboard sends them for a job."""
    for panel in DASHBOARD['panels']:
        for target in panel['targets']:
            yield target['expr'].replace('$job', 'train.py').replace('$__rate_interval', '4s')
    for rule in RULES:
        yield rule['expr']


def labels_of(family):
    found = {label for sample in family.samples for label in sample.labels}
    return found or {'job', 'host', 'rank'}  # of a GPU


def test_every_metric_and_label_exists(families):
    used = set()
    for query in queries():
        selectors = re.findall(r'(chainermn_\w+)(?:\{(.*?)\})?', query)
        labels = set()
        for name, matchers in selectors:
            assert name in families, query
            used.add(name)
            matched = {*re.findall(r'(\w+)\s*[=!]~?\s*"', matchers)}
            assert matched <= labels_of(families[name]), query
            labels |= labels_of(families[name])
        for group in re.findall(r'(?:by|on) \((.*?)\)', query):
            # Prometheus itself adds the label instance.
            assert {*group.split(', ')} <= labels | {'instance'}, query
        for name in re.findall(r'(?:rate|increase)\((\w+)', query):
            assert families[name].type == 'counter', query
    assert used == {*families}  # nothing is left out


def test_legends_and_texts_use_labels_of_their_query(families):
    for panel in DASHBOARD['panels']:
        for target in panel['targets']:
            kept = re.match(r'\w+ by \((.*?)\)', target['expr'])
            name = re.search(r'chainermn_\w+', target['expr'])[0]
            labels = {*kept[1].split(', ')} if kept else labels_of(families[name])
            assert {*re.findall(r'\{\{(\w+)\}\}', target['legendFormat'])} <= labels
    for rule in RULES:
        used = {*re.findall(r'\$labels\.(\w+)', str(rule['annotations']))}
        assert used <= {*re.search(r'by \((.*?)\)', rule['expr'])[1].split(', ')}
    variable = DASHBOARD['templating']['list'][1]
    name, label = re.fullmatch(r'label_values\((\w+), (\w+)\)', variable['query']).groups()
    assert {sample.labels[label] for sample in families[name].samples} == {'train.py'}


def test_panels_do_not_overlap():
    cells = [(x, y) for panel in DASHBOARD['panels'] for place in [panel['gridPos']]
             for x in range(place['x'], place['x'] + place['w'])
             for y in range(place['y'], place['y'] + place['h'])]
    assert len({*cells}) == len(cells) and max(cells)[0] < 24
    assert len({panel['id'] for panel in DASHBOARD['panels']}) == len(DASHBOARD['panels'])


def test_the_values_are_those_of_the_job(families):
    import chainermn

    values = {name: {tuple(sorted(sample.labels.items())): sample.value
                     for sample in family.samples} for name, family in families.items()}
    assert {sample.labels['version'] for sample in families['chainermn_build_info'].samples} == {
        chainermn.__version__}
    assert sum(values['chainermn_run_restarts_total'].values()) == 1
    loss = {sample.labels['rank']: sample.value
            for sample in families['chainermn_log_value'].samples
            if sample.labels['key'] == 'main/loss'}
    assert {*loss} == {'0', '1'} and all(0 < value < 3 for value in loss.values())
    assert all(0 < value < seconds(100)
               for value in values['chainermn_cpu_seconds_total'].values())


@pytest.mark.slow
def test_prometheus_evaluates_every_query(job, tmp_path):
    """A server that scrapes the pages; only what needs a GPU has no result."""
    if not shutil.which('prometheus'):
        pytest.skip("needs Debian's package prometheus")
    ports = []
    for _ in range(2):
        with socket.socket() as listener:
            listener.bind(('127.0.0.1', 0))
            ports.append(listener.getsockname()[1])
    (tmp_path / 'prometheus.yml').write_text(f'''
global: {{scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s}}
rule_files: [{FOLDER / 'alerts.yml'}]
scrape_configs:
  - job_name: training
    honor_labels: true
    static_configs: [{{targets: ["127.0.0.1:{ports[0]}"]}}]
    metrics_path: /ranks.prom
  - job_name: run
    honor_labels: true
    static_configs: [{{targets: ["127.0.0.1:{ports[0]}"]}}]
    metrics_path: /run.prom
''')

    def ask(query):
        url = f'http://127.0.0.1:{ports[1]}/api/v1/query?query={urllib.parse.quote(query)}'
        with urllib.request.urlopen(url, timeout=5) as answer:
            return json.load(answer)['data']['result']

    quiet = {'stdout': subprocess.DEVNULL, 'stderr': subprocess.DEVNULL}
    with subprocess.Popen([sys.executable, '-m', 'http.server', str(ports[0]), '--bind',
                           '127.0.0.1'], cwd=job[0].parent, **quiet) as pages, subprocess.Popen(
            ['prometheus', '--config.file=prometheus.yml', '--storage.tsdb.path=data',
             f'--web.listen-address=127.0.0.1:{ports[1]}'], cwd=tmp_path, **quiet) as server:
        try:
            end, empty = time.monotonic() + seconds(40), None
            while empty is None or [query for query in empty if '_gpu_' not in query]:
                assert time.monotonic() < end, empty
                time.sleep(.5)
                try:
                    # An alert has results only if it fires: compare less.
                    empty = [query for query in map(without_comparison, queries())
                             if not ask(query)]
                except urllib.error.URLError as error:
                    assert getattr(error, 'code', None) != 400, error.read()  # a wrong query
        finally:
            server.terminate()
            pages.terminate()


def without_comparison(query):
    return re.sub(r'(>|==) [\d.]+$', '', query)


#: Series in steps of a minute, in which the job trains, and the alerts at some times.
CASES = [
    ('it trains', {'updates': '0+60x60', 'busy': (30, 33)}, {'30m': [], '60m': []}),
    ('it evaluates for 15 minutes',
     {'updates': '0+60x20 1200x15 1260+60x30', 'busy': (30, 30)}, {'38m': [], '50m': []}),
    ('it hangs', {'updates': '0+60x20 1200x50', 'busy': (30, 30)},
     {'20m': [], '45m': ['ChainerMNNoProgress']}),
    ('it never begins', {'updates': '0x60', 'busy': (30, 30)},
     {'8m': [], '15m': ['ChainerMNNoProgress']}),
    ('it has a straggler', {'updates': '0+60x60', 'busy': (58, 20)},
     {'5m': [], '30m': ['ChainerMNStraggler']}),
    ('it was restarted', {'updates': '0+60x60', 'busy': (30, 30), 'restarts': '0x20 1x100'},
     {'15m': [], '30m': ['ChainerMNRestarts'], '100m': []}),
    ('it hangs beside another job with the same file name',
     {'updates': '0+60x20 1200x50', 'busy': (30, 30), 'other': '0+60x70'},
     {'20m': [], '45m': ['ChainerMNNoProgress']}),
    ('it has ended', {'updates': '0+60x10 _x60', 'busy': (30, 30)}, {'30m': [], '50m': []}),
]


@pytest.mark.parametrize('name, series, alerts', CASES, ids=[case[0] for case in CASES])
def test_alerts(tmp_path, families, name, series, alerts):
    """Promtool computes the alerts for series with the names and labels of the real ones."""
    if not shutil.which('promtool'):
        pytest.skip("needs Debian's package prometheus")
    inputs = []

    def add(metric, values, **labels):
        assert {*labels} - {'instance'} == labels_of(families[metric])
        inside = ','.join(f'{key}="{value}"' for key, value in labels.items())
        inputs.append({'series': f'{metric}{{{inside}}}', 'values': values})

    for rank, busy in enumerate((series['busy'][0], series['busy'][1], series['busy'][1])):
        of_rank = {'job': 'train.py', 'host': 'a', 'rank': str(rank), 'instance': 'a:9400'}
        add('chainermn_updates_total', series['updates'], **of_rank)
        for activity, share in [('forward', busy), ('communication', 10), ('waiting', 50 - busy)]:
            add('chainermn_activity_seconds_total', f'0+{max(0, share)}x60', activity=activity,
                **of_rank)
    if other := series.get('other'):
        add('chainermn_updates_total', other, job='train.py', host='a', rank='0',
            instance='a:9500')
    for reason in ('failure', 'more_hosts'):
        add('chainermn_run_restarts_total', series.get('restarts', '0x60')
            if reason == 'failure' else '0x20 3x40', job='train.py', host='a', reason=reason)
    labels = {'ChainerMNNoProgress': {'job': 'train.py', 'host': 'a', 'instance': 'a:9400'},
              'ChainerMNStraggler': {'job': 'train.py', 'host': 'a', 'rank': '0'},
              'ChainerMNRestarts': {'job': 'train.py', 'host': 'a'}}
    tests = [{'interval': '1m', 'input_series': inputs, 'alert_rule_test': [
        {'eval_time': at, 'alertname': rule['alert'], 'exp_alerts': [
            {'exp_labels': {**labels[rule['alert']], **rule['labels']}}]
         if rule['alert'] in expected else []}
        for at, expected in alerts.items() for rule in RULES]}]
    # Promtool compares texts as well: without them, there is less to repeat.
    rules = [{key: value for key, value in rule.items() if key != 'annotations'} for rule in RULES]
    (tmp_path / 'rules.yml').write_text(yaml.safe_dump(
        {'groups': [{'name': 'chainermn', 'rules': rules}]}))
    (tmp_path / 'test.yml').write_text(yaml.safe_dump(
        {'rule_files': ['rules.yml'], 'evaluation_interval': '1m', 'tests': tests}))
    done = subprocess.run(['promtool', 'test', 'rules', 'test.yml'], cwd=tmp_path, text=True,
                          capture_output=True, check=False)
    assert done.returncode == 0, textwrap.shorten(done.stdout + done.stderr, 3000)


def test_promtool_accepts_the_rules():
    if not shutil.which('promtool'):
        pytest.skip("needs Debian's package prometheus")
    subprocess.run(['promtool', 'check', 'rules', FOLDER / 'alerts.yml'], check=True,
                   capture_output=True)
