"""Relation network with a Trainer: grouped convolution, F.repeat, AdamW, EarlyStoppingTrigger."""
import numpy as np
import chainer
import chainer.functions as F
import chainer.links as L
from chainer import training
from chainer.training import extensions


class Relation(chainer.Chain):
    def __init__(self, n_units):
        super(Relation, self).__init__()
        with self.init_scope():
            self.conv = L.Convolution2D(2, 4, 3, stride=2, nobias=True, groups=2)
            self.bn = L.BatchNormalization(4, initial_gamma=0.8)
            self.g = L.Linear(8, n_units)
            self.f = L.Linear(n_units, 2)

    def __call__(self, x):
        h = F.relu(self.bn(self.conv(x)))
        objects = F.transpose(F.reshape(h, (len(x), 4, -1)), (0, 2, 1))
        n = objects.shape[1]
        left = F.repeat(objects, n, axis=1)
        right = F.tile(objects, (1, n, 1))
        pairs = F.concat([left, right], axis=2)
        g = F.relu(self.g(F.reshape(pairs, (-1, 8))))
        return self.f(F.mean(F.reshape(g, (len(x), n * n, -1)), axis=1))


rng = np.random.RandomState(0)
t = rng.randint(2, size=72).astype('i')
x = (rng.rand(2, 2, 7, 7)[t] + 0.5 * rng.randn(72, 2, 7, 7)).astype('f')
data = chainer.datasets.TupleDataset(x, t)
model = L.Classifier(Relation(8))
optimizer = chainer.optimizers.Adam(alpha=0.02, weight_decay_rate=1e-3).setup(model)
optimizer.add_hook(chainer.optimizer_hooks.GradientClipping(1))
train, test = chainer.datasets.split_dataset(data, 54)
train_iter = chainer.iterators.SerialIterator(train, 9)
test_iter = chainer.iterators.SerialIterator(test, 9, repeat=False, shuffle=False)
stop = training.triggers.EarlyStoppingTrigger(max_trigger=(4, 'epoch'), patients=5)
trainer = training.Trainer(training.updaters.StandardUpdater(train_iter, optimizer), stop, out='.')
trainer.extend(extensions.Evaluator(test_iter, model))
trainer.extend(extensions.LogReport())
trainer.extend(extensions.PrintReport(['epoch', 'main/accuracy', 'main/loss']))
trainer.extend(extensions.PrintReport(['epoch', 'validation/main/loss']), name='validation')
trainer.run()
