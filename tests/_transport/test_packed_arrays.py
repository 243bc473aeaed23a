"""One array per rank, side by side in one buffer."""

import numpy as np
import pytest
from each_case import each_case
from shared_fixtures import dtypes_and_kinds, make_array

from chainermn._transport.packed_arrays import PackedArrays

pytestmark = pytest.mark.mpi_skip


@pytest.mark.parametrize('rows', [(0, 1, 2), (2, 2, 2), (0, 0)])
@each_case('dtype, kind', dtypes_and_kinds)
def test_parts(dtype, kind, rows):
    arrays = [np.asarray(make_array(dtype, kind, seed, n)) for seed, n in enumerate(rows)]
    arrays = [x.astype(x.dtype.newbyteorder('=')) for x in arrays]
    sent = PackedArrays.of(arrays)
    raw, counts, starts, _ = sent.spec
    assert counts == [x.nbytes for x in arrays]
    assert starts == [sum(counts[:n]) for n in range(len(counts))]
    received = PackedArrays([x.shape for x in arrays], arrays[0].dtype, device=False)
    assert received.homogeneous == sent.homogeneous == (len({x.shape for x in arrays}) == 1)
    received.raw[...] = raw
    for x, y in zip(arrays, received.arrays(), strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        np.testing.assert_array_equal(x, y)
