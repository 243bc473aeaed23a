"""CNN with a Trainer: init_scope, per-parameter rules, using_config, register_persistent."""
import numpy as np
import chainer
import chainer.functions as F
import chainer.links as L
from chainer import training
from chainer.training import extensions


class Net(chainer.Chain):
    def __init__(self, n_out):
        super(Net, self).__init__()
        w = chainer.initializers.HeNormal()
        with self.init_scope():
            self.conv1 = L.Convolution2D(1, 4, 3, pad=1, initialW=w)
            self.bn = L.BatchNormalization(4)
            self.conv2 = L.Convolution2D(4, 6, 3, stride=2, nobias=True, initialW=w)
            self.fc = L.Linear(6 * 3 * 3, n_out, initial_bias=0.1)
            self.scale = chainer.Parameter(np.ones(1, 'f'))
        self.n_batches = 0
        self.register_persistent('n_batches')

    def __call__(self, x):
        if chainer.config.train:
            self.n_batches += 1
        h = F.relu(self.bn(self.conv1(x)))
        h = F.relu(self.conv2(h))
        h = F.dropout(h, ratio=0.2) * F.broadcast_to(self.scale, h.shape)
        return self.fc(h)


class Classifier(L.Classifier):
    def __call__(self, *args):
        loss = super(Classifier, self).__call__(*args)
        penalty = F.sum(self.predictor.fc.W ** 2)
        chainer.report({'penalty': penalty}, self)
        return loss + 0.001 * penalty


rng = np.random.RandomState(0)
t = rng.randint(4, size=100).astype('i')
x = (rng.rand(4, 1, 8, 8)[t] + 0.3 * rng.randn(100, 1, 8, 8)).astype('f')
data = chainer.datasets.TupleDataset(x, t)
train, test = chainer.datasets.split_dataset(data, 80)
model = Classifier(Net(4))
optimizer = chainer.optimizers.MomentumSGD(0.05)
optimizer.setup(model)
for param in model.params():
    if param.name == 'b':
        param.update_rule.hyperparam.lr = 0.1
optimizer.add_hook(chainer.optimizer.WeightDecay(5e-4))
model.predictor.scale.update_rule.enabled = False
train_iter = chainer.iterators.SerialIterator(train, 10)
test_iter = chainer.iterators.MultiprocessIterator(test, 10, False, False, 1)
updater = training.StandardUpdater(train_iter, optimizer)
trainer = training.Trainer(updater, (3, 'epoch'), out='.')
trainer.extend(extensions.Evaluator(test_iter, model))
trainer.extend(extensions.LogReport(trigger=(2, 'iteration')))
trainer.extend(extensions.observe_lr(), trigger=(2, 'iteration'))
trainer.extend(extensions.PrintReport(
    ['lr', 'main/penalty', 'validation/main/loss', 'main/loss']))
trainer.run()
with chainer.using_config('train', False), chainer.no_backprop_mode():
    y = model.predictor(chainer.Variable(x[80:]))
assert y.creator is None
print('test', float(F.softmax_cross_entropy(y, t[80:]).data))
print('batches', int(model.predictor.n_batches))
