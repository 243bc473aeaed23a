"""Chainer's iterators give every example, in order, however their processes start."""

import sys

import numpy as np
import pytest
from chainer import iterators

pytestmark = pytest.mark.mpi_skip

# Compares, in a process of its own, what the iterator gives with what SerialIterator gives.
MAIN = '''
import multiprocessing, sys, time, warnings
import chainer, numpy
from chainer import iterators, serializers

class Squares(chainer.dataset.DatasetMixin):
    """Its examples are pairs of an array and a number."""

    def __len__(self):
        return 10

    def get_example(self, i):
        return numpy.full((2, 3), i * i, 'f'), i

class Late(Squares):
    def get_example(self, i):
        time.sleep(.3)
        return super().get_example(i)

def numbers(batch):
    for array, i in batch:
        assert (array == i * i).all() and array.shape == (2, 3)
    return [i for _, i in batch]

def epochs(iterator):
    return [(numbers(iterator.next()), iterator.epoch, iterator.is_new_epoch) for _ in range(6)]

def main():
    multiprocessing.set_start_method(sys.argv[1])
    # Each is started from a thread, of which Python >= 3.12 warns, rightly, where it forks.
    warnings.filterwarnings('ignore', '.* multi-threaded, use of fork', DeprecationWarning)
    data = Squares()
    several = [{}, {'n_prefetch': 3}] * (sys.argv[1] == 'fork')
    for options in [{'shared_mem': 10000}, *several]:
        numpy.random.seed(0)
        serial = epochs(iterators.SerialIterator(data, 4))
        numpy.random.seed(0)
        iterator = iterators.MultiprocessIterator(data, 4, n_processes=2, **options)
        assert epochs(iterator) == serial
        written = serializers.DictionarySerializer()
        iterator.serialize(written)
        following = numbers(iterator.next())
        iterator.serialize(serializers.NpzDeserializer(written.target))
        assert numbers(iterator.next()) == following
        iterator.finalize()
    late = iterators.MultiprocessIterator.TimeoutWarning
    with warnings.catch_warnings(record=True) as recorded, iterators.MultiprocessIterator(
            Late(), 1, repeat=False, n_processes=1, dataset_timeout=.1) as iterator:
        warnings.simplefilter('always', late)
        assert len(numbers(iterator.next())) == 1
    assert late in {warning.category for warning in recorded}

if __name__ == '__main__':
    main()
'''


@pytest.mark.slow
def test_start_methods(python, tmp_path, start_method):
    tmp_path.joinpath('main.py').write_text(MAIN)
    python('import subprocess, sys; '
           f'subprocess.run([sys.executable, "-Werror", "main.py", {start_method!r}], check=True)')


@pytest.fixture(params=['fork', 'forkserver', 'spawn'])
def start_method(request):
    if sys.platform == 'win32' and request.param != 'spawn':
        pytest.skip('Windows knows spawn only')
    return request.param


KILLED = '''
import os, warnings
import chainer
warnings.filterwarnings('ignore', '.* multi-threaded, use of fork', DeprecationWarning)

class Deadly(chainer.dataset.DatasetMixin):
    def __len__(self):
        return 4

    def get_example(self, i):
        if i == 3:
            os.kill(os.getpid(), 9)
        return i

iterator = chainer.iterators.MultiprocessIterator(Deadly(), 2, shuffle=False, n_processes=2)
assert iterator.next() == [0, 1]
iterator.next()
'''


def test_a_worker_that_is_killed(python):
    said = python(KILLED, check=False)
    assert 'of a MultiprocessIterator died with exit code -9; its batch is lost' in said


ERRORS = '''
import sys, threading, warnings
import chainer
from chainer.iterators import MultiprocessIterator, MultithreadIterator, SerialIterator
warnings.filterwarnings('ignore', '.* multi-threaded, use of fork', DeprecationWarning)
threading.excepthook = lambda args: sys.exit(f'a thread failed: {args}')

class Failing(chainer.dataset.DatasetMixin):
    def __init__(self, index, error):
        self.index, self.error = index, error

    def __len__(self):
        return 8

    def get_example(self, i):
        if i == self.index:
            raise self.error
        return i

def batches(iterator):
    for _ in range(5):
        try:
            yield iterator.next()
        except StopIteration:
            yield 'end'
        except Exception as error:
            yield type(error), str(error)

for index, error, said in [
        (1, ValueError('no file'), (ValueError, 'no file')),
        (7, ValueError('no file'), (ValueError, 'no file')),
        *[(i, StopIteration(), (RuntimeError, f'example {i} of the dataset (Failing) raised Stop'))
          for i in (0, 3)]]:
    expected = [[0, 1], [2, 3], [4, 5], [6, 7], 'end']
    expected[index // 2] = said
    for kind, options in [
            (SerialIterator, {}), (MultithreadIterator, {'n_threads': 2}),
            (MultiprocessIterator, {'n_processes': 2}),
            (MultiprocessIterator, {'n_processes': 1, 'n_prefetch': 3, 'dataset_timeout': None}),
            (MultiprocessIterator, {'n_processes': 1, 'shared_mem': 1000})]:
        with kind(Failing(index, error), 2, repeat=False, shuffle=False, **options) as iterator:
            found = list(batches(iterator))
        found = [(b[0], b[1][:len(said[1])]) if type(b) is tuple else b for b in found]
        assert found == expected, (kind, options, found, expected)
'''


def test_errors_in_examples(python):
    """All iterators raise the error, and then continue with the next batch."""
    python(ERRORS)


AT_EXIT = '''
import time, warnings
from chainer.iterators import MultiprocessIterator, MultithreadIterator
warnings.filterwarnings('ignore', '.* multi-threaded, use of fork', DeprecationWarning)
warnings.filterwarnings('ignore', category=ResourceWarning)
class Slow(list):
    def __getitem__(self, i):
        time.sleep(100 if i == 3 else 0)
        return i

kept = []
for data in [1, 2, 3, 4], Slow(range(4)):
    for started in 0, 1, 1, 1:
        iterators = [MultiprocessIterator(data, 2, n_processes=1, shuffle=False),
                     MultithreadIterator([1, 2, 3, 4], 2, n_threads=1)]
        kept += iterators
        for iterator in iterators * started:
            iterator.next()
'''


def test_global_iterators_at_exit(python):
    assert python(AT_EXIT) == ''


@pytest.mark.parametrize('size', [0, -1, 2., np.float64(2)])
def test_batch_sizes(size):
    for iterator in (iterators.SerialIterator, iterators.MultithreadIterator,
                     iterators.MultiprocessIterator):
        with pytest.raises(ValueError, match=f'{iterator.__name__}: batch_size must be a positive'):
            iterator([1, 2, 3], size)
    assert len(iterators.SerialIterator([1, 2, 3], np.int64(2)).next()) == 2


def test_empty_datasets():
    for kind in (iterators.SerialIterator, iterators.MultithreadIterator,
                 iterators.MultiprocessIterator):
        iterator = kind([], 2)
        assert iterator.epoch_detail == 0
        with pytest.raises(ValueError, match=r'repeat=True is empty, .* Check len'):
            iterator.next()
        iterator.finalize()
    # MultiprocessIterator would fork in a process with threads, of which Python warns.
    for kind in iterators.SerialIterator, iterators.MultithreadIterator:
        iterator = kind([], 2, repeat=False)
        assert [*iterator] == []
        iterator.finalize()
