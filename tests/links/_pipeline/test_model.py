"""Links that keep a state between calls."""

import chainer
import chainer.links as L
import numpy as np
import pytest

from chainermn.links._pipeline.model import forget_states

pytestmark = pytest.mark.mpi_skip


@pytest.mark.parametrize('link', [
    L.LSTM(2, 3), L.StatefulGRU(2, 3), L.StatefulPeepholeLSTM(2, 3)],
    ids=lambda link: type(link).__name__)
def test_state_of_another_micro_batch(link):
    model = chainer.Sequential(link, L.Linear(3, 1))
    x = np.ones((4, 2), 'f')
    forget_states(model)
    expected = model(x).array
    forget_states(model)
    with pytest.raises(RuntimeError, match=f'{type(link).__name__} still has the state of another'):
        model(x)
    link.reset_state()
    np.testing.assert_array_equal(model(x).array, expected)
