"""CNN with BatchNormalization: test=not train, F.dropout(train=...), wscale, finetune=True."""
import math
import numpy as np
import chainer
from chainer import Variable, optimizers, serializers
import chainer.functions as F
import chainer.links as L


class Block(chainer.Chain):
    def __init__(self, n_in, n_out, stride=1):
        w = math.sqrt(2)
        super(Block, self).__init__(
            conv1=L.Convolution2D(n_in, n_out, 3, stride, 1, w),
            bn1=L.BatchNormalization(n_out),
            conv2=L.Convolution2D(n_out, n_out, 3, 1, 1, w, nobias=True),
            bn2=L.BatchNormalization(n_out, decay=0.8, eps=1e-3))

    def __call__(self, x, train):
        h = F.relu(self.bn1(self.conv1(x), test=not train))
        h = self.bn2(self.conv2(h), test=not train)
        return F.relu(h + x if h.data.shape == x.data.shape else h)


class Net(chainer.Chain):
    def __init__(self):
        super(Net, self).__init__(a=Block(3, 4), b=Block(4, 4), c=Block(4, 6, 2),
                                  fc=L.Linear(6, 4, wscale=0.5, bias=0))
        self.train = True

    def __call__(self, x, t):
        h = self.c(self.b(self.a(x, self.train), self.train), self.train)
        h = F.dropout(F.average_pooling_2d(h, 4), 0.25, train=self.train)
        h = self.fc(h)
        self.loss = F.softmax_cross_entropy(h, t)
        self.accuracy = F.accuracy(h, t)
        return self.loss


rng = np.random.RandomState(2)
t = rng.randint(4, size=60).astype(np.int32)
x = (rng.rand(4, 3, 8, 8)[t] + .3 * rng.randn(60, 3, 8, 8)).astype(np.float32)

model = Net()
optimizer = optimizers.MomentumSGD(0.05)
optimizer.use_cleargrads()
optimizer.setup(model)
optimizer.add_hook(chainer.optimizer.WeightDecay(1e-3), 'decay')
for epoch in range(4):
    model.train = True
    for i in range(0, 40, 10):
        optimizer.update(model, Variable(x[i:i + 10]), Variable(t[i:i + 10]))
        print(float(model.loss.data))
    model.train = False
    model(Variable(x[40:], volatile='on'), Variable(t[40:], volatile='on'))
    print('test', float(model.loss.data))
    print('accuracy', float(model.accuracy.data))
    optimizer.lr *= 0.7

serializers.save_npz('net.npz', model)
other = Net()
serializers.load_npz('net.npz', other)
other.a.bn1.start_finetuning()
for i in range(0, 60, 20):
    other.a.bn1(other.a.conv1(Variable(x[i:i + 20])), test=False, finetune=True)
other.train = False
print('finetuned', float(other(Variable(x[40:]), Variable(t[40:])).data))
print('mean', float(other.a.bn1.avg_mean.sum()))
