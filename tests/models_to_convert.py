"""Models for tests of conversions, and example inputs."""

import importlib.util
import pathlib

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np

EXAMPLES = pathlib.Path(__file__).parents[1] / 'examples'

LSTM_LIKE = ('NStepLSTM', 'NStepBiLSTM', 'NStepGRU', 'NStepBiGRU', 'NStepRNNTanh', 'NStepRNNReLU',
             'NStepBiRNNTanh', 'NStepBiRNNReLU')


def draw(*shape):
    return np.random.RandomState(0).standard_normal(shape).astype('f')


class Net(chainer.Chain):
    """A model with the given links; ``forward`` calls the given function with the model."""

    def __init__(self, function, **links):
        super().__init__()
        self.function = function
        with self.init_scope():
            for name, link in links.items():
                setattr(self, name, link)

    def forward(self, *args):
        return self.function(self, *args)


def example(folder, module):
    """Import a module of one of the repository's examples."""
    spec = importlib.util.spec_from_file_location(
        f'example_{folder}', EXAMPLES / folder / f'{module}.py')
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def steps(link, n=3):
    """Return a model that runs a recurrent link for n steps."""
    def run(self, x):
        self.rnn.reset_state()
        return [self.rnn(x[:, t]) for t in range(n)][-1]

    return Net(run, rnn=link)


def n_step(name):
    h = [None] * (2 if 'LSTM' in name else 1)
    xs = [draw(n, 5) for n in (4, 3, 2)]
    return Net(lambda self, xs: self.rnn(*h, xs), rnn=getattr(L, name)(2, 5, 4, .3)), (xs,)


def mlp():
    return L.Classifier(Net(
        lambda self, x: self.l2(F.dropout(F.relu(self.bn(self.l1(x))), .2)),
        l1=L.Linear(None, 10), bn=L.BatchNormalization(10), l2=L.Linear(10, 3),
    )), (draw(6, 2, 4), np.array([0, 1, 2, 1, 0, 2], 'i'))


def transformer():
    d, heads = 8, 2

    def split(x, n, t):
        return F.transpose(F.reshape(x, (n, t, heads, d // heads)), (0, 2, 1, 3))

    def run(self, words):
        n, t = words.shape
        mask = words != -1
        positions = self.xp.broadcast_to(self.xp.arange(t, dtype='i'), (n, t))
        x = self.words(words) + self.positions(positions)
        q, k, v = (split(link(x, n_batch_axes=2), n, t) for link in (self.q, self.k, self.v))
        a = F.matmul(q, k, transb=True) * (d // heads) ** -.5
        a = F.where(self.xp.broadcast_to(mask[:, None, None, :], a.shape), a,
                    self.xp.full(a.shape, -1e9, 'f'))
        h = F.matmul(F.dropout(F.softmax(a, axis=3), .1), v)
        h = F.reshape(F.transpose(h, (0, 2, 1, 3)), (n, t, d))
        x = self.norm1(F.reshape(x + self.out(h, n_batch_axes=2), (n * t, d)))
        return F.reshape(self.norm2(x + self.up2(F.relu(self.up1(x)))), (n, t, d))

    return Net(
        run, words=L.EmbedID(11, d, ignore_label=-1), positions=L.EmbedID(6, d),
        q=L.Linear(d, d), k=L.Linear(d, d), v=L.Linear(d, d), out=L.Linear(d, d),
        up1=L.Linear(d, 16), up2=L.Linear(16, d), norm1=L.LayerNormalization(d),
        norm2=L.LayerNormalization(d),
    ), (np.array([[1, 2, 3, 4, -1, -1], [5, 6, 7, 8, 9, 10], [3, 2, 1, -1, -1, -1]], 'i'),)


def seq2seq():
    """Return an encoder and a decoder with attention, and three pairs of sentences."""
    def embedded(embed, sentences):
        ends = np.cumsum([len(each) for each in sentences[:-1]])
        return F.split_axis(embed(F.concat(sentences, axis=0)), ends, 0)

    def run(self, xs, ys):
        end = self.xp.array([0], 'i')
        h, c, encoded = self.encoder(None, None, embedded(self.x, [x[::-1] for x in xs]))
        *_, decoded = self.decoder(h, c, embedded(self.y, [F.concat([end, y], 0) for y in ys]))
        keys, queries = F.pad_sequence(encoded), F.pad_sequence(decoded)
        scores = F.matmul(queries, keys, transb=True)
        mask = np.zeros(scores.shape, bool)
        for i, x in enumerate(xs):
            mask[i, :, :len(x)] = True
        weights = F.softmax(F.where(mask, scores, np.full(scores.shape, -1e9, 'f')), axis=2)
        both = F.concat([queries, F.matmul(weights, keys)], 2)
        rows = F.concat([both[i, :len(y) + 1] for i, y in enumerate(ys)], 0)
        return F.softmax_cross_entropy(
            self.fc(F.tanh(self.attention(rows))),
            F.concat([F.concat([y, end], 0) for y in ys], 0))

    xs, ys = ([np.array(each, 'i') for each in sentences]
              for sentences in ([[1, 2, 3], [4, 5], [6]], [[3, 2], [5], [7, 8, 1]]))
    return Net(run, x=L.EmbedID(9, 6), y=L.EmbedID(9, 6), encoder=L.NStepLSTM(1, 6, 6, .1),
               decoder=L.NStepLSTM(1, 6, 6, .1), attention=L.Linear(12, 6), fc=L.Linear(6, 9),
               ), (xs, ys)


MODELS = {
    **{name: lambda name=name: n_step(name) for name in LSTM_LIKE},
    'LSTM': lambda: (steps(L.LSTM(5, 4)), (draw(3, 3, 5),)),
    'StatefulGRU': lambda: (steps(L.StatefulGRU(5, 4)), (draw(3, 3, 5),)),
    'StatefulPeepholeLSTM': lambda: (steps(L.StatefulPeepholeLSTM(5, 4)), (draw(3, 3, 5),)),
    'StatefulZoneoutLSTM': lambda: (steps(L.StatefulZoneoutLSTM(5, 4, .3, .3)), (draw(3, 3, 5),)),
    'StatelessLSTM': lambda: (Net(lambda self, c, h, x: self.rnn(c, h, x),
                                  rnn=L.StatelessLSTM(5, 4)), (draw(3, 4), draw(3, 4), draw(3, 5))),
    'StatelessMGU': lambda: (Net(lambda self, h, x: self.rnn(h, x), rnn=L.StatelessMGU(5, 4)),
                             (draw(3, 4), draw(3, 5))),
    'InceptionBN': lambda: (L.InceptionBN(3, 4, 4, 6, 4, 6, 'avg', 4), (draw(2, 3, 9, 9),)),
    'generator': lambda: (example('dcgan', 'net').Generator(10, 1, 16, 8), (draw(4, 10),)),
    'discriminator': lambda: (example('dcgan', 'net').Discriminator(1, 8), (draw(4, 1, 16, 16),)),
    'imagenet': lambda: (example('imagenet', 'models').Tiny(10), (draw(2, 3, 33, 33),)),
    'mlp': mlp, 'seq2seq': seq2seq, 'transformer': transformer,
}

#: Models that accept any batch size.
DYNAMIC = ('LSTM', 'StatefulGRU', 'StatefulPeepholeLSTM', 'StatelessLSTM', 'StatelessMGU',
           'InceptionBN', 'generator', 'discriminator', 'imagenet', 'mlp', 'transformer')


def make(name):
    np.random.seed(0)
    return MODELS[name]()
