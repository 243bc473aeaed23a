"""Text classification: EmbedID, NStepLSTM with train flags, variable lengths."""
import numpy as np
import chainer
from chainer import Variable
import chainer.functions as F
import chainer.links as L


class TextClassifier(chainer.Chain):
    def __init__(self, n_vocab, n_units, n_class):
        super(TextClassifier, self).__init__(
            embed=L.EmbedID(n_vocab, n_units, ignore_label=-1),
            rnn=L.NStepLSTM(2, n_units, n_units, 0.3, use_cudnn=True),
            out=L.Linear(n_units, n_class))
        self.n_units = n_units

    def __call__(self, xs, ts, train=True):
        zeros = np.zeros((2, len(xs), self.n_units), 'f')
        lengths = [len(x) for x in xs]
        exs = self.embed(F.concat(xs, axis=0))
        exs = F.split_axis(exs, np.cumsum(lengths)[:-1], 0, force_tuple=True)
        hx = Variable(zeros, volatile='auto')
        cx = Variable(zeros.copy(), volatile='auto')
        hy, cy, ys = self.rnn(hx, cx, exs, train=train)
        y = self.out(F.dropout(hy[-1], train=train))
        self.accuracy = F.accuracy(y, ts)
        return F.softmax_cross_entropy(y, ts)


def convert(batch, train):
    batch = sorted(batch, key=lambda pair: -len(pair[0]))
    volatile = chainer.OFF if train else chainer.ON
    xs = [Variable(np.array(x, 'i'), volatile=volatile) for x, _ in batch]
    return xs, Variable(np.array([t for _, t in batch], 'i'), volatile=volatile)


rng = np.random.RandomState(0)
texts = [rng.randint(0, 15, rng.randint(3, 8)) for _ in range(60)]
dataset = [(text, int((text < 4).any())) for text in texts]
train, test = chainer.datasets.split_dataset(dataset, 50)

model = TextClassifier(15, 6, 2)
optimizer = chainer.optimizers.Adam(alpha=0.02)
optimizer.setup(model)
iterator = chainer.iterators.SerialIterator(train, 10, shuffle=False)
while iterator.epoch < 4:
    xs, ts = convert(iterator.next(), True)
    model.cleargrads()
    loss = model(xs, ts)
    loss.backward()
    optimizer.update()
    print(float(loss.data))
    if iterator.is_new_epoch:
        xs, ts = convert(list(test), False)
        print('test', float(model(xs, ts, train=False).data))
        print('accuracy', float(model.accuracy.data))
