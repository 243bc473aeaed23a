"""Chainer's statistics of parameters whose gradients are accumulated."""
import chainer
import numpy as np

import chainermn


def test_accumulated_gradients(comm, folder):
    """Means over the iterations in which there are gradients."""
    model = chainer.Chain(used=chainer.links.Linear(2, 1), other=chainer.links.Linear(2, 1))
    model.name = 'model'
    optimizer = chainermn.create_multi_node_optimizer(
        chainer.optimizers.SGD(), comm, n_accumulations=3).setup(model)
    data = np.random.RandomState(comm.rank).rand(8, 2).astype('f')
    updater = chainer.training.StandardUpdater(
        chainer.iterators.SerialIterator(data, 1), optimizer,
        loss_func=lambda x: chainer.functions.sum(model.used(x)))
    trainer = chainer.training.Trainer(updater, (8, 'iteration'), out=folder)
    seen, reported = [], {}
    trainer.extend(lambda trainer: seen.append(model.used.W.grad), name='seen',
                   trigger=(1, 'iteration'), priority=1000)
    trainer.extend(chainer.training.extensions.ParameterStatistics(
        model, {'sum': np.sum}, trigger=(8, 'iteration')), trigger=(1, 'iteration'), priority=500)
    trainer.extend(lambda trainer: reported.update(trainer.observation), name='reported',
                   trigger=(8, 'iteration'))
    trainer.run()
    # The optimizer makes a new array for each mean.
    gradients = [each for each in seen if each is not None]
    assert 1 < len(gradients) < len(seen) == 8
    np.testing.assert_allclose(
        reported['model/used/W/grad/sum'], np.mean([each.sum() for each in gradients]), 1e-5)
    assert np.isfinite(reported['model/other/W/data/sum'])
