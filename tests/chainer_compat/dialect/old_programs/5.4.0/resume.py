"""Resumed training: shuffled data, intervals, ExponentialShift, snapshot_object of the optimizer."""
import numpy as np
import chainer
import chainer.functions as F
import chainer.links as L
from chainer import training
from chainer.training import extensions


class Net(chainer.Chain):
    def __init__(self):
        super(Net, self).__init__()
        with self.init_scope():
            self.lstm = L.LSTM(4, 6, forget_bias_init=0.5)
            self.out = L.Linear(6, 2)

    def forward(self, x):
        self.lstm.reset_state()
        for i in range(x.shape[1]):
            h = self.lstm(x[:, i])
        return self.out(F.dropout(h, 0.3))


def build(n_iterations):
    rng = np.random.RandomState(0)
    x = rng.randn(72, 5, 4).astype('f')
    t = (x.sum(axis=(1, 2)) > 0).astype('i')
    model = L.Classifier(Net())
    optimizer = chainer.optimizers.RMSprop(lr=0.02, eps_inside_sqrt=True)
    optimizer.setup(model)
    optimizer.add_hook(chainer.optimizer.GradientNoise(0.01))
    train, valid = chainer.datasets.split_dataset(chainer.datasets.TupleDataset(x, t), 48)
    train_iter = chainer.iterators.SerialIterator(train, 8)
    valid_iter = chainer.iterators.SerialIterator(valid, 8, repeat=False, shuffle=False)
    trainer = training.Trainer(training.StandardUpdater(train_iter, optimizer),
                               (n_iterations, 'iteration'), out='.')
    trainer.extend(extensions.Evaluator(valid_iter, model), trigger=(2, 'iteration'))
    trainer.extend(extensions.ExponentialShift('lr', 0.8), trigger=(4, 'iteration'))
    trainer.extend(extensions.LogReport(trigger=(2, 'iteration')))
    trainer.extend(extensions.observe_lr())
    for key in 'lr', 'main/loss', 'validation/main/loss':
        trainer.extend(extensions.PrintReport(['iteration', key]), trigger=(2, 'iteration'),
                       name=key)
    trainer.extend(extensions.snapshot_object(optimizer, 'optimizer'), trigger=(10, 'iteration'))
    trainer.extend(extensions.snapshot(filename='latest'), trigger=(10, 'iteration'))
    return trainer, optimizer


trainer, optimizer = build(10)
trainer.run()
trainer, optimizer = build(20)
chainer.serializers.load_npz('latest', trainer)
trainer.run()
other = build(1)[1]
chainer.serializers.load_npz('optimizer', other)
print('t', other.t)
