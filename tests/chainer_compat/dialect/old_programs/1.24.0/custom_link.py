"""Custom links: add_uninitialized_param, init_weight, a custom Initializer, L.Linear(None, n)."""
import numpy as np
import chainer
from chainer import cuda, initializers, link, optimizers, Variable
import chainer.functions as F
import chainer.links as L


class LazyDense(link.Link):
    def __init__(self, n_out, initialW=None):
        super(LazyDense, self).__init__()
        self.n_out, self.initialW = n_out, initialW
        self.add_uninitialized_param('W')
        self.add_param('b', n_out, initializer=initializers.Constant(0.1))

    def _initialize_params(self, n_in):
        self.add_param('W', (self.n_out, n_in))
        initializers.init_weight(self.W.data, self.initialW, scale=0.5)

    def __call__(self, x):
        if self.has_uninitialized_params:
            with cuda.get_device(self._device_id):
                self._initialize_params(x.data.size // len(x.data))
        return F.linear(x, self.W, self.b)


class Normalized(link.Link):
    def __init__(self, n):
        super(Normalized, self).__init__(gain=n)
        self.gain.data[...] = 1
        self.add_persistent('mean', np.zeros(n, dtype=np.float32))

    def __call__(self, x, train=True):
        if train:
            self.mean *= 0.9
            self.mean += 0.1 * x.data.mean(axis=0)
        shape = x.data.shape
        return (x - self.mean) * F.broadcast_to(self.gain, shape)


class Orthonormal(chainer.initializer.Initializer):
    def __call__(self, array):
        array[...] = np.linalg.qr(np.random.RandomState(0).randn(*array.shape))[0]


model = chainer.Chain(a=LazyDense(6, initializers.HeUniform()), norm=Normalized(6),
                      b=L.Linear(None, 6, initialW=Orthonormal(), bias=0.2), c=LazyDense(2))


def forward(x, train=True):
    x = Variable(x, volatile=not train)
    return model.c(F.crelu(model.b(model.norm(F.elu(model.a(x)), train))))


rng = np.random.RandomState(0)
x = rng.randn(30, 4).astype('f')
t = x[:, :2] ** 2
forward(x, train=False)
optimizer = optimizers.MomentumSGD(lr=0.05)
optimizer.setup(model)
optimizer.use_cleargrads(False)
for i in range(15):
    loss = F.mean_squared_error(forward(x), Variable(t))
    optimizer.target.zerograds()
    loss.backward()
    optimizer.update()
    print(float(loss.data))
chainer.serializers.save_npz('model.npz', model)
chainer.serializers.load_npz('model.npz', model)
print('test', float(F.mean_squared_error(
    forward(x, train=False), Variable(t, volatile=True)).data))
print('mean', float(model.norm.mean.sum()))
