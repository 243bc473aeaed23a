"""Segmentation: F.MaxPooling2D objects, upsampling_2d, class_weight, RoI pooling."""
import numpy as np
import chainer
from chainer import Variable, optimizers
import chainer.functions as F
import chainer.links as L


class SegNet(chainer.Chain):
    def __init__(self):
        super(SegNet, self).__init__(
            conv1=L.Convolution2D(2, 4, 3, pad=1), bn1=L.BatchNormalization(4, use_beta=False),
            conv2=L.Convolution2D(4, 4, 3, pad=1),
            decode2=L.Deconvolution2D(4, 4, 3, pad=1, nobias=True),
            decode1=L.Convolution2D(8, 3, 1))

    def __call__(self, x, train=True):
        p1 = F.MaxPooling2D(2, 2, use_cudnn=False)
        p2 = F.MaxPooling2D(2, 2, use_cudnn=False)
        h1 = F.relu(self.bn1(self.conv1(x), test=not train))
        h = F.relu(self.conv2(p1(h1)))
        h = p2(h)
        h = F.upsampling_2d(h, p2.indexes, p2.kh, p2.sy, p2.ph, (4, 4))
        h = F.relu(self.decode2(h))
        h = F.upsampling_2d(h, p1.indexes, ksize=(p1.kh, p1.kw), stride=(p1.sy, p1.sx),
                            pad=(p1.ph, p1.pw), outsize=x.data.shape[2:])
        h = F.concat((h, F.unpooling_2d(F.average_pooling_2d(h1, 2), 2, cover_all=False)))
        return self.decode1(h)


rng = np.random.RandomState(0)
x = rng.randn(24, 2, 8, 8).astype('f')
t = ((x.sum(axis=1) > 0).astype('i') + (x[:, 0] > 1)).astype('i')
t[:, 0] = -1
weight = np.array([1, 0.5, 2], 'f')
model = SegNet()
optimizer = optimizers.AdaGrad(lr=0.05)
optimizer.setup(model)
for epoch in range(3):
    for i in range(0, 24, 8):
        y = model(Variable(x[i:i + 8]))
        loss = F.softmax_cross_entropy(y, Variable(t[i:i + 8]), use_cudnn=False,
                                       class_weight=weight, ignore_label=-1)
        model.cleargrads()
        loss.backward()
        optimizer.update()
        print(float(loss.data))
        print('accuracy', float(F.accuracy(y, Variable(t[i:i + 8]), ignore_label=-1).data))
rois = np.array([[0, 1, 1, 6, 6], [1, 0, 0, 4, 7]], 'f')
pooled = F.roi_pooling_2d(y, Variable(rois), 2, 2, 1.0)
print('pooled', float(pooled.data.sum()))
