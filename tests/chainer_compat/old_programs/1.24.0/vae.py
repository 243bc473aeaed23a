"""Variational autoencoder: F.gaussian, bernoulli_nll, volatile='on' for the test."""
import numpy as np
import chainer
from chainer import cuda, optimizers
import chainer.functions as F
import chainer.links as L
from chainer.functions.loss.vae import gaussian_kl_divergence


class VAE(chainer.Chain):
    def __init__(self, n_in, n_latent, n_h):
        super(VAE, self).__init__(
            le1=L.Linear(n_in, n_h),
            le2_mu=L.Linear(n_h, n_latent),
            le2_ln_var=L.Linear(n_h, n_latent),
            ld1=L.Linear(n_latent, n_h),
            ld2=L.Linear(n_h, n_in))

    def __call__(self, x, sigmoid=True):
        return self.decode(self.encode(x)[0], sigmoid)

    def encode(self, x):
        h1 = F.tanh(self.le1(x))
        return self.le2_mu(h1), self.le2_ln_var(h1)

    def decode(self, z, sigmoid=True):
        h2 = self.ld2(F.tanh(self.ld1(z)))
        return F.sigmoid(h2) if sigmoid else h2

    def get_loss_func(self, C=1.0, k=1, train=True):
        def lf(x):
            mu, ln_var = self.encode(x)
            batchsize = len(mu.data)
            rec_loss = 0
            for _ in range(k):
                z = F.gaussian(mu, ln_var)
                rec_loss += F.bernoulli_nll(x, self.decode(z, sigmoid=False)) / (k * batchsize)
            self.rec_loss = rec_loss
            self.loss = rec_loss + C * gaussian_kl_divergence(mu, ln_var) / batchsize
            return self.loss
        return lf


rng = np.random.RandomState(0)
x_all = (rng.rand(120, 3).dot(rng.rand(3, 25)) > 0.8).astype(np.float32)
x_train, x_test = np.split(x_all, [100])

model = VAE(25, 2, 12)
optimizer = optimizers.Adam()
optimizer.setup(model)
for epoch in range(5):
    perm = np.random.permutation(100)
    for i in range(0, 100, 20):
        x = chainer.Variable(x_train[perm[i:i + 20]])
        optimizer.update(model.get_loss_func(k=2), x)
        print(float(model.loss.data))
    x = chainer.Variable(np.asarray(x_test), volatile='on')
    loss_func = model.get_loss_func(k=10, train=False)
    loss_func(x)
    print('test', float(cuda.to_cpu(model.rec_loss.data)))
    del model.loss
x.volatile = 'off'
print('reconstruction', float(F.mean_squared_error(model(x), x).data))
