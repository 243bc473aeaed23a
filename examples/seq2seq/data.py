"""Sentence pairs: generated, or read from files with one sentence per line."""

import collections
import pathlib

import chainer
import numpy as np

DIGITS = ['zero', 'one', 'two', 'three', 'four', 'five', 'six', 'seven', 'eight', 'nine']
UNKNOWN, END = '<unknown>', '<end>'


def load(files=None):
    """Read sentence pairs from files, or generate them.

    Args:
        files: Paths of the training sentences, their translations, the validation sentences and
            their translations; ``None`` to generate data.

    Returns:
        Training pairs and validation pairs. A pair consists of two lists of words.
    """
    if files is None:
        pairs = generate(3000)
        return pairs[:2500], pairs[2500:]
    sentences = [[line.split() for line in pathlib.Path(file).read_text().splitlines()]
                 for file in files]
    return (list(zip(sentences[0], sentences[1], strict=True)),
            list(zip(sentences[2], sentences[3], strict=True)))


def generate(n, seed=0):
    """Generate sequences of two to six digits, and their translations to words in reverse order."""
    random = np.random.RandomState(seed)
    pairs = []
    for _ in range(n):
        digits = random.randint(10, size=random.randint(2, 7))
        pairs.append(([str(digit) for digit in digits], [DIGITS[digit] for digit in digits[::-1]]))
    return pairs


def make_vocabulary(sentences, size):
    """Return a dict that maps the most common words to numbers."""
    counts = collections.Counter(word for sentence in sentences for word in sentence)
    words = [UNKNOWN, END, *(word for word, _ in counts.most_common(size - 2))]
    return {word: number for number, word in enumerate(words)}


def numbered(pairs, source, target):
    """Replace each word with its number in the vocabulary of its language."""
    return [tuple(np.array([vocabulary.get(word, vocabulary[UNKNOWN]) for word in sentence],
                           np.int32)
                  for vocabulary, sentence in zip((source, target), pair, strict=True))
            for pair in pairs]


@chainer.dataset.converter()
def convert(batch, device):
    """Return the arguments of the models: two lists, because the lengths of sentences differ."""
    xs, ys = zip(*batch, strict=True)
    return {'xs': [device.send(x) for x in xs], 'ys': [device.send(y) for y in ys]}
