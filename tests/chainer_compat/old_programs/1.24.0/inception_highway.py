"""Inception, InceptionBN, MLPConvolution2D, Highway and PReLU."""
import numpy as np
import chainer
from chainer import Variable, initializers, optimizers
import chainer.functions as F
import chainer.links as L


class Net(chainer.Chain):
    def __init__(self):
        super(Net, self).__init__(
            mlpconv=L.MLPConvolution2D(1, (4, 4), 3, pad=1, wscale=np.sqrt(2)),
            inception=L.Inception(4, 2, 2, 3, 1, 2, 2),
            inceptionbn=L.InceptionBN(9, 2, 2, 2, 1, 2, 'avg', 2),
            dilated=L.DilatedConvolution2D(8, 4, 3, pad=2, dilate=2,
                                           initialW=initializers.HeNormal()),
            highway=L.Highway(16, activate=F.tanh),
            prelu=L.PReLU(), fc=L.Linear(16, 3, initialW=initializers.Uniform(0.3)))

    def __call__(self, x, train=True):
        h = self.mlpconv(x)
        h = self.inception(h)
        self.inceptionbn.train = train
        h = F.max_pooling_2d(self.inceptionbn(h), 2)
        h = self.prelu(self.dilated(h))
        h = F.reshape(F.spatial_pyramid_pooling_2d(h, 2, F.MaxPooling2D)[:, :16], (-1, 16))
        return self.fc(F.dropout(self.highway(h), ratio=0.1, train=train))


rng = np.random.RandomState(0)
t = rng.randint(3, size=40).astype('i')
x = (rng.rand(3, 1, 6, 6)[t] + 0.1 * rng.randn(40, 1, 6, 6)).astype('f')
model = Net()
optimizer = optimizers.Adam(alpha=0.01)
optimizer.setup(model)
for epoch in range(3):
    for i in range(0, 30, 10):
        y = model(Variable(x[i:i + 10]))
        loss = F.softmax_cross_entropy(y, Variable(t[i:i + 10]), normalize=False)
        loss += 0.1 * F.hinge(y, Variable(t[i:i + 10]), norm='L2')
        optimizer.target.zerograds()
        loss.backward()
        optimizer.update()
        print(float(loss.data))
y = model(Variable(x[30:], volatile='on'), train=False)
print('test', float(F.softmax_cross_entropy(y, Variable(t[30:], volatile='on')).data))
