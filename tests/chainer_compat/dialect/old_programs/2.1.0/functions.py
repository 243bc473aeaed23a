"""Custom functions: retain_inputs, retain_outputs, force_backprop_mode, GradientHardClipping."""
import numpy as np
import chainer
from chainer import Function, Variable
import chainer.functions as F
import chainer.links as L


class Exp2(Function):
    """2 ** x, which needs its output for the gradient, not its input."""

    def forward(self, inputs):
        self.retain_inputs(())
        self.retain_outputs((0,))
        y = np.exp2(inputs[0])
        return y,

    def backward(self, inputs, grad_outputs):
        y, = self.output_data
        return np.float32(np.log(2)) * y * grad_outputs[0],


class Clip(Function):
    def forward(self, inputs):
        x, = inputs
        self.mask = np.abs(x) < 2
        return np.clip(x, -2, 2),

    def backward(self, inputs, grad_outputs):
        return grad_outputs[0] * self.mask,


class Gate(chainer.Chain):
    def __init__(self):
        super(Gate, self).__init__(up=L.Linear(4, 6), down=L.Linear(6, 1))
        with self.init_scope():
            self.shift = chainer.Parameter(0., (6,))

    def __call__(self, x):
        h = Exp2()(Clip()(self.up(x) + F.broadcast_to(self.shift, (len(x), 6))))
        return self.down(F.sqrt(h + 1))


rng = np.random.RandomState(0)
x = rng.randn(32, 4).astype('f')
t = np.abs(x).sum(axis=1, keepdims=True)
model = Gate()
optimizer = chainer.optimizers.AdaDelta()
optimizer.setup(model)
optimizer.add_hook(chainer.optimizer.GradientHardClipping(-1, 1))
for i in range(15):
    with chainer.no_backprop_mode():
        target = Variable(t)
        with chainer.force_backprop_mode():
            y = model(x)
    loss = F.mean_squared_error(y, target)
    model.cleargrads()
    loss.backward()
    optimizer.update()
    print(float(loss.data))
print('grad', float(np.abs(model.shift.grad).sum()))
v = Variable(x)
y = F.sum(Exp2()(v) * 2)
y.backward(retain_grad=True)
print('dx', float(v.grad.sum()))
