"""The dataset without content."""

import chainer
import numpy as np
import pytest

from chainermn.datasets import create_empty_dataset


@pytest.mark.parametrize('dataset', [[], [1, 2, 3], np.zeros((4, 2)),
                                     chainer.datasets.TupleDataset([1, 2], [3, 4])])
def test_is_as_long_and_has_nothing(dataset):
    assert create_empty_dataset(dataset) == [()] * len(dataset)


def test_a_model_is_called_without_arguments():
    batch = next(chainer.iterators.SerialIterator(create_empty_dataset(range(5)), 3))
    assert chainer.dataset.concat_examples(batch) == ()
