"""Encoder and decoder: one reads a sentence into the state of an LSTM, the other continues it."""

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np


def embedded(embed, sentences):
    """Embed the words of all sentences in one call."""
    ends = np.cumsum([len(sentence) for sentence in sentences[:-1]])
    return F.split_axis(embed(F.concat(sentences, axis=0)), ends, axis=0)


class Encoder(chainer.Chain):
    """Reads sentences. The final states of its LSTM represent them."""

    def __init__(self, n_layers, n_words, n_units):
        super().__init__()
        with self.init_scope():
            self.embed = L.EmbedID(n_words, n_units)
            self.rnn = L.NStepLSTM(n_layers, n_units, n_units, dropout=0.1)

    def inputs(self, xs):
        """Return the input of the LSTM."""
        return embedded(self.embed, xs)


class Decoder(chainer.Chain):
    """Writes sentences, starting from the final states of the encoder.

    Args:
        n_layers: Number of layers of the LSTM.
        n_words: Number of words of the target language.
        n_units: Number of units of each layer.
        end: Number of the word that begins and ends a sentence.
    """

    def __init__(self, n_layers, n_words, n_units, end):
        super().__init__()
        self.end = end
        with self.init_scope():
            self.embed = L.EmbedID(n_words, n_units)
            self.rnn = L.NStepLSTM(n_layers, n_units, n_units, dropout=0.1)
            self.fc = L.Linear(n_units, n_words)

    def inputs(self, ys):
        """Return the input of the LSTM in training: the word before each word of ``ys``.

        In :meth:`write`, the input is the word that the LSTM has just written.
        """
        end = self.xp.array([self.end], np.int32)
        return embedded(self.embed, [F.concat([end, y], axis=0) for y in ys])

    def loss(self, outputs, ys):
        """Return the mean cross entropy per word."""
        end = self.xp.array([self.end], np.int32)
        words = F.concat([F.concat([y, end], axis=0) for y in ys], axis=0)
        loss = F.softmax_cross_entropy(self.fc(F.concat(outputs, axis=0)), words)
        chainer.report({'loss': loss}, self)
        return loss

    def write(self, h, c, max_length=50):
        """Return a translation for each state. Choose the most likely word in each step."""
        n = h.shape[1]
        words = self.xp.full(n, self.end, np.int32)
        columns = []
        for _ in range(max_length):
            h, c, outputs = self.rnn(h, c, F.split_axis(self.embed(words), n, axis=0))
            words = self.fc(F.concat(outputs, axis=0)).array.argmax(axis=1).astype(np.int32)
            columns.append(chainer.get_device('@numpy').send(words))
            if (np.stack(columns) == self.end).any(axis=0).all():
                break
        return [sentence[:sentence.index(self.end)] if self.end in sentence else sentence
                for sentence in np.stack(columns, axis=1).tolist()]
