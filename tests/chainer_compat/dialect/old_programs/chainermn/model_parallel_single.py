"""The same as model_parallel.py in one process, with all layers in one model."""
import numpy as np
import chainer
import chainer.functions as F
import chainer.links as L

rng = np.random.RandomState(0)
x = rng.randn(60, 6).astype('f')
t = x[:, :3].argmax(axis=1).astype('i')
model = chainer.Chain(l1=L.Linear(6, 8), l2=L.Linear(8, 10), l3=L.Linear(10, 8), l4=L.Linear(8, 3))
optimizer = chainer.optimizers.Adam(0.02)
optimizer.setup(model)
for i in list(range(0, 60, 12)) * 3:
    h = F.relu(model.l1(x[i:i + 12]))
    h = F.tanh(model.l3(F.relu(model.l2(h))))
    loss = F.softmax_cross_entropy(model.l4(h), t[i:i + 12])
    model.cleargrads()
    loss.backward()
    optimizer.update()
    print(float(loss.data))
