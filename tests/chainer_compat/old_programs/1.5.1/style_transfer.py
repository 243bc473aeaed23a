"""Neural style: optimizes an image; volatile features, Gram matrices, L.Parameter."""
import numpy as np
from chainer import Chain, Variable, optimizers
import chainer.functions as F
import chainer.links as L

rng = np.random.RandomState(0)
content = rng.rand(1, 3, 12, 12).astype(np.float32)
style = np.tile(rng.rand(1, 3, 4, 4), (1, 1, 3, 3)).astype(np.float32)

net = Chain(conv1=L.Convolution2D(3, 4, 3, pad=1), conv2=L.Convolution2D(4, 8, 3, stride=2))
for name, param in sorted(net.namedparams()):
    param.data[...] = rng.randn(*param.data.shape) * 0.3


def features(x):
    h1 = F.relu(net.conv1(x))
    h2 = F.relu(net.conv2(F.average_pooling_2d(h1, 2, stride=2)))
    return h1, h2


def gram(y):
    b, ch, h, w = y.data.shape
    f = F.reshape(y, (ch, h * w))
    return F.matmul(f, f, transb=True) / np.float32(ch * h * w)


content_features = features(Variable(content, volatile=True))
style_grams = [gram(y) for y in features(Variable(style, volatile=True))]
assert content_features[0].creator is None

img = L.Parameter(rng.uniform(-1, 1, content.shape).astype(np.float32))
optimizer = optimizers.Adam(alpha=0.05)
optimizer.setup(img)
for i in range(25):
    img.zerograds()
    ys = features(img.W)
    loss = Variable(np.zeros((), dtype=np.float32))
    for y, c, s in zip(ys, content_features, style_grams):
        loss += 0.1 * F.mean_squared_error(y, Variable(c.data))
        loss += F.mean_squared_error(gram(y), Variable(s.data))
    loss.backward()
    net.zerograds()
    optimizer.update()
    img.W.data = np.clip(img.W.data, -2, 2)
    print(float(loss.data))

x = Variable(img.W.data)
for i in range(5):
    loss = F.mean_squared_error(features(x)[1], Variable(content_features[1].data))
    loss.backward()
    x = Variable(x.data - 0.5 * x.grad)
    print(float(loss.data))
