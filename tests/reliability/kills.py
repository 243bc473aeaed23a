"""Kills a training that checkpoints every step, again and again, and checks where it resumes.

``python tests/reliability/kills.py [--kills 500] [--jobs 2] [--seed 0]`` trains a small network on
two processes: with Adam or MomentumSGD, at random with overlap, sharded states or accumulated
gradients, so that states are copied while the training continues. Each is killed (SIGKILL: one
rank, or all) at a random moment and started again, until a training finishes; then another one
begins. After every kill

- no file may be damaged, and only the newest checkpoint may be incomplete,
- the next start must resume from the newest complete checkpoint, or begin if there is none,

and the parameters at the end must be bitwise equal to those of an undisturbed training.
"""
from __future__ import annotations

import argparse
import collections
import concurrent.futures
import hashlib
import os
import queue
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from time_limits import seconds

RANKS = 2

#: Optimizer, and options of the multi-node optimizer.
OPTIONS: dict[str, tuple[str, dict[str, object]]] = {
    'plain': ('MomentumSGD', {}),
    'adam': ('Adam', {}),
    'overlap': ('Adam', {'overlap': 'always'}),
    'shards': ('Adam', {'shard_states': True}),
    'accumulation': ('MomentumSGD', {'n_accumulations': 3}),
}


def work(folder: str, steps: int, options: str) -> None:
    """Trains, in a rank."""
    import warnings

    warnings.simplefilter('ignore')
    import chainer
    import numpy as np

    import chainermn
    from chainermn._process import clean_end
    from chainermn.extensions._checkpointing.command import verify_folder

    comm = chainermn.create_communicator('naive')
    say(f'rank {comm.rank} is {os.getpid()}')
    np.random.seed(comm.rank)
    data = np.random.RandomState(5).normal(0, 1, (200, 8)).astype(np.float32)
    examples = chainer.datasets.TupleDataset(data, (data.sum(axis=1) > 0).astype(np.int32))
    part = chainermn.scatter_dataset(examples, comm)
    model = chainer.links.Classifier(chainer.Sequential(
        chainer.links.Linear(8, 128), chainer.links.BatchNormalization(128),
        chainer.functions.relu, chainer.functions.dropout,
        chainer.links.Linear(128, 300), chainer.functions.relu,  # 150 KB: its states are large
        chainer.links.Linear(300, 2)))
    name, arguments = OPTIONS[options]
    optimizer = chainermn.create_multi_node_optimizer(
        getattr(chainer.optimizers, name)(0.01), comm, **arguments).setup(model)
    updater = chainer.training.StandardUpdater(
        chainer.iterators.SerialIterator(part, 7), optimizer)
    trainer = chainer.training.Trainer(updater, (steps, 'iteration'), out=folder)
    checkpointer = chainermn.create_multi_node_checkpointer('run', comm)
    trainer.extend(checkpointer, trigger=(1, 'iteration'))
    checkpointer.maybe_load(trainer, optimizer)
    if comm.rank == 0:
        start = updater.iteration
        rows = [row for row in verify_folder(folder)
                if row.name == f'run.0.{start}'] if start else []
        is_complete = not start or (rows and not rows[0].problems)
        say(f'starts at {start} {"complete" if is_complete else "incomplete"}')
    clean_end.add(lambda: say('has ended'))  # the files are removed after this
    trainer.run()
    arrays = [*(param.array for _, param in sorted(model.namedparams())),
              model.predictor[1].avg_mean, model.predictor[1].avg_var]
    digest = hashlib.sha256(b''.join(
        array.tobytes() for array in comm.bcast_obj(arrays))).hexdigest()
    say(f'ends with {digest}')


def say(text: str) -> None:
    """Print a line in one write, so that lines of ranks do not mix."""
    os.write(1, f'{text}\n'.encode())


class Life:
    """One training, from its first start to its end, with all its kills."""

    def __init__(self, rng: random.Random, steps: int, counts: collections.Counter[str],
                 may_kill: threading.Semaphore, options: str) -> None:
        self.rng = rng
        self.steps = steps
        self.options = options
        self.patience = 1.  # seconds from the start of training to a kill, at most
        self.counts = counts
        self.may_kill = may_kill

    def live(self) -> str:
        """Return the digest of the parameters at the end."""
        newest = 0
        with tempfile.TemporaryDirectory(prefix='kills-') as folder:
            while True:
                kills = self.may_kill.acquire(blocking=False)
                output, succeeded = self.start(folder, kills)
                start = re.search(r'starts at (\d+) (.*)', output)
                if start is not None:
                    assert start[2] == 'complete', output
                    assert int(start[1]) == newest, f'lost {newest}: {output}'
                    self.counts['resumed'] += int(start[1]) > 0
                ends = re.findall(r'ends with (\w+)', output)
                if len(ends) == RANKS and succeeded:
                    self.counts['trainings'] += 1
                    assert len(set(ends)) == 1, output
                    return ends[0]
                assert kills, f'ended by itself: {output}'
                newest = self.check(folder, 'has ended' in output)
                if not newest:  # this machine is slow: it would never get further
                    self.patience *= 1.5

    def start(self, folder: str, kills: bool) -> tuple[str, bool]:
        """Start the training and kill it; return its output, and whether it succeeded."""
        process = subprocess.Popen(
            ['mpiexec', '-n', str(RANKS), sys.executable, os.path.abspath(__file__),
             '--work', folder, '--steps', str(self.steps), '--options', self.options],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, 'OMP_NUM_THREADS': '1'})
        lines: list[str] = []
        arrived: queue.Queue[str | None] = queue.Queue()

        def read() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                lines.append(line)
                arrived.put(line)
            process.stdout.close()
            arrived.put(None)

        reader = threading.Thread(target=read)
        reader.start()
        if kills:
            self.kill(arrived)
        process.wait(timeout=seconds(120))
        reader.join()
        return ''.join(lines), process.returncode == 0

    def kill(self, arrived: queue.Queue[str | None]) -> None:
        """Wait for a random moment, mostly after the training resumed, and kills."""
        event = self.rng.choice(['is'] + 9 * ['starts'])
        pids: dict[int, int] = {}
        while line := arrived.get():
            if found := re.match(r'rank (\d+) is (\d+)', line):
                pids[int(found[1])] = int(found[2])
            if len(pids) == RANKS and event in line.split():
                break
        time.sleep(self.rng.uniform(0, 0.7 if event == 'is' else self.patience))
        victims = self.rng.choice([*([rank] for rank in range(RANKS)), list(range(RANKS))])
        for rank in victims:
            try:
                os.kill(pids[rank], signal.SIGKILL)
            except (KeyError, ProcessLookupError):
                self.counts['too late'] += 1
                self.may_kill.release()
                return
        self.counts['kills'] += 1
        self.counts['of all ranks' if len(victims) > 1 else f'of rank {victims[0]}'] += 1

    def check(self, folder: str, has_ended: bool) -> int:
        """Assert that no file is damaged; return the newest complete checkpoint."""
        from chainermn.extensions._checkpointing.command import Row, verify_folder

        rows = verify_folder(folder)
        saves = [row for row in rows if row.iteration is not None]
        complete = [row.iteration or 0 for row in saves if not row.problems]
        newest = max(complete, default=0)

        def is_expected(row: Row) -> bool:
            """Whether the missing files belong to checkpoints being written or removed."""
            oldest = min(complete, default=0)
            return all(problem.endswith((': the file is missing', 'checkpoint than the first file'))
                       for problem in row.problems) and (
                has_ended or not oldest <= (row.iteration or 0) <= newest)

        assert all(not row.problems or is_expected(row) for row in saves), '\n'.join(map(str, rows))
        assert all(row.name.startswith('tmp-') for row in rows if row.iteration is None), rows
        self.counts['while a file was written'] += any(
            row.name.startswith('tmp-') for row in rows)
        self.counts['after the end'] += has_ended
        self.counts['saves verified'] += len(complete)
        self.counts['incomplete saves'] += len(saves) - len(complete)
        return newest


def run(kills: int, jobs: int, seed: int, steps: int) -> collections.Counter[str]:
    """Run until that many kills; return counts of events."""
    counts: collections.Counter[str] = collections.Counter()
    expected = {options: Life(random.Random(seed), steps, counts, threading.Semaphore(0),
                              options).live() for options in OPTIONS}
    budget = threading.Semaphore(kills)

    def lives(job: int) -> None:
        rng = random.Random(f'{seed} {job}')
        while counts['kills'] < kills:
            options = rng.choice([*OPTIONS])
            assert Life(rng, steps, counts, budget, options).live() == expected[options], options
            print(dict(counts), flush=True)

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        for done in [pool.submit(lives, job) for job in range(jobs)]:
            done.result()
    return counts


def main() -> None:
    """Kills and reports."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--kills', type=int, default=500)
    parser.add_argument('--jobs', type=int, default=2, help='number of jobs at a time')
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--steps', type=int, default=200, help='steps of each job')
    parser.add_argument('--work', help=argparse.SUPPRESS)
    parser.add_argument('--options', help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args.work, args.steps, args.options)
        return
    start = time.perf_counter()
    counts = run(args.kills, args.jobs, args.seed, args.steps)
    assert counts['resumed'] and counts['saves verified'], counts
    print(', '.join(f'{count} {what}' for what, count in counts.items()))
    print(f'0 lost saves, all results bitwise equal; {time.perf_counter() - start:.0f} s')


if __name__ == '__main__':
    main()
