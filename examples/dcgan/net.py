"""The two networks: a generator and a discriminator."""

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np


class Generator(chainer.Chain):
    """Draws images with values from -1 to 1, of shape (channels, size, size), from noise."""

    def __init__(self, n_hidden, channels, size, width):
        super().__init__()
        self.n_hidden = n_hidden
        self.shape = 2 * width, size // 4, size // 4
        with self.init_scope():
            self.fc = L.Linear(n_hidden, int(np.prod(self.shape)), nobias=True)
            self.bn0 = L.BatchNormalization(2 * width)
            self.up1 = L.Deconvolution2D(2 * width, width, ksize=4, stride=2, pad=1, nobias=True)
            self.bn1 = L.BatchNormalization(width)
            self.up2 = L.Deconvolution2D(width, channels, ksize=4, stride=2, pad=1)

    def noise(self, n):
        """Return the input for n images."""
        xp = self.xp
        return xp.asarray(xp.random.uniform(-1, 1, (n, self.n_hidden)), dtype=xp.float32)

    def forward(self, z):
        h = F.relu(self.bn0(F.reshape(self.fc(z), (len(z), *self.shape))))
        h = F.relu(self.bn1(self.up1(h)))
        return F.tanh(self.up2(h))


class Discriminator(chainer.Chain):
    """Scores images: high scores for real images, low scores for generated ones."""

    def __init__(self, channels, width):
        super().__init__()
        with self.init_scope():
            self.down1 = L.Convolution2D(channels, width, ksize=4, stride=2, pad=1)
            self.down2 = L.Convolution2D(width, 2 * width, ksize=4, stride=2, pad=1, nobias=True)
            self.bn2 = L.BatchNormalization(2 * width)
            self.fc = L.Linear(None, 1)

    def forward(self, x):
        h = F.leaky_relu(self.down1(x))
        h = F.leaky_relu(self.bn2(self.down2(h)))
        return self.fc(h)
