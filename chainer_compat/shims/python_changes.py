"""What Python removed or changed since Chainer 7.8.1."""

from chainer_compat._mend import edit


@edit('chainer.iterators.multiprocess_iterator')
def set_daemon() -> dict[str, str]:
    """Python >= 3.10 warns of ``Thread.setDaemon``, which MultiprocessIterator called."""
    return {'thread.setDaemon(True)': 'thread.daemon = True'}
