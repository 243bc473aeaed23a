"""Training resumed from a snapshot of the trainer."""
import numpy as np
import chainer
import chainer.functions as F
import chainer.links as L
from chainer import serializers, training
from chainer.training import extensions


class Model(chainer.Chain):
    def __init__(self):
        super(Model, self).__init__(l1=L.Linear(5, 8), bn=L.BatchNormalization(8), l2=L.Linear(8, 1))
        self.add_persistent('n_calls', 0)

    def __call__(self, x, t):
        self.n_calls += 1
        loss = F.mean_squared_error(self.l2(F.sigmoid(self.bn(self.l1(x)))), t)
        chainer.report({'loss': loss}, self)
        return loss


class History(training.Extension):
    def __init__(self):
        self.losses = []

    def __call__(self, trainer):
        self.losses.append(float(trainer.observation['main/loss'].data))
        print(self.losses[-1])

    def serialize(self, serializer):
        losses = serializer('losses', np.array(self.losses) if self.losses else None)
        self.losses = losses.tolist() if losses is not None else []


def make_trainer(stop):
    rng = np.random.RandomState(0)
    x = rng.randn(60, 5).astype('f')
    data = chainer.datasets.TupleDataset(x, x.prod(axis=1, keepdims=True))
    model = Model()
    optimizer = chainer.optimizers.Adam(alpha=0.05)
    optimizer.setup(model)
    optimizer.add_hook(chainer.optimizer.WeightDecay(1e-4))
    iterator = chainer.iterators.SerialIterator(data, 12, shuffle=False)
    trainer = training.Trainer(
        training.StandardUpdater(iterator, optimizer), (stop, 'iteration'), out='.')
    trainer.extend(History(), trigger=(1, 'iteration'))
    trainer.extend(extensions.LinearShift('alpha', (0.05, 0.01), (2, 12)))
    trainer.extend(extensions.LogReport(trigger=(4, 'iteration')))
    trainer.extend(extensions.snapshot(filename='snapshot'), trigger=(7, 'iteration'))
    return trainer, model, optimizer


trainer, model, optimizer = make_trainer(7)
trainer.run()
resumed, model, optimizer = make_trainer(15)
serializers.load_npz('snapshot', resumed)
resumed.run()
print('calls', int(model.n_calls))
print('t', optimizer.t)
print('alpha', optimizer.alpha)
