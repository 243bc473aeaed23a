"""Elastic restarts: the job continues without a lost host, and with it when it is back."""

import contextlib
import pathlib
import re

import pytest
from time_limits import seconds
from virtual_hosts import Hosts

pytestmark = [pytest.mark.full, pytest.mark.mpi_skip, pytest.mark.limit(400)]

TRAINING = pathlib.Path(__file__).with_name('training.py')
CHECKPOINT = 5  # iterations between checkpoints


class Job:
    """A training, and its output so far."""

    def __init__(self, process):
        self.process = process
        self.output = ''

    def wait_for(self, pattern):
        """Read lines until one matches; return its numbers."""
        for line in self.process.stdout:
            self.output += line
            if re.fullmatch(pattern, line.rstrip()):
                return [int(word) for word in line.split() if word.isdecimal()]
        raise AssertionError(self.output)

    def last_step(self):
        return int(re.findall(r'^step \d+ (\d+)$', self.output, re.M)[-1])

    def resumes_with(self, ranks):
        """Wait for a restart; it must resume from the last complete checkpoint or a later one."""
        _, start = self.wait_for(rf'start {ranks} \d+')
        last = self.last_step()
        # At most one checkpoint is in flight, and rank 0 may have printed one step less.
        assert max(1, last // CHECKPOINT * CHECKPOINT - CHECKPOINT) <= start <= last + 1


@contextlib.contextmanager
def job(hosts, folder, *options):
    process = hosts.popen([*options, TRAINING, folder], {'PYTHONWARNINGS': 'ignore'},
                          is_elastic=True)
    with process:
        try:
            yield Job(process)
        finally:
            process.terminate()  # it kills the ranks


def finish(job, hosts, folder):
    (folder / 'finish').touch()
    done = hosts.finish(job.process, seconds(60))
    assert done.returncode == 0, job.output + done.stdout
    return done.stdout


@pytest.mark.parametrize('ranks, lost', [
    ([1, 1, 1], [1]), ([1, 1, 1, 1], [0, 2]), ([2, 1, 1], [0])], ids=str)
def test_the_job_continues_without_a_host_and_grows_when_it_is_back(tmp_path, ranks, lost):
    total, rest = sum(ranks), sum(ranks) - sum(ranks[n] for n in lost)
    with Hosts(ranks) as hosts, job(hosts, tmp_path, '--min-ranks', 2, '--grow-after', 1) as here:
        assert here.wait_for(rf'start {total} \d+') == [total, 0]
        here.wait_for(rf'step {total} 12')
        for n in lost:
            hosts.cut(n)
        here.resumes_with(rest)
        here.wait_for(rf'step {rest} {here.last_step() + 20}')
        for n in lost:
            hosts.restore(n)
        here.resumes_with(total)
        report = finish(here, hosts, tmp_path)
    names = ''.join(rf'{hosts.address(n)} is unreachable.*' for n in lost)
    assert re.search(f'starting {rest} of {total} ranks: {names}', here.output), here.output
    assert re.search(r'job succeeded after [23] restarts', report), report


def test_a_host_without_processes_is_used_again(tmp_path):
    """As after a restart of the host."""
    with Hosts([1, 1, 1]) as hosts, job(hosts, tmp_path, '--min-ranks', 2) as here:
        here.wait_for(r'step 3 12')
        hosts.kill(1)
        here.resumes_with(3)
        finish(here, hosts, tmp_path)


def test_too_few_hosts(tmp_path):
    """The job waits."""
    with Hosts([1, 1]) as hosts, job(hosts, tmp_path, '--min-ranks', 2) as here:
        here.wait_for(r'step 2 12')
        hosts.cut(1)
        here.wait_for('chainermn run: waiting for hosts: .*')
        hosts.restore(1)
        here.resumes_with(2)
        finish(here, hosts, tmp_path)
