"""CNN with a Trainer: get_device and to_device, EarlyStoppingTrigger, autoload, WarmupShift."""
import json
import numpy as np
import chainer
import chainer.functions as F
import chainer.links as L
from chainer import training
from chainer.training import extensions, triggers

device = chainer.get_device('@numpy')
device.use()


class Block(chainer.Chain):
    def __init__(self, n):
        super().__init__()
        with self.init_scope():
            self.conv = L.Convolution2D(n, n, 3, pad=1, groups=2)
            self.norm = L.GroupNormalization(2)

    def forward(self, x):
        return F.relu(self.norm(self.conv(x))) + x


class Net(chainer.Chain):
    def __init__(self, n, n_out):
        super().__init__()
        with self.init_scope():
            self.stem = L.Convolution2D(2, n, 1)
            self.blocks = chainer.ChainList(Block(n), Block(n))
            self.fc = L.Linear(n, n_out)

    def forward(self, x):
        h = self.stem(x)
        for block in self.blocks:
            h = block(h)
        return self.fc(F.average(h, axis=(2, 3)))


rng = np.random.RandomState(0)
t = rng.randint(3, size=90).astype(np.int32)
x = (rng.rand(3, 2, 6, 6)[t] + 0.3 * rng.randn(90, 2, 6, 6)).astype(np.float32)
model = L.Classifier(Net(4, 3))
model(x[:2], t[:2])
model.to_device(device)
assert model.device == device and model.xp is np
optimizer = chainer.optimizers.CorrectedMomentumSGD(lr=0.05)
optimizer.setup(model)
train = chainer.datasets.TupleDataset(x[:70], t[:70])
valid = chainer.datasets.TupleDataset(x[70:], t[70:])
train_iter = chainer.iterators.SerialIterator(
    train, 10, order_sampler=chainer.iterators.ShuffleOrderSampler(np.random.RandomState(3)))
valid_iter = chainer.iterators.SerialIterator(valid, 10, repeat=False, shuffle=False)
updater = training.updaters.StandardUpdater(train_iter, optimizer, device=device)
stop = triggers.EarlyStoppingTrigger(
    check_trigger=(1, 'epoch'), monitor='validation/main/loss', patients=2,
    max_trigger=(4, 'epoch'))
trainer = training.Trainer(updater, stop, out='.')
trainer.extend(extensions.Evaluator(valid_iter, model, device=device))
trainer.extend(extensions.snapshot(n_retains=1, autoload=True), trigger=(1, 'epoch'))
trainer.extend(extensions.WarmupShift('lr', 0.01, 5, 0.05), trigger=(1, 'iteration'))
trainer.extend(extensions.LogReport(trigger=(1, 'epoch'), filename='log.json'))
trainer.extend(extensions.PrintReport(['epoch', 'main/loss', 'validation/main/loss']))
with chainer.using_config('dtype', np.float32), chainer.using_device(device):
    trainer.run()
for entry in json.load(open('log.json')):
    print(entry['main/loss'])
    print(entry['validation/main/loss'])
print('lr', optimizer.lr)
