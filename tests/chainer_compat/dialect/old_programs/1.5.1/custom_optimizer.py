"""Custom optimizers: init_state_cpu, update_one_cpu; a custom hook."""
import numpy as np
import chainer
from chainer import Chain, Variable, cuda, optimizer
import chainer.functions as F
import chainer.links as L


class SignMomentum(optimizer.GradientMethod):
    """Steps in the direction of the sign of the momentum."""

    def __init__(self, lr=0.01, momentum=0.9):
        self.lr = lr
        self.momentum = momentum

    def init_state(self, param, state):
        xp = cuda.get_array_module(param.data)
        state['m'] = xp.zeros_like(param.data)

    def update_one_cpu(self, param, state):
        m = state['m']
        m *= self.momentum
        m += (1 - self.momentum) * param.grad
        param.data -= self.lr * np.sign(m)

    def update_one_gpu(self, param, state):
        raise NotImplementedError


class NesterovLike(optimizer.GradientMethod):
    def __init__(self, lr):
        self.lr = lr

    def init_state_cpu(self, param, state):
        state['v'] = np.zeros_like(param.data)

    def init_state_gpu(self, param, state):
        state['v'] = cuda.zeros_like(param.data)

    def update_one(self, param, state):
        v = state['v']
        v *= 0.5
        v -= self.lr / (1 + 0.1 * self.t) * param.grad
        param.data += v


class GradientNoise(object):
    name = 'GradientNoise'

    def __call__(self, opt):
        for param in opt.target.params():
            param.grad += 0.01 * np.random.randn(*param.grad.shape).astype('f')


rng = np.random.RandomState(0)
x = rng.randn(50, 10).astype('f')
t = (x[:, 0] * x[:, 1] > 0).astype('i')
for opt in (SignMomentum(0.02), NesterovLike(0.3)):
    model = Chain(l1=L.Linear(10, 12), l2=L.Linear(12, 2))
    opt.setup(model)
    opt.add_hook(GradientNoise())
    opt.add_hook(chainer.optimizer.GradientClipping(1.0), 'clip')
    for i in range(20):
        model.zerograds()
        loss = F.softmax_cross_entropy(model.l2(F.tanh(model.l1(Variable(x)))), Variable(t))
        loss.backward()
        opt.update()
        print(opt.t, float(loss.data))
