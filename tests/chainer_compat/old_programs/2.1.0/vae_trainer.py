"""VAE with a Trainer: loss function of the updater, eval_func, AdaGrad."""
import numpy as np
import chainer
import chainer.functions as F
import chainer.links as L
from chainer import training
from chainer.training import extensions


class VAE(chainer.Chain):
    def __init__(self, n_in, n_latent, n_h):
        super(VAE, self).__init__()
        with self.init_scope():
            self.le1 = L.Linear(n_in, n_h)
            self.le2_mu = L.Linear(n_h, n_latent)
            self.le2_ln_var = L.Linear(n_h, n_latent)
            self.ld1 = L.Linear(n_latent, n_h)
            self.ld2 = L.Linear(n_h, n_in)
        for child in self.children():
            child.b.data[...] = 0.05

    def __call__(self, x):
        h1 = F.tanh(self.le1(x))
        return self.decode(self.le2_mu(h1))

    def decode(self, z, sigmoid=True):
        h = self.ld2(F.tanh(self.ld1(z)))
        return F.sigmoid(h) if sigmoid else h

    def get_loss_func(self, C=1.0, k=1):
        def lf(x):
            h1 = F.tanh(self.le1(x))
            mu, ln_var = self.le2_mu(h1), self.le2_ln_var(h1)
            batchsize = len(mu.data)
            rec_loss = 0
            for l in range(k):
                z = F.gaussian(mu, ln_var)
                rec_loss += F.bernoulli_nll(x, self.decode(z, False)) / (k * batchsize)
            self.rec_loss = rec_loss
            self.loss = rec_loss + C * F.gaussian_kl_divergence(mu, ln_var) / batchsize
            chainer.report({'rec_loss': rec_loss, 'loss': self.loss}, observer=self)
            return self.loss
        return lf


rng = np.random.RandomState(1)
data = (rng.rand(120, 3).dot(rng.rand(3, 20)) > 0.8).astype(np.float32)
model = VAE(20, 2, 10)
optimizer = chainer.optimizers.AdaGrad(0.1)
optimizer.setup(model)
train_iter = chainer.iterators.SerialIterator(data[:100], 20, shuffle=False)
test_iter = chainer.iterators.SerialIterator(data[100:], 20, repeat=False, shuffle=False)
updater = training.StandardUpdater(train_iter, optimizer, loss_func=model.get_loss_func())
trainer = training.Trainer(updater, (4, 'epoch'), out='.')
trainer.extend(extensions.Evaluator(test_iter, model, eval_func=model.get_loss_func(k=5)))
trainer.extend(extensions.LogReport())
trainer.extend(extensions.PrintReport(['epoch', 'main/rec_loss', 'validation/main/rec_loss',
                                       'main/loss']))
trainer.extend(extensions.PrintReport(['validation/main/loss']))
trainer.run()
print('loss', float(model.loss.data))
