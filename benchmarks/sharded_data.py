"""Samples per second from shards, compared with MosaicML Streaming and WebDataset.

Run it in an environment with ChainerMN; rivals that are not installed are skipped:
``python benchmarks/sharded_data.py [--rounds 5] [--samples 20000] [--svg FILE]``, after
``pip install mosaicml-streaming webdataset``.

Samples are digits: 64 float32 values and an int32 label, in shards of 2,000, on a local disk and in
the page cache. Each reader runs in one process, reads all samples in shuffled order, and returns
batches of 32 as arrays. The readers take turns; the ratio compares ChainerMN with the faster rival
in the same round. The second part measures a training step on one core with a reader that takes 80%
of the time of a step, relative to a step without a reader. The reader waits, as if for a disk, or
computes in pure Python.
"""

import importlib.util
import io
import itertools
import pathlib
import statistics
import tarfile
import time
from collections.abc import Callable, Iterator

import _rounds
import numpy as np
from _rounds import MOSAIC, V8, WEBDATASET

GOAL = 1.
STEP_GOAL = 1.05
BATCH, PER_SHARD = 32, 2000


class Alone:
    """A communicator of one rank."""

    rank, size = 0, 1

    def allgather_obj(self, obj: object) -> list[object]:
        """Return the object."""
        return [obj]


def samples(n: int) -> Iterator[tuple[np.ndarray, np.int32]]:
    """Yield random digits."""
    rng = np.random.RandomState(0)
    for i in range(n):
        yield rng.rand(64).astype('f'), np.int32(i % 10)


def write_npz(folder: pathlib.Path, n: int) -> None:
    """Write .npz files."""
    import chainermn

    chainermn.datasets.write_shards([*samples(n)], folder / 'train', PER_SHARD)


def read_npz(folder: pathlib.Path, epoch: int) -> int:
    """Read an epoch with ShardedIterator."""
    import chainer

    from chainermn.iterators import ShardedIterator

    iterator = ShardedIterator(str(folder / 'train-*.npz'), BATCH, Alone(), repeat=False,
                               seed=epoch)
    read = 0
    for batch in iterator:
        x, _ = chainer.dataset.concat_examples(batch)
        read += len(x)
    iterator.finalize()
    return read


def write_mosaic(folder: pathlib.Path, n: int) -> None:
    """Write MDS files."""
    from streaming import MDSWriter

    columns = {'x': 'ndarray:float32:64', 'y': 'int32'}
    with MDSWriter(out=str(folder), columns=columns, size_limit=PER_SHARD * 270) as out:
        for x, y in samples(n):
            out.write({'x': x, 'y': y})


def read_mosaic(folder: pathlib.Path, epoch: int) -> int:
    """Read an epoch with StreamingDataset."""
    import streaming

    streaming.base.util.clean_stale_shared_memory()
    data = streaming.StreamingDataset(
        local=str(folder), shuffle=True, batch_size=BATCH, shuffle_seed=epoch)
    read, batch = 0, []
    for sample in data:
        batch.append(sample)
        if len(batch) == BATCH:
            read += len(np.stack([each['x'] for each in batch]))
            np.stack([each['y'] for each in batch])
            batch.clear()
    return read + len(batch)


def write_webdataset(folder: pathlib.Path, n: int) -> None:
    """Write tar files."""
    numbered = enumerate(samples(n))
    for shard in range(-(-n // PER_SHARD)):
        with tarfile.open(folder / f'train-{shard:05}.tar', 'w') as archive:
            for i, (x, y) in itertools.islice(numbered, PER_SHARD):
                buffer = io.BytesIO()
                np.save(buffer, x)
                for name, data in (('x.npy', buffer.getvalue()), ('y.cls', str(y).encode())):
                    info = tarfile.TarInfo(f'{i:08}.{name}')
                    info.size = len(data)
                    archive.addfile(info, io.BytesIO(data))


def read_webdataset(folder: pathlib.Path, epoch: int) -> int:
    """Read an epoch with WebDataset."""
    import webdataset

    urls = sorted(map(str, folder.glob('*.tar')))
    data = webdataset.WebDataset(urls, shardshuffle=len(urls), seed=epoch).shuffle(
        8 * PER_SHARD).decode().to_tuple('x.npy', 'y.cls').batched(BATCH)
    return sum(len(x) for x, _ in data)


READERS: dict[str, tuple[str, Callable[..., None], Callable[..., int]]] = {
    V8: ('chainermn', write_npz, read_npz),
    MOSAIC: ('streaming', write_mosaic, read_mosaic),
    WEBDATASET: ('webdataset', write_webdataset, read_webdataset),
}


class SlowShard:
    """A shard that takes some time to read each sample.

    Args:
        seconds: Seconds per sample.
        is_busy: Whether reading computes in Python; otherwise, it waits.
    """

    def __init__(self, seconds: float, is_busy: bool) -> None:
        self._seconds, self._is_busy = seconds, is_busy

    def __len__(self) -> int:
        return 1000

    def __getitems__(self, indexes: list[int]) -> list[np.ndarray]:
        """Compute or wait, then return the samples."""
        end = time.perf_counter() + self._seconds * len(indexes)
        if not self._is_busy:
            time.sleep(end - time.perf_counter())
        while time.perf_counter() < end:
            pass
        return [np.zeros(64, 'f') for _ in indexes]

    def __getitem__(self, i: int) -> np.ndarray:
        return self.__getitems__([i])[0]


#: For each reader: whether it computes in Python, and its number of processes.
STEPS = {'waits, in a thread': (False, 0), 'computes in Python, in a thread': (True, 0),
         'computes in Python, in a process': (True, 1)}


def step_ratio(n_steps: int, kind: str) -> float:
    """Return the time of a step with a slow reader, relative to one without."""
    from chainermn.iterators import ShardedIterator

    is_busy, n_processes = STEPS[kind]
    weights = np.random.RandomState(0).rand(500, 500).astype('f')

    def step() -> None:
        for _ in range(12):
            weights @ weights

    def timed(work: Callable[[], object]) -> float:
        times = []
        for _ in range(n_steps):
            start = time.perf_counter()
            work()
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    step()
    alone = timed(step)
    iterator = ShardedIterator([SlowShard(.8 * alone / BATCH, is_busy)], BATCH, Alone(),
                               n_processes=n_processes)
    next(iterator)
    together = timed(lambda: (next(iterator), step()))
    iterator.finalize()
    return together / ((alone + timed(step)) / 2)


def work(kind: str, folder: str) -> None:
    """In the processes of a group: write the shards, then time an epoch per turn."""
    _, write, read = READERS[kind]
    shards = pathlib.Path(folder) / f'shards of {kind}'

    def turn(command: tuple[str, int, int]) -> float:
        what, n, epoch = command
        if what == 'write':
            shards.mkdir()
            write(shards, n)
            return 0.
        if what in STEPS:
            return step_ratio(n, what)
        start = time.perf_counter()
        assert read(shards, epoch) == n, (read, n)
        return time.perf_counter() - start

    _rounds.answer(kind, folder, 0, turn)


def main() -> None:
    """Run the benchmark and print the results."""
    parser = _rounds.parser(__doc__, rounds=5)
    parser.add_argument('--samples', type=int, default=20_000, help='default: %(default)s')
    args = parser.parse_args()
    if args.work:
        work(args.work, args.folder)
        return
    n, rounds = (4000, 1) if args.quick else (args.samples, args.rounds)
    kinds = [kind for kind, (module, *_) in READERS.items() if importlib.util.find_spec(module)]
    for kind in READERS:
        if kind not in kinds:
            print(f'{kind} is skipped: it is not installed')
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    steps: dict[str, list[float]] = {kind: [] for kind in STEPS}
    with _rounds.groups(__file__, 1, kinds) as groups:
        for kind in kinds:
            groups[kind].ask(('write', n, 0))
        for i in range(rounds + 1):  # the first one fills the caches
            for kind in kinds if i % 2 else kinds[::-1]:
                seconds = groups[kind].ask(('read', n, i))
                if i or args.quick:
                    times[kind].append(seconds)
            if i or args.quick:
                for kind, found in steps.items():
                    found.append(groups[V8].ask((kind, 5 if args.quick else 20, 0)))
    rivals = [min(each) for each in zip(*(times[kind] for kind in kinds[1:]), strict=True)]
    _rounds.table(['reader', 'samples per second'], (
        [kind, round(n / statistics.median(each))] for kind, each in times.items()))
    _rounds.table(['reader', 'step / step without a reader'], (
        [kind, statistics.median(each)] for kind, each in steps.items()))
    for kind, each in steps.items():
        print(f'{kind}: {min(each):.3f} to {max(each):.3f} times; goal {STEP_GOAL:g}')
    if rivals:
        print(f'time of {V8} over the faster one: {_rounds.times(times[V8], rivals)}; '
              f'goal {GOAL:g}')
    print(_rounds.load())
    if args.svg:
        _rounds.chart(args.svg, 'Reading shards', 'thousand samples per second', {
            kind: {'all samples, shuffled': [n / seconds / 1000 for seconds in each]}
            for kind, each in times.items()})


if __name__ == '__main__':
    main()
