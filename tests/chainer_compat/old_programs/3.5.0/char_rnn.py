"""Character model: StatelessGRU, StatefulZoneoutLSTM, LayerNormalization, tied weights."""
import numpy as np
import chainer
import chainer.functions as F
import chainer.links as L


class CharModel(chainer.Chain):
    def __init__(self, n_vocab, n_units):
        super(CharModel, self).__init__()
        with self.init_scope():
            self.embed = L.EmbedID(n_vocab, n_units, initialW=chainer.initializers.Normal(0.1))
            self.gru = L.StatelessGRU(n_units, n_units)
            self.norm = L.LayerNormalization(n_units)
            self.zoneout = L.StatefulZoneoutLSTM(n_units, n_units, c_ratio=0.1, h_ratio=0.1)
            self.bias = chainer.Parameter(0, (n_vocab,))

    def __call__(self, h, x):
        h = self.gru(h, self.embed(x))
        out = self.zoneout(F.dropout(self.norm(h), 0.1))
        return h, F.linear(out, self.embed.W, self.bias)


text = 'the quick brown fox jumps over the lazy dog ' * 6
chars = sorted(set(text))
ids = np.array([chars.index(c) for c in text], 'i')
model = CharModel(len(chars), 10)
optimizer = chainer.optimizers.Adam(0.02)
optimizer.setup(model)
optimizer.add_hook(chainer.optimizer.GradientClipping(3))
streams = ids[:256].reshape(8, 32)
for epoch in range(3):
    model.zoneout.reset_state()
    h, loss, count = np.zeros((8, 10), 'f'), 0, 0
    for i in range(31):
        h, y = model(h, streams[:, i])
        loss += F.softmax_cross_entropy(y, streams[:, i + 1])
        count += 1
        if count % 10 == 0 or i == 30:
            model.cleargrads()
            loss.backward()
            loss.unchain_backward()
            optimizer.update()
            print(float(loss.data) / count)
            loss, count = 0, 0
with chainer.using_config('train', False), chainer.using_config('enable_backprop', False):
    model.zoneout.reset_state()
    h, y = model(np.zeros((1, 10), 'f'), ids[:1])
    print('logit', float(F.max(y).data))
