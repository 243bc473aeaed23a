"""Custom links: Link(W=shape), function classes such as F.ReLU, new_epoch, compute_grads_norm."""
import numpy as np
import chainer
from chainer import Variable, link, optimizers
import chainer.functions as F


class Dense(link.Link):
    def __init__(self, n_in, n_out):
        super(Dense, self).__init__(W=(n_out, n_in), b=n_out)
        self.W.data[...] = np.random.normal(0, np.sqrt(1. / n_in), (n_out, n_in))
        self.b.data.fill(0)

    def __call__(self, x):
        return F.linear(x, self.W, self.b)


class Scaled(link.Link):
    def __init__(self, size):
        super(Scaled, self).__init__()
        self.add_param('scale', (1, size), dtype=np.float32)
        self.scale.data.fill(1)
        self.add_persistent('calls', 0)

    def __call__(self, x):
        self.calls += 1
        ones = Variable(np.ones((len(x.data), 1), dtype=np.float32))
        return x * F.matmul(ones, self.scale)


model = chainer.Chain(first=Dense(5, 8), scaled=Scaled(8))
model.add_link('second', Dense(8, 3))
optimizer = optimizers.SGD(lr=0.5)
optimizer.setup(model)
rng = np.random.RandomState(0)
x = rng.randn(40, 5).astype(np.float32)
t = x[:, :3].argmax(1).astype(np.int32)
while optimizer.epoch < 3:
    for i in range(0, 40, 10):
        h = F.ReLU(use_cudnn=False)(model['first'](Variable(x[i:i + 10])))
        h = F.Concat(axis=1)(*F.SplitAxis(2, axis=1)(h))
        y = model['second'](F.Dropout(0.1)(model['scaled'](h)))
        loss = F.SoftmaxCrossEntropy(use_cudnn=False)(y, Variable(t[i:i + 10]))
        optimizer.zero_grads()
        loss.backward(retain_grad=True)
        norm = optimizer.compute_grads_norm()
        optimizer.update()
        print(float(loss.data))
        print('norm', float(norm))
        print('gradient of y', float(abs(y.grad).sum()))
    optimizer.new_epoch()
    optimizer.lr /= 1 + 0.1 * optimizer.epoch
print('calls', model.scaled.calls)
print('label', loss.label.count('float32'))
for name, param in sorted(model.namedparams()):
    print(name, float(abs(param.data).sum()))
