"""Translation: NStepLSTM encoder and decoder, variable lengths, no_backprop_mode."""
import numpy as np
import chainer
import chainer.functions as F
import chainer.links as L

EOS = 0


def sequence_embed(embed, xs):
    x_section = np.cumsum([len(x) for x in xs[:-1]])
    return F.split_axis(embed(F.concat(xs, axis=0)), x_section, 0)


class Seq2seq(chainer.Chain):
    def __init__(self, n_layers, n_vocab, n_units):
        super(Seq2seq, self).__init__()
        with self.init_scope():
            self.embed_x = L.EmbedID(n_vocab, n_units)
            self.embed_y = L.EmbedID(n_vocab, n_units)
            self.encoder = L.NStepLSTM(n_layers, n_units, n_units, 0.1)
            self.decoder = L.NStepLSTM(n_layers, n_units, n_units, 0.1)
            self.W = L.Linear(n_units, n_vocab)

    def __call__(self, xs, ys):
        xs = [x[::-1] for x in xs]
        eos = np.array([EOS], 'i')
        ys_in = [F.concat([eos, y], axis=0) for y in ys]
        ys_out = [F.concat([y, eos], axis=0) for y in ys]
        hx, cx, _ = self.encoder(None, None, sequence_embed(self.embed_x, xs))
        _, _, os = self.decoder(hx, cx, sequence_embed(self.embed_y, ys_in))
        loss = F.sum(F.softmax_cross_entropy(
            self.W(F.concat(os, axis=0)), F.concat(ys_out, axis=0), reduce='no')) / len(xs)
        chainer.report({'loss': loss.data}, self)
        return loss

    def translate(self, xs, max_length=6):
        batch = len(xs)
        with chainer.no_backprop_mode(), chainer.using_config('train', False):
            h, c, _ = self.encoder(None, None, sequence_embed(self.embed_x, [x[::-1] for x in xs]))
            ys = np.full(batch, EOS, 'i')
            result = []
            for i in range(max_length):
                eys = F.split_axis(self.embed_y(ys), batch, 0)
                h, c, ys = self.decoder(h, c, eys)
                ys = np.argmax(self.W(F.concat(ys, axis=0)).data, axis=1).astype('i')
                result.append(ys)
        return np.array(result).T


rng = np.random.RandomState(0)
xs = [rng.randint(1, 9, rng.randint(2, 6)).astype('i') for _ in range(60)]
xs.sort(key=len, reverse=True)
ys = [x % 8 + 1 for x in xs]
model = Seq2seq(2, 9, 8)
optimizer = chainer.optimizers.Adam(alpha=0.02)
optimizer.setup(model)
for epoch in range(3):
    for i in range(0, 60, 12):
        loss = model(xs[i:i + 12], ys[i:i + 12])
        model.cleargrads()
        loss.backward()
        optimizer.update()
        print(float(loss.data))
translated = model.translate(xs[:10])
print('right', sum(int(a[0] == b[0]) for a, b in zip(translated, ys)))
