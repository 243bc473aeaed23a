"""Custom data sets: DatasetMixin, TransformDataset, MultiprocessIterator, cross validation."""
import numpy as np
import chainer
from chainer import Variable
from chainer.dataset import concat_examples
import chainer.functions as F
import chainer.links as L


class Shapes(chainer.dataset.DatasetMixin):
    def __init__(self, n, crop):
        self.n, self.crop = n, crop

    def __len__(self):
        return self.n

    def get_example(self, i):
        rng = np.random.RandomState(i)
        image = np.zeros((1, 9, 9), dtype=np.float32)
        label = i % 3
        if label == 0:
            image[:, rng.randint(2, 7)] = 1
        elif label == 1:
            image[:, :, rng.randint(2, 7)] = 1
        else:
            image[0] = np.eye(9)
        top, left = rng.randint(0, 10 - self.crop, 2)
        image = image[:, top:top + self.crop, left:left + self.crop]
        return image + rng.randn(*image.shape).astype('f') * 0.1, np.int32(label)


def flip(in_data):
    image, label = in_data
    return image[:, ::-1] if label < 2 else image[:, ::-1, ::-1], label


model = L.Classifier(chainer.ChainList(L.Convolution2D(1, 4, 3, pad=1), L.Linear(4 * 3 * 3, 3)))
model.predictor.add_link(L.Scale(W_shape=(3,)))


def predict(x):
    conv, fc, scale = model.predictor
    return scale(fc(F.max_pooling_2d(F.elu(conv(x)), 3)))


optimizer = chainer.optimizers.SMORMS3(lr=0.02)
optimizer.setup(model)
train = chainer.datasets.TransformDataset(Shapes(90, 7), flip)
folds = chainer.datasets.get_cross_validation_datasets(Shapes(30, 7), 3)
iterator = chainer.iterators.MultiprocessIterator(
    train, 10, repeat=False, shuffle=False, n_processes=2)
for batch in iterator:
    x, t = concat_examples(batch)
    loss = F.softmax_cross_entropy(predict(Variable(x)), Variable(t))
    optimizer.target.cleargrads()
    loss.backward()
    optimizer.update()
    print(float(loss.data))
iterator.finalize()
for part, test in folds:
    x, t = concat_examples(test[:], device=-1, padding=0)
    y = predict(Variable(x, volatile='on'))
    print('fold', float(F.softmax_cross_entropy(y, Variable(t, volatile='on')).data))
