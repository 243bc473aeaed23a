"""Errors of iterators: in the dataset, in worker processes, and at exit."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import weakref
from typing import Any

from chainer_compat.patching.registry import edit, patch


@edit('chainer.iterators.serial_iterator', 'chainer.iterators.multithread_iterator',
      'chainer.iterators.multiprocess_iterator')
def stop_iteration_in_example() -> dict[str, str]:
    """All versions: StopIteration in an example ended the batch or the epoch early.

    The rest of the examples were lost without an error.
    """
    begin = 'from chainer_compat.fixes.examples import example; '
    return {
        'batch = [self.dataset[index] for index in indices]':
            begin + 'batch = [example(self.dataset, index) for index in indices]',
        'return dataset[index]': begin + 'return example(dataset, index)',
        'data = _fetch_dataset[index]': begin + 'data = example(_fetch_dataset, index)',
    }


@edit('chainer.iterators.serial_iterator', 'chainer.iterators.multithread_iterator',
      'chainer.iterators.multiprocess_iterator')
def empty_batches() -> dict[str, str]:
    """All versions: iterators accepted batch_size=0, and the updater raised "batch is empty".

    With a float, the first batch raised TypeError. Now both raise ValueError when the iterator is
    created.
    """
    return {
        'self.batch_size = batch_size':
            'from chainer_compat.fixes.examples import checked_batch_size; '
            'self.batch_size = checked_batch_size(self, batch_size)',
    }


@edit('chainer.iterators.serial_iterator', 'chainer.iterators.multithread_iterator',
      'chainer.iterators.multiprocess_iterator')
def progress_of_empty_datasets() -> dict[str, str]:
    """All versions: with an empty dataset, ``epoch_detail`` raised ZeroDivisionError.

    So did the first batch of a SerialIterator, even with repeat=False.
    """
    return {'self.current_position / self._epoch_size': 'self.current_position / max('
                                                        '1, self._epoch_size)'}


@edit('chainer.iterators._statemachine')
def empty_datasets() -> dict[str, str]:
    """All versions: with an empty dataset and repeat=False, the first batch was empty.

    Now there is no batch. With repeat=True, the error did not mention the dataset.
    """
    return {
        'if not repeat and epoch > 0:':
            'if not repeat and (epoch > 0 or not (dataset_len if order is None else len(order))):',
        "raise ValueError('Epoch size must be positive for an iterator '\n"
        "                         'that repeats.')":
            'from chainer_compat.fixes.examples import no_examples; raise no_examples(\n'
            '                )',
    }


@edit('chainer.iterators.multiprocess_iterator')
def error_in_first_batch() -> dict[str, str]:
    """All versions: an error in the first batch of MultiprocessIterator became a TypeError."""
    return {
        'batch_ret[0] = [self.dataset[idx] for idx in indices]':
            'from chainer_compat.fixes.examples import Batch; '
            'batch_ret[0] = Batch(self.dataset, indices)',
        'batch = batch_ret[0]\n': 'batch = batch_ret[0].get()\n',
    }


@patch('chainer.iterators.multiprocess_iterator')
def error_in_later_batch(multiprocess_iterator: Any) -> None:
    """All versions: MultiprocessIterator hung forever if a later batch raised an error.

    The thread that prefetches batches ended, and the iterator waited for its batches.
    """
    loop, iterator = multiprocess_iterator._PrefetchLoop, multiprocess_iterator.MultiprocessIterator
    run_original, next_original = loop._run, iterator.__next__

    def run(self: Any) -> None:
        try:
            run_original(self)
        except Exception as error:
            self._comm.put(_Failure(error), self.prefetch_state, self._comm._reset_count)

    def next_batch(self: Any) -> Any:
        batch = next_original(self)
        if not isinstance(batch, _Failure):
            return batch
        # The next call starts workers again, which continue after this batch.
        self._prefetch_loop._thread = self._prefetch_loop._pool = None
        raise batch.error

    loop._run = run
    iterator.__next__ = iterator.next = next_batch


class _Failure:
    """An error, passed to the consumer in place of a batch."""

    def __init__(self, error: Exception) -> None:
        self.error = error


@patch('chainer.iterators.multiprocess_iterator')
def dead_worker(multiprocess_iterator: Any) -> None:
    """All versions: MultiprocessIterator hung forever if a worker was killed by a signal.

    The pool starts a new worker, but the batch of the old one is lost.
    """
    loop = multiprocess_iterator._PrefetchLoop
    run_task = loop._task

    def task(self: Any) -> Any:
        if 'map_async' not in vars(self._pool):
            self._pool.map_async = _detect_dead_workers(self._pool)
        return run_task(self)

    loop._task = task


def _detect_dead_workers(pool: Any) -> Any:
    """Wrap the pool's ``map_async``: ``get`` raises an error if a worker has died."""
    map_async = pool.map_async

    def checked_map_async(*args: Any) -> Any:
        workers = list(pool._pool)
        future = map_async(*args)
        get = future.get

        def get_or_raise(timeout: float) -> Any:
            try:
                return get(timeout)
            except multiprocessing.TimeoutError:
                dead = [worker for worker in workers if worker.exitcode is not None]
                if not dead or future.ready():
                    raise
            pool.terminate()  # closing it would wait for the lost batch
            why = ('' if dead[0].exitcode != -signal.SIGKILL else
                   ' Usually, memory ran out: reduce n_processes.')
            raise RuntimeError(
                f'Worker process {dead[0].pid} of a MultiprocessIterator died with exit code '
                f'{dead[0].exitcode}; its batch is lost.{why}')

        future.get = get_or_raise
        return future

    return checked_map_async


_started: weakref.WeakSet[Any] = weakref.WeakSet()
os.register_at_fork(after_in_child=_started.clear)  # the workers belong to the parent process


@patch('chainer.iterators.multiprocess_iterator', 'chainer.iterators.multithread_iterator')
def iterators_at_exit(module: Any) -> None:
    """All versions: iterators in global variables printed an ignored exception at exit.

    They were finalized when parts of multiprocessing no longer existed.
    """
    iterator = getattr(module, 'MultiprocessIterator', None) or module.MultithreadIterator
    next_original = iterator.__next__

    def next_batch(self: Any) -> Any:
        _started.add(self)
        return next_original(self)

    iterator.__next__ = iterator.next = next_batch
    # Finalize before multiprocessing stops the workers. Registering again only changes the order.
    atexit.unregister(_finalize_all)
    atexit.register(_finalize_all)


def _finalize_all() -> None:
    for iterator in list(_started):
        loop = getattr(iterator, '_prefetch_loop', None)
        if loop is not None and loop._pool is not None:
            iterator._comm.terminate()
            loop._pool.terminate()  # finalize alone would wait for examples
        iterator.finalize()
