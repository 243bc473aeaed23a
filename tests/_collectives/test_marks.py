"""The mark of a message: round trip, before a header that follows it."""

import numpy as np
import pytest

from chainermn._collectives import marks
from chainermn._collectives.marks import Mark
from chainermn._operations import message_header
from chainermn._operations.message_header import Kind

pytestmark = pytest.mark.mpi_skip


@pytest.mark.parametrize('mark', [
    Mark(Kind.ACTIVATION, 0, True, ''), Mark(Kind.ACTIVATION, 2**40, False, 'send, called at ä:1'),
    Mark(Kind.GRADIENT, 3, False, 'backward')])
def test_round_trip(mark):
    header = message_header.of_array((2,), np.dtype('f4'))
    packed = mark.packed()
    assert packed[0] == mark.kind
    assert Mark.unpack(memoryview(packed + header)) == (mark, header)


def test_a_long_text_is_cut():
    """It may be cut within a character."""
    mark = Mark(Kind.GRADIENT, 1, False, 'x' + 'ä' * 1000)
    assert len(mark.packed()) <= marks.MAX_SIZE
    found, rest = Mark.unpack(memoryview(mark.packed()))
    assert rest == b''
    assert found.text.startswith('xä')
    assert found._replace(text='') == mark._replace(text='')
