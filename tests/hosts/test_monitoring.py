"""``chainermn top`` shows the ranks of all hosts; each host publishes the metrics of its own."""

import json
import os
import re
import subprocess
import sys

import pytest
from time_limits import seconds
from virtual_hosts import Hosts

pytestmark = [pytest.mark.full, pytest.mark.mpi_skip, pytest.mark.limit(120)]

PROGRAM = '''
import os, time, chainermn
comm = chainermn.create_communicator('naive')
print(f'started {comm.rank}', flush=True)
while not comm.allreduce_obj(os.path.exists('end'), op='max'):
    time.sleep(.05 if comm.rank != 3 else .1)
'''

READ = '''
import time, urllib.request
while True:
    try:
        text = urllib.request.urlopen('http://127.0.0.1:9400/metrics').read().decode()
        if text.count('chainermn_operations_total{') == 2:
            break
    except OSError:
        pass
    time.sleep(.1)
print(text)
'''


def test_two_hosts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Hosts([2, 2]) as hosts, hosts.popen(
            [sys.executable, '-c', PROGRAM], {'CHAINERMN_METRICS': '9400'}) as process:
        try:
            for _ in range(4):
                assert 'started' in process.stdout.readline()
            for n in range(2):
                def output(*command, n=n):
                    with hosts.start(n, [sys.executable, *command], stdout=subprocess.PIPE,
                                     cwd=tmp_path) as started:
                        return started.communicate(timeout=seconds(30))[0]

                shown = json.loads(output('-m', 'chainermn', 'top', '--json'))
                assert [row['rank'] for row in shown['ranks']] == [0, 1, 2, 3]
                assert not any(row['is_silent'] for row in shown['ranks'])
                assert [row['rank'] for row in shown['ranks'] if row['is_straggler']] == [3]
                assert len({row['host'] for row in shown['ranks']}) == 2
                ranks = re.findall(r'^chainermn_operations_total{.*rank="(\d)"}',
                                   output('-c', READ), re.M)
                assert ranks == [str(2 * n), str(2 * n + 1)]
        finally:
            (tmp_path / 'end').touch()
        assert process.wait(seconds(30)) == 0, process.stdout.read()
    assert os.listdir(tmp_path) == ['end']
