"""Changes in Python since Chainer 7.8.1."""

from chainer_compat.fixes import start_method
from chainer_compat.patching.registry import edit


@edit('chainer.iterators.multiprocess_iterator')
def set_daemon() -> dict[str, str]:
    """Python >= 3.10 deprecates ``Thread.setDaemon``, used by MultiprocessIterator."""
    return {'thread.setDaemon(True)': 'thread.daemon = True'}


@edit('chainer.iterators.multiprocess_iterator', 'chainer.training.extensions.snapshot_writers',
      'chainer.training.updaters.multiprocess_parallel_updater')
def fork_by_default() -> dict[str, str]:
    """Python >= 3.14 starts processes by forkserver by default, but scripts were written for fork.

    Chainer uses fork unless the program calls ``multiprocessing.set_start_method``.
    """
    if not start_method.is_forkserver_default():
        return {}
    start_method.distinguish_default()
    return {'import multiprocessing\n':
            'from chainer_compat.fixes.start_method import for_chainer as multiprocessing\n'}
