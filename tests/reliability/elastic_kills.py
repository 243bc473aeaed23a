"""Kills ranks and disconnects hosts of elastic jobs, and checks that no sample is lost or repeated.

``python tests/reliability/elastic_kills.py [--kills 100] [--jobs 2] [--seed 0]`` trains with
``chainermn run -n 4 --min-ranks 2`` on four virtual hosts, which needs root. At random
moments a rank is killed (SIGKILL), or the link of a host is cut, until the job has restarted and
some random time longer. At most two hosts are disconnected at a time. Each training ends, after
five kills, at the end of an epoch. Then

- the job must have succeeded,
- every start must have resumed from a complete checkpoint, and from none that is older than the
  newest one before the kill,
- apart from iterations that were repeated because they came after the checkpoint, each sample was
  seen once per epoch. (When an epoch resumes with another number of ranks, up to three samples are
  repeated, so that all ranks have equally many.)
"""
from __future__ import annotations

import argparse
import collections
import concurrent.futures
import os
import pathlib
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from typing import NamedTuple

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from time_limits import seconds
from virtual_hosts import Hosts

HOSTS = 4
MIN_RANKS = 2
SAMPLES = 204  # per epoch; divisible by 2, 3 and 4 ranks
BATCH = 4  # per rank
KILLS_PER_JOB = 5
WITHIN = 400  # seconds for a restart; a host that is lost during startup is only found by probes


def work(folder: pathlib.Path) -> None:
    """Trains, in a rank."""
    import warnings

    warnings.simplefilter('ignore')
    import chainer
    import numpy as np

    import chainermn

    comm = chainermn.create_communicator('flat')
    attempt = comm.bcast_obj(len(starts(folder)) if comm.rank == 0 else None)
    model = chainer.links.Linear(1, 2)
    optimizer = chainermn.create_multi_node_optimizer(
        chainer.optimizers.MomentumSGD(0.05), comm).setup(model)
    iterator = chainer.iterators.SerialIterator(
        np.arange(SAMPLES), BATCH,
        order_sampler=chainermn.iterators.MultiNodeOrderSampler(SAMPLES, comm, seed=1))

    def loss(ids: np.ndarray) -> chainer.Variable:
        # The iterator is already at the end of the batch, which can be in the next epoch.
        epoch, following = iterator.epoch, 0
        if iterator.is_new_epoch:
            epoch, following = epoch - 1, iterator.current_position
        words = [f'{epoch + (n >= len(ids) - following)}:{one}' for n, one in enumerate(ids)]
        say(folder, f'batch {attempt} {updater.iteration} {" ".join(words)}')
        return chainer.functions.sum(model(ids[:, None].astype(np.float32)) ** 2)

    updater = chainer.training.StandardUpdater(iterator, optimizer, loss_func=loss)

    def has_finished(trainer: chainer.training.Trainer) -> bool:
        return bool(comm.bcast_obj(iterator.is_new_epoch and (folder / 'finish').exists()))

    trainer = chainer.training.Trainer(updater, has_finished, out=str(folder))
    checkpointer = chainermn.create_multi_node_checkpointer('run', comm)
    trainer.extend(checkpointer, trigger=(10, 'iteration'))
    trainer.extend(lambda trainer: time.sleep(.03), trigger=(1, 'iteration'), name='sleep')
    checkpointer.maybe_load(trainer, optimizer)
    pids = comm.gather_obj((os.uname().nodename, os.getpid()))
    if comm.rank == 0:
        ranks = ' '.join(f'{name}:{pid}' for name, pid in pids)
        say(folder, f'start {updater.iteration} {ranks}')
    trainer.run()


def say(folder: pathlib.Path, text: str) -> None:
    """Append a line to the log in one write, so that lines of ranks do not mix."""
    with open(folder / 'log', 'ab', buffering=0) as file:
        file.write(f'{text}\n'.encode())


class Start(NamedTuple):
    """A start of the training."""

    iteration: int
    pids: dict[int, int]  # by host


def starts(folder: pathlib.Path) -> list[Start]:
    """Return the starts so far."""
    path = folder / 'log'
    lines = re.findall(r'^start (\d+) (.*)$', path.read_text() if path.exists() else '', re.M)
    return [Start(int(iteration), {int(host): int(pid) for host, pid in re.findall(
        r'node(\d):(\d+)', ranks)}) for iteration, ranks in lines]


class Job:
    """One training, with its kills."""

    def __init__(self, rng: random.Random, counts: collections.Counter[str]) -> None:
        self.rng = rng
        self.counts = counts
        self.output: list[str] = []
        self.disconnected: list[int] = []

    def live(self, kills: int) -> None:
        """Run the training."""
        with (tempfile.TemporaryDirectory(prefix='elastic-kills-') as name,
              Hosts([1] * HOSTS) as self.hosts):
            self.folder = pathlib.Path(name)
            options = ['--min-ranks', MIN_RANKS, '--grow-after', 5, '--max-restarts', 1000,
                       '--startup', 0]
            with self.hosts.popen([*options, os.path.abspath(__file__), '--work', name],
                                  is_elastic=True) as self.process:
                reader = threading.Thread(target=self.read)
                reader.start()
                try:
                    self.wait_for_start(0)
                    for _ in range(kills):
                        self.kill()
                    while self.disconnected:
                        self.restore()
                    (self.folder / 'finish').touch()
                    self.process.wait(timeout=seconds(WITHIN))
                except subprocess.TimeoutExpired:
                    raise AssertionError(''.join(self.output)) from None
                finally:
                    self.process.terminate()
                    reader.join()
            assert self.process.returncode == 0, ''.join(self.output)
            self.check_samples()
        self.counts['jobs succeeded'] += 1

    def read(self) -> None:
        """Read the output of the job."""
        assert self.process.stdout is not None
        self.output.extend(self.process.stdout)

    def wait_for_start(self, n: int) -> None:
        """Wait for a start after the first ``n``."""
        end = time.monotonic() + seconds(WITHIN)
        while len(starts(self.folder)) <= n:
            assert self.process.poll() is None, ''.join(self.output)
            assert time.monotonic() < end, ''.join(self.output)
            time.sleep(.1)

    def kill(self) -> None:
        """Kills a rank or disconnects a host, at a random moment, and waits for the restart."""
        from chainermn.extensions._checkpointing.command import verify_folder

        time.sleep(self.rng.uniform(0, 5))
        while self.disconnected and self.rng.random() < .4:
            self.restore()
            time.sleep(self.rng.uniform(0, 20))
        before = starts(self.folder)
        host, pid = self.rng.choice(list(before[-1].pids.items()))
        newest = max([row.iteration or 0 for row in verify_folder(str(self.folder))
                      if not row.problems], default=0)
        can_disconnect = len(self.disconnected) < HOSTS - MIN_RANKS
        if can_disconnect and host not in self.disconnected and self.rng.random() < .5:
            self.hosts.cut(host)
            self.disconnected.append(host)
            self.counts['hosts disconnected'] += 1
        else:
            with self.hosts.start(host, ['kill', '-KILL', str(pid)], stderr=-3) as process:
                process.wait()
            if process.returncode:  # it has just ended, to restart with more ranks
                return self.kill()
            self.counts['ranks killed'] += 1
        self.counts['kills'] += 1
        self.wait_for_start(len(before))
        after = starts(self.folder)[len(before)]
        assert after.iteration >= newest, f'{newest} was lost: {after}'
        self.counts[f'starts with {len(after.pids)} ranks'] += 1
        return None

    def restore(self) -> None:
        """Connect a host again."""
        self.hosts.restore(self.disconnected.pop(self.rng.randrange(len(self.disconnected))))

    def check_samples(self) -> None:
        """Assert that all samples were seen in each epoch, and only a few twice."""
        begun = starts(self.folder)
        batches: dict[int, dict[int, list[str]]] = collections.defaultdict(
            lambda: collections.defaultdict(list))  # by iteration and attempt
        for attempt, iteration, words in re.findall(
                r'^batch (\d+) (\d+) (.*)$', (self.folder / 'log').read_text(), re.M):
            batches[int(iteration)][int(attempt)].append(words)
        seen: dict[int, collections.Counter[int]] = collections.defaultdict(collections.Counter)
        resumed: collections.Counter[int] = collections.Counter()
        last = -1
        # Earlier attempts can have been further than the end of the last one.
        end = max(iteration for iteration, ranks in batches.items() if len(begun) - 1 in ranks)
        # Backwards: an attempt resumed from the last one before it that had made all steps before.
        counting = [len(begun) - 1] * (end + 1)
        for iteration in reversed(range(len(counting))):
            attempt = counting[min(iteration + 1, len(counting) - 1)]
            if iteration < begun[attempt].iteration:
                attempt = max((n for n, ranks in batches[iteration].items() if n < attempt
                               and len(ranks) == len(begun[n].pids)), default=-1)
            assert attempt >= 0, f'iteration {iteration} was lost: {begun}'
            counting[iteration] = attempt
        for iteration, attempt in enumerate(counting):
            taken = batches[iteration][attempt]
            assert len(taken) == len(begun[attempt].pids), f'iteration {iteration}: {begun}'
            self.counts['iterations'] += 1
            self.counts['iterations repeated'] += len(batches[iteration]) > 1
            epochs = set()
            for words in taken:
                for epoch, sample in re.findall(r'(\d+):(\d+)', words):
                    seen[int(epoch)][int(sample)] += 1
                    epochs.add(int(epoch))
            resumed[min(epochs)] += attempt != last
            last = attempt
        for epoch in sorted(seen)[:-1]:  # the last one has just begun
            assert set(seen[epoch]) == set(range(SAMPLES)), f'lost in epoch {epoch}: {begun}'
            # All ranks have equally many samples, so some are seen twice.
            repeated = seen[epoch].total() - SAMPLES
            assert repeated <= (HOSTS - 1) * (1 + resumed[epoch]), f'epoch {epoch}: {seen[epoch]}'
            self.counts['samples to fill batches'] += repeated
            self.counts['epochs'] += 1


def run(kills: int, jobs: int, seed: int) -> collections.Counter[str]:
    """Run until that many kills; return counts of events."""
    counts: collections.Counter[str] = collections.Counter()
    parts = [min(KILLS_PER_JOB, kills - n) for n in range(0, kills, KILLS_PER_JOB)]

    def live(number: int) -> None:
        Job(random.Random(f'{seed} {number}'), counts).live(parts[number])
        print(dict(counts), flush=True)

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        for done in [pool.submit(live, number) for number in range(len(parts))]:
            done.result()
    return counts


def main() -> None:
    """Kills and reports."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--kills', type=int, default=100)
    parser.add_argument('--jobs', type=int, default=2, help='trainings at a time')
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--work', type=pathlib.Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args.work)
        return
    start = time.perf_counter()
    counts = run(args.kills, args.jobs, args.seed)
    print(', '.join(f'{count} {what}' for what, count in counts.items()))
    print(f'no sample was lost; {time.perf_counter() - start:.0f} s')


if __name__ == '__main__':
    main()
