"""Deep network as a ChainList: add_link, computational graph as a .dot file."""
import numpy as np
import chainer
from chainer import Variable, optimizers
import chainer.computational_graph as c
import chainer.functions as F
import chainer.links as L


class DeepNet(chainer.ChainList):
    def __init__(self, n_units, n_layers):
        super(DeepNet, self).__init__()
        for _ in range(n_layers):
            self.add_link(L.Linear(n_units, n_units))
        self.add_link(L.Linear(n_units, 3))

    def __call__(self, x):
        for layer in self[:-1]:
            x = F.leaky_relu(layer(x), slope=0.1) + x
        return self[-1](x)


rng = np.random.RandomState(1)
x = rng.randn(90, 9).astype(np.float32)
t = x[:, :3].argmax(axis=1).astype(np.int32)

model = L.Classifier(DeepNet(9, len('abc')))
model.compute_accuracy = True
optimizer = optimizers.AdaDelta(rho=0.9)
optimizer.setup(model)
for i in range(0, 90, 6):
    x_batch, t_batch = Variable(x[i:i + 6], name='x'), Variable(t[i:i + 6], name='t')
    optimizer.update(model, x_batch, t_batch)
    if i == 0:
        g = c.build_computational_graph((model.loss,), remove_split=True)
        with open('graph.dot', 'w') as o:
            o.write(g.dump())
        print('nodes', len(g.nodes))
        assert 'digraph' in open('graph.dot').read()
    print(float(model.loss.data))
    print(float(model.accuracy.data))
