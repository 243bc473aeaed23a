"""ResNet-50, and a tiny network for CPUs."""

import chainer
import chainer.functions as F
import chainer.links as L
from chainer.links.model.vision.resnet import BuildingBlock


class ResNet50(chainer.Chain):
    """Fifty layers (He, Zhang, Ren and Sun, "Deep residual learning for image recognition").

    It consists of Chainer's blocks. ``chainer.links.ResNet50Layers`` would need pretrained weights.
    """

    def __init__(self, n_classes):
        super().__init__()
        w = chainer.initializers.HeNormal()
        with self.init_scope():
            self.conv1 = L.Convolution2D(3, 64, ksize=7, stride=2, pad=3, initialW=w, nobias=True)
            self.bn1 = L.BatchNormalization(64)
            self.res2 = BuildingBlock(3, 64, 64, 256, 1, w, downsample_fb=True)
            self.res3 = BuildingBlock(4, 256, 128, 512, 2, w, downsample_fb=True)
            self.res4 = BuildingBlock(6, 512, 256, 1024, 2, w, downsample_fb=True)
            self.res5 = BuildingBlock(3, 1024, 512, 2048, 2, w, downsample_fb=True)
            self.fc = L.Linear(2048, n_classes)

    def forward(self, x):
        h = F.relu(self.bn1(self.conv1(x)))
        h = F.max_pooling_2d(h, ksize=3, stride=2, pad=1, cover_all=False)
        for block in self.res2, self.res3, self.res4, self.res5:
            h = block(h)
        return self.fc(F.average_pooling_2d(h, h.shape[2:]))


class Tiny(chainer.Chain):
    """Two convolutions with batch normalization."""

    def __init__(self, n_classes):
        super().__init__()
        with self.init_scope():
            self.conv1 = L.Convolution2D(3, 8, ksize=5, stride=2, pad=2, nobias=True)
            self.bn1 = L.BatchNormalization(8)
            self.conv2 = L.Convolution2D(8, 16, ksize=5, stride=2, pad=2, nobias=True)
            self.bn2 = L.BatchNormalization(16)
            self.fc = L.Linear(16, n_classes)

    def forward(self, x):
        h = F.relu(self.bn1(self.conv1(x)))
        h = F.relu(self.bn2(self.conv2(h)))
        return self.fc(F.average_pooling_2d(h, h.shape[2:]))
