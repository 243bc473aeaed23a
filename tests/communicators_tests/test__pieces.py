"""Arrays for all ranks, side by side in one buffer."""

import numpy as np
import pytest

from chainermn.communicators._pieces import Pieces


@pytest.mark.parametrize('dtype', [np.dtype('int16'), np.dtype('complex64')])
def test_pieces(make):
    arrays = [np.asarray(make(seed, rows=seed)) for seed in range(3)]
    arrays = [x.astype(x.dtype.newbyteorder('=')) for x in arrays]
    sent = Pieces.of(arrays)
    raw, counts, starts, _ = sent.spec
    assert counts == [x.nbytes for x in arrays]
    assert starts == [0, counts[0], counts[0] + counts[1]]
    received = Pieces([x.shape for x in arrays], arrays[0].dtype, device=False)
    received.spec[0][...] = raw
    for x, y in zip(arrays, received.arrays(), strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        np.testing.assert_array_equal(x, y)
