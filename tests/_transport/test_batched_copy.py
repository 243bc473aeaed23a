"""The table of pieces, and the kernels compiled for an H100; tests/gpu runs them."""

import re

import numpy as np
import nvrtc
import pytest

from chainermn._transport import batched_copy

pytestmark = pytest.mark.mpi_skip

LENGTH = batched_copy.LENGTH


def test_pieces_cover_everything_once():
    table = batched_copy.pieces(((1 << 40, 5, 2 * LENGTH + 3, 4), (7, 0, 0, 8), (64, 0, 5, 2)))
    assert table.dtype == batched_copy.PIECE
    assert table.tolist() == [
        (1 << 40, 5, LENGTH, 4),
        ((1 << 40) + 4 * LENGTH, 5 + LENGTH, LENGTH, 4),
        ((1 << 40) + 8 * LENGTH, 5 + 2 * LENGTH, 3, 4),
        (64, 0, 5, 2)]


def test_more_elements_than_an_int_holds():
    size = 2**31 + 1
    table = batched_copy.pieces(((16, 0, size, 4), (1 << 46, size, 2, 8)))
    assert table['size'].sum() == size + 2
    assert (table['start'] == np.cumsum(table['size'], dtype=np.int64) - table['size']).all()
    assert table[-1].tolist() == (1 << 46, size, 2, 8)
    assert table[-2].tolist() == (16 + 4 * 2**31, 2**31, 1, 4)


def test_no_arrays():
    assert len(batched_copy.pieces(())) == 0


@pytest.fixture(scope='module')
def compile_for_h100():
    return nvrtc.compiler()


@pytest.mark.parametrize('itemsize', [2, 4, 8])
def test_compiles_for_h100(itemsize, compile_for_h100):
    assert b'unpack' in compile_for_h100(batched_copy.source(itemsize))


@pytest.mark.parametrize('itemsize', [2, 4, 8])
def test_16_bytes_at_a_time(itemsize, compile_for_h100):
    ptx = compile_for_h100(batched_copy.source(itemsize), 'ptx')
    pack, unpack = re.split(r'\.entry unpack', ptx.decode())
    vector = {2: r'v4\.[ub]32', 4: r'v4\.[fub]32', 8: r'v2\.[fub]64'}[itemsize]
    assert re.search(rf'st\.global\.{vector}', pack)  # to the buffer
    assert re.search(rf'ld\.global(\.nc)?\.{vector}', unpack)  # from there
    for size in (2, 4, 8):  # of an element of an array
        vector = {2: r'v4\.[ub]32', 4: r'v4\.[fub]32', 8: r'v2\.[fub]64'}[size]
        assert re.search(rf'ld\.{vector}', pack) and re.search(rf'st\.{vector}', unpack)
