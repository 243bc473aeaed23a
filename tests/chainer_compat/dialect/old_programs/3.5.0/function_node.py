"""A custom FunctionNode: double backprop, chainer.grad, check_double_backward."""
import numpy as np
import chainer
from chainer import FunctionNode, Variable, gradient_check
from chainer.utils import type_check
import chainer.functions as F
import chainer.links as L


class Mish(FunctionNode):
    """x * tanh(x), with gradients that can be differentiated again."""

    def check_type_forward(self, in_types):
        type_check.expect(in_types.size() == 1, in_types[0].dtype.kind == 'f')

    def forward_cpu(self, inputs):
        self.retain_inputs((0,))
        return inputs[0] * np.tanh(inputs[0]),

    def backward(self, indexes, grad_outputs):
        x, = self.get_retained_inputs()
        gy, = grad_outputs
        return MishGrad().apply((x, gy))


class MishGrad(FunctionNode):
    def forward(self, inputs):
        self.retain_inputs((0, 1))
        x, gy = inputs
        t = np.tanh(x)
        return gy * (t + x * (1 - t * t)),

    def backward(self, indexes, grad_outputs):
        x, gy = self.get_retained_inputs()
        ggx, = grad_outputs
        t = F.tanh(x)
        s = 1 - t * t
        ret = []
        if 0 in indexes:
            ret.append(ggx * gy * (2 * s - 2 * x * t * s))
        if 1 in indexes:
            ret.append(ggx * (t + x * s))
        return ret


def mish(x):
    return Mish().apply((x,))[0]


rng = np.random.RandomState(0)
check_x = rng.uniform(-1, 1, (2, 3))
gradient_check.check_backward(mish, check_x, np.ones((2, 3)), dtype='d', atol=1e-4, rtol=1e-4)
gradient_check.check_double_backward(
    lambda x: mish(x), check_x, np.ones((2, 3)), np.ones((2, 3)), dtype='d', atol=1e-3, rtol=1e-3)

model = chainer.Chain()
with model.init_scope():
    model.l1 = L.Linear(3, 10)
    model.l2 = L.Linear(10, 1)
optimizer = chainer.optimizers.Adam(alpha=0.02)
optimizer.setup(model)
x = rng.uniform(-1, 1, (40, 3)).astype('f')
t = (x ** 2).sum(axis=1, keepdims=True)
for i in range(20):
    x_var = Variable(x)
    y = model.l2(mish(model.l1(x_var)))
    gx, = chainer.grad([y], [x_var], enable_double_backprop=True)
    loss = F.mean_squared_error(y, t) + 0.1 * F.mean_squared_error(gx, 2 * x)
    model.cleargrads()
    loss.backward()
    optimizer.update()
    print(float(loss.data))
