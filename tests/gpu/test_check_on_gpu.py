"""``chainermn check`` on a GPU."""

import json
import subprocess
import sys
import time

import pytest
from time_limits import seconds

from chainermn._commands.check import smoke_tests

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize('name', ['pure_nccl', 'non_cuda_aware'])
def test_times_include_the_work_of_the_device(comm):
    import cupy

    def run():
        cupy.cuda.get_current_stream().launch_host_func(lambda _: time.sleep(.05), None)

    assert smoke_tests._seconds(comm, run, on_device=True) >= .05


@pytest.mark.mpi_skip
@pytest.mark.limit(400)
def test_all_communicators_pass(start):
    first, env = start(2)
    done = subprocess.run([*first, sys.executable, '-m', 'chainermn', 'check', '--json'], env=env,
                          capture_output=True, text=True, timeout=seconds(380))
    found = json.loads(done.stdout)
    tests = {test['name']: test for test in found['communicators']}
    assert tests['pure_nccl']['passed'] and tests['non_cuda_aware']['passed'], done.stdout
