"""The same as batch_normalization.py in one process, whose batches are those of both ranks."""
import numpy as np
import chainer
import chainer.functions as F
import chainer.links as L


class Net(chainer.Chain):
    def __init__(self):
        super(Net, self).__init__()
        with self.init_scope():
            self.conv = L.Convolution2D(1, 4, 3, nobias=True)
            self.bn = L.BatchNormalization(4)
            self.fc = L.Linear(4 * 4 * 4, 3)

    def __call__(self, x):
        return self.fc(F.relu(self.bn(self.conv(x))))


rng = np.random.RandomState(0)
t = rng.randint(3, size=48).astype('i')
x = (rng.rand(3, 1, 6, 6)[t] + 0.3 * rng.randn(48, 1, 6, 6)).astype('f')
model = Net()
optimizer = chainer.optimizers.MomentumSGD(0.1)
optimizer.setup(model)
for i in list(range(0, 48, 16)) * 4:
    model.cleargrads()
    loss = F.softmax_cross_entropy(model(x[i:i + 16]), t[i:i + 16])
    loss.backward()
    optimizer.update()
    print(float(loss.data))

first, second = chainer.ChainList(L.Linear(36, 3)), chainer.ChainList(L.Linear(3, 2))
optimizer.setup(first)
optimizer.setup(second)
print(float(F.sum(second[0](first[0](x[0:16:2])) ** 2).data))
