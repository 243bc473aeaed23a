"""Self-attention with a Trainer: forward(), own converter, InverseShift, MultithreadIterator."""
import json
import numpy as np
import chainer
import chainer.functions as F
import chainer.links as L
from chainer import training
from chainer.training import extensions


class Attention(chainer.Chain):
    def __init__(self, n_vocab, n_units, n_heads):
        super(Attention, self).__init__()
        self.n_heads = n_heads
        with self.init_scope():
            self.embed = L.EmbedID(n_vocab, n_units, ignore_label=-1)
            self.position = chainer.Parameter(chainer.initializers.Normal(0.1), (6, n_units))
            self.qkv = L.Linear(n_units, 3 * n_units, nobias=True)
            self.norm = L.LayerNormalization(n_units)
            self.out = L.Linear(n_units, n_vocab)

    def forward(self, x):
        b, n = x.shape
        mask = (x != -1)[:, None, None, :]
        h = self.embed(x) + F.broadcast_to(self.position, (b, n, self.position.shape[1]))
        q, k, v = F.separate(F.reshape(self.qkv(h, n_batch_axes=2), (
            b, n, 3, self.n_heads, -1)).transpose(2, 0, 3, 1, 4), axis=0)
        score = F.matmul(q, k, transb=True) / np.float32(q.shape[-1] ** 0.5)
        score = F.where(np.broadcast_to(mask, score.shape), score,
                        np.full(score.shape, -1e9, 'f'))
        mixed = F.matmul(F.dropout(F.softmax(score, axis=3), 0.1), v)
        mixed = F.reshape(F.transpose(mixed, (0, 2, 1, 3)), (b, n, -1))
        return self.out(F.reshape(self.norm((h + mixed).reshape(b * n, -1)), (b * n, -1)))


class Copy(chainer.Chain):
    def __init__(self, predictor):
        super(Copy, self).__init__()
        with self.init_scope():
            self.predictor = predictor

    def forward(self, x, t):
        y = self.predictor(x)
        loss = F.softmax_cross_entropy(y, t.reshape(-1), ignore_label=-1)
        accuracy = F.accuracy(y, t.reshape(-1), ignore_label=-1)
        chainer.report({'loss': loss, 'accuracy': accuracy}, self)
        return loss


rng = np.random.RandomState(0)
data = []
for _ in range(80):
    n = rng.randint(3, 7)
    x = rng.randint(0, 7, n).astype('i')
    data.append((x, x[::-1].copy()))
model = Copy(Attention(7, 8, 2))
optimizer = chainer.optimizers.Adam(alpha=0.01)
optimizer.setup(model)
train_iter = chainer.iterators.SerialIterator(data[:60], 10, shuffle=False)
test_iter = chainer.iterators.MultithreadIterator(data[60:], 10, repeat=False, shuffle=False)


def convert(batch, device):
    pad = np.full(6, -1, 'i')
    batch = [tuple(np.concatenate([a, pad])[:6] for a in pair) for pair in batch]
    return chainer.dataset.concat_examples(batch, device)


updater = training.updaters.StandardUpdater(train_iter, optimizer, converter=convert, device=-1)
trainer = training.Trainer(updater, (3, 'epoch'), out='.', extensions=[
    extensions.Evaluator(test_iter, model, converter=convert, device=-1),
    extensions.FailOnNonNumber()])
trainer.extend(extensions.InverseShift('alpha', 0.1, 0.5, init=0.02), trigger=(1, 'iteration'))
trainer.extend(extensions.LogReport(trigger=(2, 'iteration')))
trainer.extend(extensions.VariableStatisticsPlot(model), trigger=(100, 'iteration'))
trainer.run()
for entry in json.load(open('log')):
    print(entry['main/loss'])
    if 'validation/main/loss' in entry:
        print('test', entry['validation/main/loss'])
        print('accuracy', entry['validation/main/accuracy'])
print('alpha', optimizer.alpha)
