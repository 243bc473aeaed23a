"""A trainer for tests of extensions: it trains a small classifier with identical examples."""
import chainer
import numpy as np

import chainermn


def make_trainer(comm, folder, stop, actual=None, length=4, batch_size=2, iterator=None, **options):
    """Return a trainer with ``length`` examples per rank; the optimizer gets ``options``.

    ``iterator`` may be a function of the dataset and the batch size that creates the iterator.
    """
    optimizer = chainermn.create_multi_node_optimizer(
        actual or chainer.optimizers.SGD(), comm, **options)
    optimizer.setup(chainer.links.Classifier(chainer.links.Linear(3, 2)))
    data = [(np.ones(3, np.float32), np.int32(0))] * length
    updater = chainer.training.StandardUpdater(
        (iterator or chainer.iterators.SerialIterator)(data, batch_size), optimizer)
    return chainer.training.Trainer(updater, stop, out=folder)
