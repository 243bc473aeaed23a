"""Classifier with a Trainer: Chain(l1=...), Evaluator, LogReport, own extension, ExponentialShift."""
import json

import numpy as np
import chainer
import chainer.functions as F
import chainer.links as L
from chainer import training
from chainer.training import extensions


class MLP(chainer.Chain):
    def __init__(self, n_in, n_units, n_out):
        super(MLP, self).__init__(
            l1=L.Linear(n_in, n_units),
            l2=L.Linear(n_units, n_units, wscale=2),
            l3=L.Linear(n_units, n_out, bias=0.1),
        )

    def __call__(self, x):
        h1 = F.relu(self.l1(x))
        h2 = F.relu(self.l2(h1))
        return self.l3(h2)


class Watch(training.Extension):
    trigger = 5, 'iteration'
    priority = training.PRIORITY_READER
    invoke_before_training = True

    def __call__(self, trainer):
        optimizer = trainer.updater.get_optimizer('main')
        print('lr', optimizer.lr)
        if trainer.updater.iteration:
            print('watched', float(trainer.observation['main/loss'].data))


rng = np.random.RandomState(0)
y = rng.randint(5, size=150).astype('i')
x = (rng.rand(5, 20)[y] + 0.2 * rng.randn(150, 20)).astype('f')
train = chainer.datasets.TupleDataset(x[:100], y[:100])
test = chainer.datasets.TupleDataset(x[100:], y[100:])

model = L.Classifier(MLP(20, 16, 5))
optimizer = chainer.optimizers.MomentumSGD(lr=0.05)
optimizer.setup(model)
train_iter = chainer.iterators.SerialIterator(train, 10, shuffle=False)
test_iter = chainer.iterators.SerialIterator(test, 10, repeat=False, shuffle=False)
updater = training.StandardUpdater(train_iter, optimizer, device=-1)
trainer = training.Trainer(updater, (4, 'epoch'), out='result')
trainer.extend(extensions.Evaluator(test_iter, model, device=-1))
trainer.extend(extensions.dump_graph('main/loss'))
trainer.extend(extensions.ExponentialShift('lr', 0.9), trigger=(1, 'epoch'))
trainer.extend(extensions.snapshot(), trigger=(2, 'epoch'))
trainer.extend(extensions.snapshot_object(
    model, 'model_{.updater.iteration}', trigger=(2, 'epoch')))
trainer.extend(Watch())
trainer.extend(extensions.LogReport())
trainer.extend(extensions.PrintReport(
    ['epoch', 'main/accuracy', 'validation/main/accuracy', 'main/loss', 'validation/main/loss']))
trainer.run()

for entry in json.load(open('result/log')):
    print('main/loss', entry['main/loss'])
    print('validation/main/loss', entry['validation/main/loss'])
