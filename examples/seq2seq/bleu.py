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
    """Count the n-grams of one to four words in translations.

    Returns:
        Counts, which can be summed over batches: for each n, how many n-grams also occur in the
        references; for each n, how many n-grams there are; and the number of words in the
        references.
    """
    matches, totals = np.zeros((2, LONGEST))
    for reference, translation in zip(references, translations, strict=True):
        for n in range(1, LONGEST + 1):
            wanted, written = _n_grams(reference, n), _n_grams(translation, n)
            matches[n - 1] += (wanted & written).total()
            totals[n - 1] += written.total()
    return np.concatenate([matches, totals, [sum(map(len, references))]])


def score(counts):
    """Return BLEU, from 0 to 1, given the result of :func:`count`."""
    matches, totals, n_reference = counts[:LONGEST], counts[LONGEST:-1], counts[-1]
    if not matches.all():
        return 0.
    brevity = min(0., 1 - n_reference / totals[0])
    return float(np.exp(brevity + np.log(matches / totals).mean()))


def _n_grams(sentence, n):
    return collections.Counter(zip(*(sentence[i:] for i in range(n)), strict=False))


class BleuEvaluator(chainermn.extensions.GenericMultiNodeEvaluator):
    """Reports the BLEU of the model's translations of the sentences of all processes.

    BLEU cannot be computed as the mean of the scores of the processes.
    """

    def calc_local(self, xs, ys):
        """Translate a batch and count its n-grams, on every process."""
        translations = self._targets['main'].translate(xs)
        # A process that has only the encoder has no translations, so it counts nothing.
        references = [y.tolist() for y in ys] if translations else []
        return count(references, translations)

    def aggregate(self, results):
        """Sum the counts of all batches of all processes, on the root."""
        chainer.report({'validation/bleu': score(sum(results))})
