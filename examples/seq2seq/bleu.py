"""BLEU, the usual metric for translations, computed from counts over all sentences.

Papineni, Roukos, Ward and Zhu, "BLEU: a method for automatic evaluation of machine translation",
2002.
"""

import collections

import chainer
import numpy as np

import chainermn

LONGEST = 4  # words


def count(references, translations):
    """Count sequences of one to four words.

    Returns:
        Numbers that can be added for several batches: how many sequences of each length are
        there in the references too, how many there are, and the number of words in the references.
    """
    found, there = np.zeros((2, LONGEST))
    for reference, translation in zip(references, translations, strict=True):
        for n in range(1, LONGEST + 1):
            wanted, written = _sequences(reference, n), _sequences(translation, n)
            found[n - 1] += (wanted & written).total()
            there[n - 1] += written.total()
    return np.concatenate([found, there, [sum(map(len, references))]])


def score(counts):
    """Return BLEU, from 0 to 1, for what was counted."""
    found, there, n_reference = counts[:LONGEST], counts[LONGEST:-1], counts[-1]
    if not found.all():
        return 0.
    brevity = min(0., 1 - n_reference / there[0])
    return float(np.exp(brevity + np.log(found / there).mean()))


def _sequences(sentence, n):
    return collections.Counter(zip(*(sentence[i:] for i in range(n)), strict=False))


class BleuEvaluator(chainermn.extensions.GenericMultiNodeEvaluator):
    """Reports the BLEU of what the model's ``translate`` makes of the sentences of all processes.

    The mean of each process's BLEU would be something else.
    """

    def calc_local(self, xs, ys):
        """Count in one batch, on every process."""
        translations = self._targets['main'].translate(xs)
        # A process that has only the encoder has no translations, and so nothing to count.
        references = [y.tolist() for y in ys] if translations else []
        return count(references, translations)

    def aggregate(self, results):
        """Add up the counts of all batches of all processes, on one of them."""
        chainer.report({'validation/bleu': score(sum(results))})
