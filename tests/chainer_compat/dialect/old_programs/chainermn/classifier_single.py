"""The same as classifier.py in one process, whose batches are those of both ranks."""
import numpy as np
import chainer
import chainer.functions as F
import chainer.links as L


class MLP(chainer.Chain):
    def __init__(self, n_units, n_out):
        super(MLP, self).__init__(
            l1=L.Linear(12, n_units), l2=L.Linear(n_units, n_units), l3=L.Linear(n_units, n_out))

    def __call__(self, x):
        return self.l3(F.relu(self.l2(F.relu(self.l1(x)))))


rng = np.random.RandomState(0)
t = rng.randint(4, size=120).astype('i')
x = (rng.rand(4, 12)[t] + 0.2 * rng.randn(120, 12)).astype('f')
model = L.Classifier(MLP(10, 4))
optimizer = chainer.optimizers.Adam(0.02)
optimizer.setup(model)
for epoch in range(4):
    for i in range(0, 40, 10):
        batch = np.r_[i:i + 10, 40 + i:50 + i]
        model.cleargrads()
        model(x[batch], t[batch]).backward()
        if epoch + i > 0:  # the first update of a multi-node optimizer broadcasts the parameters
            optimizer.update()
    loss = model(x[80:], t[80:])
    print(float(loss.data))
    print(float(model.accuracy.data))
