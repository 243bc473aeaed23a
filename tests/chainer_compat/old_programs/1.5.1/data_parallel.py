"""Two copies of a model, batches from a pool of processes: addgrads, copyparams, pickle."""
import multiprocessing
import threading
import numpy as np
import six
from six.moves import queue
import chainer
import chainer.functions as F
import chainer.links as L
from chainer import optimizers


class Net(chainer.Chain):
    insize = 8

    def __init__(self):
        super(Net, self).__init__(
            conv=L.Convolution2D(3, 4, 3),
            fc=L.Linear(4 * 3 * 3, 5))
        self.train = True

    def clear(self):
        self.loss = None
        self.accuracy = None

    def __call__(self, x, t):
        self.clear()
        h = F.max_pooling_2d(F.relu(self.conv(x)), 2)
        h = self.fc(F.dropout(h, train=self.train))
        self.loss = F.softmax_cross_entropy(h, t)
        self.accuracy = F.accuracy(h, t)
        return self.loss


def read_image(index):
    rng = np.random.RandomState(index)
    image = rng.rand(3, 10, 10).astype(np.float32) + np.float32(index % 5) / 4
    top, left = rng.randint(0, 3, 2)
    return image[:, top:top + Net.insize, left:left + Net.insize], index % 5


def feed_data(data_q, n):
    pool = multiprocessing.Pool(2)
    for i in six.moves.range(0, n, 8):
        batch = pool.map(read_image, range(i, i + 8))
        data_q.put((np.array([x for x, _ in batch]), np.array([t for _, t in batch], np.int32)))
    pool.close()
    pool.join()
    data_q.put('end')


if __name__ == '__main__':
    model = Net()
    optimizer = optimizers.MomentumSGD(lr=0.05, momentum=0.9)
    optimizer.setup(model)
    other = model.copy()
    data_q = queue.Queue(maxsize=2)
    feeder = threading.Thread(target=feed_data, args=(data_q, 80))
    feeder.daemon = True
    feeder.start()
    while True:
        inp = data_q.get()
        if inp == 'end':
            break
        x, t = inp
        model.zerograds()
        other.zerograds()
        for m, part in ((model, slice(0, 4)), (other, slice(4, 8))):
            loss = m(chainer.Variable(x[part]), chainer.Variable(t[part]))
            loss.backward()
            print(float(loss.data))
        model.addgrads(other)
        optimizer.update()
        other.copyparams(model)
    feeder.join()
    with open('model.pkl', 'wb') as f:
        six.moves.cPickle.dump(model, f, -1)
    with open('model.pkl', 'rb') as f:
        other = six.moves.cPickle.load(f)
    other.train = False
    x = chainer.Variable(x, volatile='on')
    print(float(other(x, chainer.Variable(t, volatile='on')).data))
