"""Saliency map: walks the graph by creator and inputs; gradient ascent on an image."""
import numpy as np
import chainer
from chainer import Variable, optimizers
import chainer.functions as F
import chainer.links as L

rng = np.random.RandomState(0)
t = rng.randint(3, size=30).astype(np.int32)
x = (rng.rand(3, 2, 6, 6)[t] + 0.2 * rng.randn(30, 2, 6, 6)).astype(np.float32)
model = chainer.Chain(conv=L.Convolution2D(2, 4, 3), fc=L.Linear(4 * 2 * 2, 3))
optimizer = optimizers.Adam(alpha=0.02)
optimizer.setup(model)


def forward(image):
    h = F.max_pooling_2d(F.relu(model.conv(image)), 2, stride=2)
    return model.fc(h)


for i in range(10):
    model.zerograds()
    loss = F.softmax_cross_entropy(forward(Variable(x)), Variable(t))
    loss.backward()
    optimizer.update()
    print(float(loss.data))

image = Variable(x[:1])
y = forward(image)
y.grad = np.zeros_like(y.data)
y.grad[0, t[0]] = 1
y.backward(retain_grad=True)
v = y
while v.creator is not None:
    label = v.creator.label
    v = v.creator.inputs[0]
    if label in ('LinearFunction', 'ReLU', 'Convolution2DFunction'):
        print(label, float(np.abs(v.grad).sum()))
assert v.rank == 0
activation = y.creator.inputs[0].data
print('activation', float(activation.sum()))
for i in range(5):
    y = forward(image)
    image.zerograd()
    score = F.sum(F.select_item(y, Variable(t[:1])))
    score.backward()
    image.data += 0.1 * image.grad / np.abs(image.grad).max()
    print('score', float(score.data))
