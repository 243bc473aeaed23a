"""Denoising autoencoder: tied weights, add_param, zerograds."""
import numpy as np
import chainer
import chainer.functions as F
import chainer.links as L
from chainer import optimizers, Variable


class Autoencoder(chainer.Chain):
    def __init__(self, n_in, n_hidden):
        super(Autoencoder, self).__init__(encode=L.Linear(n_in, n_hidden))
        self.add_param('bias', (n_in,))
        self.bias.data.fill(0)

    def __call__(self, x):
        h = F.sigmoid(self.encode(x))
        decoded = F.linear(h, F.transpose(self.encode.W), self.bias)
        return F.sigmoid(decoded)


rng = np.random.RandomState(3)
factors = rng.rand(5, 24)
data = (rng.rand(100, 5).dot(factors) / 3).astype(np.float32)

model = Autoencoder(24, 10)
optimizer = optimizers.AdaGrad(lr=0.05)
optimizer.setup(model)
for step in range(30):
    batch = data[step * 10 % 100:][:10]
    noisy = batch * (np.random.rand(*batch.shape) > 0.2)
    model.zerograds()
    loss = F.mean_squared_error(model(Variable(noisy.astype('f'))), Variable(batch))
    loss.backward()
    optimizer.update()
    print(loss.data)
