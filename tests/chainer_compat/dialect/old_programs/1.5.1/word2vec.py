"""word2vec: skip-gram with NegativeSampling and with BinaryHierarchicalSoftmax."""
import collections
import numpy as np
import chainer
from chainer import cuda
import chainer.functions as F
import chainer.links as L
import chainer.optimizers as O

window, batchsize, unit = 2, 20, 8
rng = np.random.RandomState(5)
dataset = (np.cumsum(rng.geometric(0.5, 300)) % 20).astype(np.int32)
n_vocab = 20
counts = collections.Counter(dataset.tolist())
cs = [counts[w] + 1 for w in range(n_vocab)]
chainer.Variable(dataset)


class SkipGram(chainer.Chain):
    def __init__(self, n_vocab, n_units, loss_func):
        super(SkipGram, self).__init__(embed=F.EmbedID(n_vocab, n_units), loss_func=loss_func)

    def __call__(self, x, context):
        loss = None
        for c in context:
            e = self.embed(c)
            loss_i = self.loss_func(e, x)
            loss = loss_i if loss is None else loss + loss_i
        return loss


def train(loss_func):
    model = SkipGram(n_vocab, unit, loss_func)
    optimizer = O.Adam()
    optimizer.setup(model)
    for epoch in range(2):
        accum_loss = 0
        indexes = np.random.permutation(len(dataset) - window * 2) + window
        for i in range(0, len(indexes), batchsize):
            position = indexes[i:i + batchsize]
            w = np.random.randint(window - 1) + 1
            offset = np.concatenate([np.arange(-w, 0), np.arange(1, w + 1)])
            context = [chainer.Variable(dataset[position + o]) for o in offset]
            loss = model(chainer.Variable(dataset[position]), context)
            accum_loss += loss.data
            model.zerograds()
            loss.backward()
            optimizer.update()
        print(accum_loss)
    return model


loss_func = L.NegativeSampling(unit, cs, 5)
loss_func.W.data[...] = np.random.RandomState(0).randn(*loss_func.W.data.shape) * 0.1
train(loss_func)
HSM = L.BinaryHierarchicalSoftmax
model = train(HSM(unit, HSM.create_huffman_tree({w: c for w, c in enumerate(cs)})))
W = cuda.to_cpu(model.embed.W.data)
print('norm', float(np.sqrt((W * W).sum())))
