"""Custom functions: forward_cpu, backward_cpu, check_type_forward, gradient_check."""
import numpy as np
from chainer import Chain, Function, Variable, cuda, gradient_check, optimizers, utils
from chainer.utils import type_check
import chainer.functions as F
import chainer.links as L


class MulAdd(Function):
    def check_type_forward(self, in_types):
        type_check.expect(in_types.size() == 3)
        x, y, z = in_types
        type_check.expect(x.dtype == np.float32, x.shape == y.shape, y.shape == z.shape)

    def forward_cpu(self, inputs):
        x, y, z = inputs
        return x * y + z,

    def forward_gpu(self, inputs):
        x, y, z = inputs
        return cuda.elementwise('T x, T y, T z', 'T w', 'w = x * y + z', 'muladd')(x, y, z),

    def backward_cpu(self, inputs, grad_outputs):
        x, y, z = inputs
        gw, = grad_outputs
        return y * gw, x * gw, gw


class Swish(Function):
    """x * sigmoid(beta * x)"""

    def __init__(self, beta):
        self.beta = beta

    def forward(self, inputs):
        x, = inputs
        self.s = 1 / (1 + np.exp(-self.beta * x))
        return utils.force_array(x * self.s),

    def backward(self, inputs, grad_outputs):
        x, = inputs
        gy, = grad_outputs
        return utils.force_array(
            gy * (self.s + self.beta * x * self.s * (1 - self.s))).astype('f'),


def muladd(x, y, z):
    return MulAdd()(x, y, z)


model = Chain(a=L.Linear(6, 8), b=L.Linear(6, 8), c=L.Linear(6, 8), out=L.Linear(8, 1))
rng = np.random.RandomState(0)
x = rng.randn(40, 6).astype(np.float32)
t = np.sin(x.sum(axis=1, keepdims=True))

u = Variable(rng.uniform(-1, 1, (3, 2)).astype('f'))
v = Swish(0.7)(u)
v.grad = np.ones_like(v.data)
v.backward()
f = lambda: v.creator.forward((u.data,))
gu, = gradient_check.numerical_grad(f, (u.data,), (v.grad,))
gradient_check.assert_allclose(gu, u.grad, atol=1e-3, rtol=1e-3)

optimizer = optimizers.RMSprop(lr=0.01)
optimizer.setup(model)
for epoch in range(20):
    h = Variable(x)
    h = muladd(model.a(h), model.b(h), model.c(h))
    loss = F.mean_squared_error(model.out(Swish(1.5)(h)), Variable(t))
    optimizer.zero_grads()
    loss.backward()
    optimizer.update()
    print(loss.data)
