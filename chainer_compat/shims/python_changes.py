"""Changes in Python since Chainer 7.8.1."""

from chainer_compat._patch import edit


@edit('chainer.iterators.multiprocess_iterator')
def set_daemon() -> dict[str, str]:
    """Python >= 3.10 deprecates ``Thread.setDaemon``, used by MultiprocessIterator."""
    return {'thread.setDaemon(True)': 'thread.daemon = True'}
