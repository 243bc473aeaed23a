"""Means of encoded parts; here, each rank is a node."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from mpi4py import MPI

from chainermn._gradients.codec import GradientCodec
from chainermn._gradients.parameters import ParameterList
from chainermn._transport.shared_memory.between_nodes import Waiting
from chainermn._transport.shared_memory.encoded_node_sum import EncodedNodeSum, Encoding
from chainermn.communicators.compression import Bf16, Fp16, TwoBit

pytestmark = [pytest.mark.every_size, pytest.mark.mpi(min_size=2)]

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
SCALE = np.float32(1 / SIZE)


def encoding(compressor):
    encoding = Encoding()
    encoding.codec = GradientCodec(compressor, ParameterList.named({}))
    encoding.compressor = compressor
    encoding.name = 'model'
    return encoding


def mean(inter, compressor, slices, scale=SCALE):
    """Replace slices by their means, two chunks in flight."""
    waiting = Waiting()
    current = compressor if isinstance(compressor, Encoding) else encoding(compressor)
    chunks = [EncodedNodeSum(inter, data, np.empty(data.size + SIZE, data.dtype), waiting,
                             current, str(n)) for n, data in enumerate(slices)]
    for k in range(len(chunks) + 2):
        if k >= 2:
            chunks[k - 2].finish()
        if 1 <= k <= len(chunks):
            chunks[k - 1].combine(scale)
        if k < len(chunks):
            chunks[k].start(scale)


def data_of(rank, length, seed=0):
    return np.random.RandomState(10 * seed + rank).normal(0, 1, length).astype(np.float32)


@hypothesis.settings(max_examples=8)
@hypothesis.given(lengths=st.lists(st.one_of(st.integers(1, 40), st.integers(1000, 2000)),
                                   min_size=1, max_size=4),
                  kind=st.sampled_from([Fp16, Bf16]))
def test_parts_and_means_are_rounded_once(inter, lengths, kind):
    def rounded(x):
        return kind().decompress(kind().compress(x), x.size, x.dtype)

    slices = [data_of(RANK, length, n) for n, length in enumerate(lengths)]
    expected = []
    for n, length in enumerate(lengths):
        total = np.empty(length, np.float32)
        borders = [length * node // SIZE for node in range(SIZE + 1)]
        for owner in range(SIZE):
            part = slice(borders[owner], borders[owner + 1])
            # Scaled by 1 / SIZE, times the number of nodes.
            terms = [data_of(rank, length, n)[part] * (SCALE * np.float32(SIZE))
                     for rank in range(SIZE)]
            own = np.zeros_like(terms[0])
            for rank, term in enumerate(terms):
                own += term if rank == owner else rounded(term)
            total[part] = rounded(own / np.float32(SIZE))
        expected.append(total)
    mean(inter, kind(), slices)
    for data, total in zip(slices, expected, strict=True):
        assert data.tobytes() == total.tobytes()


@pytest.mark.parametrize('length', [SIZE, 1000])
def test_error_feedback_sends_everything_in_the_end(inter, length):
    compressor = TwoBit(0.5)
    gradients = [np.clip(data_of(rank, length), -.4, .4) for rank in range(SIZE)]
    sent = np.zeros(length, np.float32)
    steps = 40
    for _ in range(steps):
        data = gradients[RANK].copy()
        mean(inter, compressor, [data])
        assert set(np.unique(data)) <= {-0.5, 0, 0.5}
        assert len(set(MPI.COMM_WORLD.allgather(data.tobytes()))) == 1
        sent += data
    # What is left is in the residuals of the nodes and of the mean.
    np.testing.assert_allclose(sent / steps, sum(gradients) / SIZE, atol=.05)


def test_residuals_belong_to_parts(inter):
    compressor = TwoBit(0.5)
    mean(inter, compressor, [np.full(64, .3, np.float32), np.full(32, .3, np.float32)])
    assert set(compressor.residuals) == {
        f'model.{number}.{SIZE}.{node}' for number in range(2) for node in range(SIZE)}
    others = [residual for key, residual in compressor.residuals.items()
              if not key.endswith(f'.{RANK}')]
    for residual in others:
        np.testing.assert_allclose(residual, .3)  # nothing was sent


def test_a_compressor_that_breaks_its_declaration(inter):
    class Wrong(Fp16):
        def compress(self, x, key=None):
            return super().compress(x, key)[1:]

    current = encoding(Wrong())
    data = np.ones(100, np.float32)
    mean(inter, current, [data])
    with pytest.raises(ValueError, match=r'of dtype float16 .* must return dtype float16 '):
        current.codec.finish()


def test_infinities_reach_all_nodes(inter):
    data = np.ones(100, np.float32)
    if RANK == 1:
        data[[0, 99]] = np.inf
    mean(inter, Fp16(), [data])
    assert np.isinf(data[[0, 99]]).all() and (data[1:99] == 1).all()


@pytest.mark.parametrize('compressor, share', [(Fp16(), 1 / 2), (Bf16(), 1 / 2),
                                               (TwoBit(), 1 / 16)])
def test_bytes_sent(counting, compressor, share):
    data = np.ones(16 * 12 * 10, np.float32)
    mean(counting, compressor, [data])
    assert counting.sent == 2 * (SIZE - 1) / SIZE * data.nbytes * share
