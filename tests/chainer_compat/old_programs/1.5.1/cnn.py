"""CNN: FunctionSet, use_cudnn, wscale, lower learning rate by hand."""
import numpy as np
import chainer
from chainer import optimizers
import chainer.functions as F

rng = np.random.RandomState(0)
patterns = rng.rand(4, 1, 8, 8)
labels = rng.randint(4, size=80).astype('i')
images = (patterns[labels] + 0.3 * rng.randn(80, 1, 8, 8)).astype('f')

model = chainer.FunctionSet(
    conv1=F.Convolution2D(1, 4, 3, pad=1, wscale=np.sqrt(2)),
    conv2=F.Convolution2D(4, 6, 3, stride=1, wscale=np.sqrt(2), nobias=True),
    fc=F.Linear(6 * 2 * 2, 4, wscale=0.1))


def forward(x_data, t_data, train=True):
    x = chainer.Variable(x_data, volatile=not train)
    t = chainer.Variable(t_data, volatile=not train)
    h = F.max_pooling_2d(F.relu(model.conv1(x), use_cudnn=False), 2, stride=2, use_cudnn=False)
    h = F.relu(model.conv2(h))
    h = F.local_response_normalization(h)
    return F.softmax_cross_entropy(model.fc(F.dropout(h, train=train)), t, use_cudnn=False)


optimizer = optimizers.MomentumSGD(lr=0.1, momentum=0.9)
optimizer.setup(model)
optimizer.add_hook(chainer.optimizer.WeightDecay(0.001))

for epoch in range(3):
    for i in range(0, 60, 10):
        optimizer.zero_grads()
        loss = forward(images[i:i + 10], labels[i:i + 10])
        loss.backward()
        optimizer.update()
        print(float(loss.data))
    optimizer.lr *= 0.5
    print('test', float(forward(images[60:], labels[60:], train=False).data))
