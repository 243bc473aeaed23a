"""Probabilistic forecasts: NStepBiLSTM, F.forget, distributions, AdaBound."""
import numpy as np
import chainer
import chainer.functions as F
import chainer.links as L
from chainer import distributions as D


class Forecaster(chainer.Chain):
    def __init__(self, n_units):
        super().__init__()
        with self.init_scope():
            self.rnn = L.NStepBiLSTM(1, 2, n_units, dropout=0.0)
            self.l1 = L.Linear(2 * n_units, n_units)
            self.loc = L.Linear(n_units, 1)
            self.scale = L.Linear(n_units, 1)

    def forward(self, xs):
        hy, _, _ = self.rnn(None, None, xs)
        h = F.concat([hy[0], hy[1]], axis=1)
        h = F.forget(lambda a: F.elu(self.l1(a)), h)
        return D.Normal(self.loc(h), F.softplus(self.scale(h)) + 1e-2)


rng = np.random.RandomState(0)
series = [np.cumsum(rng.randn(rng.randint(4, 9), 2), axis=0).astype('f') for _ in range(60)]
targets = np.array([[s[-1].sum() / len(s)] for s in series], 'f')
model = Forecaster(6)
optimizer = chainer.optimizers.Adam(alpha=0.01, adabound=True, final_lr=0.1)
optimizer.setup(model)
prior = D.Normal(np.zeros(1, 'f'), np.ones(1, 'f'))
for epoch in range(4):
    for i in range(0, 50, 10):
        predicted = model(series[i:i + 10])
        loss = -F.average(predicted.log_prob(targets[i:i + 10]))
        loss += 1e-3 * F.sum(chainer.kl_divergence(predicted, D.Normal(
            F.broadcast_to(prior.loc, (10, 1)), F.broadcast_to(prior.scale, (10, 1)))))
        model.cleargrads()
        loss.backward()
        optimizer.update()
        print(float(loss.array))
with chainer.no_backprop_mode(), chainer.using_config('train', False):
    predicted = model(series[50:])
print('test', float(F.mean_absolute_error(predicted.loc, targets[50:]).array))
