"""Trainer: make_extension, MinValueTrigger, ManualScheduleTrigger, own extension."""
import numpy as np
import chainer
import chainer.functions as F
import chainer.links as L
from chainer import training
from chainer.training import extensions, triggers


class StepDecay(training.extension.Extension):
    def __init__(self, attr, factor):
        self.attr, self.factor, self.count = attr, factor, 0

    def initialize(self, trainer):
        self.optimizer = trainer.updater.get_optimizer('main')

    def __call__(self, trainer):
        self.count += 1
        setattr(self.optimizer, self.attr, getattr(self.optimizer, self.attr) * self.factor)
        print(self.attr, getattr(self.optimizer, self.attr))

    def serialize(self, serializer):
        self.count = serializer('count', self.count)


def build(n_iterations):
    rng = np.random.RandomState(0)
    x = rng.randn(64, 6).astype('f')
    t = (x[:, :3].sum(axis=1) > 0).astype('i')
    model = L.Classifier(chainer.ChainList(L.Linear(6, 8), L.Linear(8, 2)),
                         lossfun=F.softmax_cross_entropy)
    model.predictor.__class__.__call__ = lambda self, x: self[1](F.selu(self[0](x)))
    optimizer = chainer.optimizers.RMSprop(lr=0.02)
    optimizer.setup(model)
    data = chainer.datasets.TupleDataset(x, t)
    train, valid = chainer.datasets.split_dataset_random(data, 48, seed=3)
    train_iter = chainer.iterators.SerialIterator(train, 8, shuffle=False)
    valid_iter = chainer.iterators.SerialIterator(valid, 8, repeat=False, shuffle=False)
    trainer = training.Trainer(
        training.StandardUpdater(train_iter, optimizer), (n_iterations, 'iteration'), out='.')
    trainer.extend(extensions.Evaluator(valid_iter, model), trigger=(3, 'iteration'))
    trainer.extend(extensions.LogReport(trigger=(3, 'iteration')))
    trainer.extend(extensions.PrintReport(
        ['iteration', 'main/loss', 'validation/main/loss']), trigger=(3, 'iteration'))
    trainer.extend(extensions.snapshot_object(model, 'best'), trigger=triggers.MinValueTrigger(
        'validation/main/loss', trigger=(3, 'iteration')))
    trainer.extend(StepDecay('lr', 0.5),
                   trigger=triggers.ManualScheduleTrigger([4, 13], 'iteration'))

    @training.make_extension(trigger=(5, 'iteration'), priority=training.PRIORITY_READER)
    def accuracy(trainer):
        print('accuracy', float(trainer.observation['main/accuracy'].data))

    trainer.extend(accuracy)
    trainer.extend(extensions.ParameterStatistics(
        model.predictor, trigger=(4, 'iteration'), statistics={'mean': np.mean}))
    return trainer, model


trainer, model = build(18)
trainer.run()
chainer.serializers.load_npz('best', model)
print('best', float(sum((p.data ** 2).sum() for p in model.params())))
