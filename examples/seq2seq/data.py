"""Sentence pairs: generated ones, or files with one sentence per line."""

import collections
import pathlib

import chainer
import numpy as np

DIGITS = ['zero', 'one', 'two', 'three', 'four', 'five', 'six', 'seven', 'eight', 'nine']
UNKNOWN, END = '<unknown>', '<end>'


def load(files=None):
    """Read the files of training and validation, source and target each; generate without.

    Returns:
        Training pairs and validation pairs. A pair is two lists of words.
    """
    if files is None:
        pairs = generate(3000)
        return pairs[:2500], pairs[2500:]
    sentences = [[line.split() for line in pathlib.Path(file).read_text().splitlines()]
                 for file in files]
    return (list(zip(sentences[0], sentences[1], strict=True)),
            list(zip(sentences[2], sentences[3], strict=True)))


def generate(n, seed=0):
    """Generate numbers of two to six digits, and their digits as words from right to left."""
    random = np.random.RandomState(seed)
    pairs = []
    for _ in range(n):
        digits = random.randint(10, size=random.randint(2, 7))
        pairs.append(([str(digit) for digit in digits], [DIGITS[digit] for digit in digits[::-1]]))
    return pairs


def make_vocabulary(sentences, size):
    """Give the most common words a number each."""
    counts = collections.Counter(word for sentence in sentences for word in sentence)
    words = [UNKNOWN, END, *(word for word, _ in counts.most_common(size - 2))]
    return {word: number for number, word in enumerate(words)}


def numbered(pairs, source, target):
    """Replace words by their numbers in the vocabularies of both languages."""
    return [tuple(np.array([vocabulary.get(word, vocabulary[UNKNOWN]) for word in sentence],
                           np.int32)
                  for vocabulary, sentence in zip((source, target), pair, strict=True))
            for pair in pairs]


@chainer.dataset.converter()
def convert(batch, device):
    """Make the arguments of the models, ``xs`` and ``ys``: lists, as lengths differ."""
    xs, ys = zip(*batch, strict=True)
    return {'xs': [device.send(x) for x in xs], 'ys': [device.send(y) for y in ys]}
