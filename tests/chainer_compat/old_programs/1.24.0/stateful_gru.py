"""Echo task: StatefulGRU, GRU, StatefulPeepholeLSTM, Bilinear and Maxout links."""
import numpy as np
import chainer
from chainer import Variable, optimizers
import chainer.functions as F
import chainer.links as L


class Net(chainer.Chain):
    def __init__(self, n):
        super(Net, self).__init__(
            gru1=L.StatefulGRU(3, n), gru2=L.GRU(n, n),
            peephole=L.StatefulPeepholeLSTM(3, n),
            bilinear=L.Bilinear(n, n, 4), out=L.Maxout(4, 2, 3), bias=L.Bias(shape=(2,)))
        self.n = n

    def reset_state(self):
        self.gru1.reset_state()
        self.peephole.reset_state()
        self.h = None

    def __call__(self, x):
        a = self.gru1(x)
        if self.h is None:
            self.h = Variable(np.zeros_like(a.data), volatile='auto')
        self.h = self.gru2(self.h, a)
        return self.bias(self.out(self.bilinear(self.h, self.peephole(x))))


rng = np.random.RandomState(0)
sequences = rng.randn(24, 12, 3).astype('f')
model = Net(6)
optimizer = optimizers.NesterovAG(lr=0.1, momentum=0.8)
optimizer.setup(model)
optimizer.add_hook(chainer.optimizer.GradientClipping(1))
optimizer.add_hook(chainer.optimizer.Lasso(1e-4))
for epoch in range(3):
    for i in range(0, 24, 8):
        model.reset_state()
        loss = 0
        for step in range(12):
            y = model(Variable(sequences[i:i + 8, step]))
            if step >= 2 and step % 2 == 0:
                target = sequences[i:i + 8, step - 2, :2]
                loss += F.mean_squared_error(y, Variable(target))
        model.cleargrads()
        loss.backward()
        optimizer.update()
        print(float(loss.data))
model.reset_state()
for step in range(3):
    y = model(Variable(sequences[:, step], volatile='on'))
print('volatile', float(y.data.sum()))
