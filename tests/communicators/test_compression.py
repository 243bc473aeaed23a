"""Compressors: encoded arrays, decoded values and state."""

import itertools
import math

import chainer
import numpy as np
import pytest
from each_case import each_case

from chainermn.communicators import compression
from chainermn.communicators.compression import Bf16, Fp16, TwoBit

pytestmark = pytest.mark.mpi_skip

FLOATS = ['float16', 'float32', 'float64']


def sent(compressor, x, key='key'):
    """Return the decoded array."""
    before = x.copy()
    encoded = compressor.compress(x, key)
    np.testing.assert_array_equal(x, before)
    assert encoded.ndim == 1
    result = compressor.decompress(encoded, x.size, x.dtype)
    assert (result.dtype, result.shape) == (x.dtype, x.shape)
    return result


class Halve:
    def compress(self, x, key):
        return x[::2].copy()

    def decompress(self, encoded, size, dtype):
        return np.repeat(encoded, 2)[:size].astype(dtype)


@pytest.mark.parametrize('meant, kind', [
    ('fp16', Fp16), ('bf16', Bf16), ('2bit', TwoBit), ({'type': 'fp16'}, Fp16),
    ({'type': '2bit'}, TwoBit), ({'type': '2bit', 'threshold': 2}, TwoBit),
    (Halve(), Halve), (TwoBit(0.25), TwoBit), (None, type(None)),
])
def test_get(meant, kind):
    found = compression.get(meant)
    assert type(found) is kind
    assert compression.get(found) is found


@pytest.mark.parametrize('meant, error, message', [
    ('1bit', ValueError, "unknown compression type '1bit'; use one of 'fp16', 'bf16', '2bit'"),
    ({'type': ['2bit']}, ValueError, 'unknown compression type'),
    ({}, ValueError, "has no 'type'"),
    ({'threshold': 1}, ValueError, "has no 'type'"),
    ({'type': '2bit', 'treshold': 1}, ValueError, 'no parameter treshold; it has threshold'),
    ({'type': 'fp16', 'threshold': 1}, ValueError, 'no parameter threshold'),
    (2, TypeError, 'compress and decompress, not 2'),
    (np.float16, TypeError, 'compression must be'),
    (TwoBit, TypeError, 'must be an instance, not the class TwoBit. Pass'),
    *[({'type': '2bit', 'threshold': bad}, ValueError, 'threshold must be a positive number')
      for bad in (0, -1, math.inf, math.nan, 1e300, 1e-300)],
    *[({'type': '2bit', 'threshold': bad}, TypeError, 'threshold must be a positive number')
      for bad in ('1', None, True, np.ones(2))],
])
def test_invalid_compression(meant, error, message):
    with pytest.raises(error, match=message):
        compression.get(meant)


@each_case('compressor, dtype, size', itertools.product(
    [Fp16, Bf16, TwoBit], FLOATS, [0, 1, 15, 16, 17, 65537]))
def test_encoded_size(compressor, dtype, size):
    x = np.linspace(-2, 2, size).astype(dtype)
    result = sent(compressor(), x)
    encoded = compressor().compress(x, 0)
    assert encoded.nbytes == (math.ceil(size / 16) * 4 if compressor is TwoBit else 2 * size)
    if compressor is TwoBit:
        np.testing.assert_array_equal(result, np.select([x >= .5, x <= -.5], [.5, -.5]))
    else:
        np.testing.assert_allclose(result, x, rtol=2**-8, atol=1e-7)


def test_bf16_keeps_nans():
    nans = np.array([0x7fc00000, 0x7f800001, 0xffffffff, 0x7fffffff], np.uint32).view(np.float32)
    assert np.isnan(sent(Bf16(), nans)).all()
    assert np.isnan(sent(Bf16(), np.array([np.nan], np.float64))).all()
    assert np.isnan(sent(Bf16(), np.array([np.nan], np.float16))).all()


def test_two_bit_by_hand():
    compressor = TwoBit(1)
    x = np.array([0.25, 1, 1.5, -0.75, -1, -3, 0], 'f')
    np.testing.assert_array_equal(sent(compressor, x), [0, 1, 1, 0, -1, -1, 0])
    np.testing.assert_array_equal(compressor.residuals['key'], [.25, 0, .5, -.75, 0, -2, 0])
    np.testing.assert_array_equal(sent(compressor, x), [0, 1, 1, -1, -1, -1, 0])
    np.testing.assert_array_equal(compressor.residuals['key'], [.5, 0, 1, -.5, 0, -4, 0])
    np.testing.assert_array_equal(sent(compressor, np.zeros(7, 'f')), [0, 0, 1, 0, 0, -1, 0])


def test_two_bit_layout():
    x = np.zeros(18, 'f')
    x[[0, 3, 17]], x[[1, 15]] = 1, -1
    assert TwoBit().compress(x, 0).tolist() == [1 | 2 << 2 | 1 << 6 | 2 << 30, 1 << 2]


@pytest.mark.parametrize('save, load', [
    (chainer.serializers.save_npz, chainer.serializers.load_npz),
    (chainer.serializers.save_hdf5, chainer.serializers.load_hdf5)])
def test_residuals_are_saved_and_loaded(tmp_path, save, load):
    if save is chainer.serializers.save_hdf5:
        pytest.importorskip('h5py')
    one, other = TwoBit(1), TwoBit(1)
    keys = ['a', ('float32', 12), 3]
    for n, key in enumerate(keys):
        one.compress(np.linspace(-2, 2, n * 7), key)
    save(tmp_path / 'file.npz', one)
    other.compress(np.ones(4), 'forgotten')
    load(tmp_path / 'file.npz', other)
    assert list(other.residuals) == keys
    for key in keys:
        np.testing.assert_array_equal(other.residuals[key], one.residuals[key])
    save(tmp_path / 'empty.npz', TwoBit(1))
    load(tmp_path / 'empty.npz', other)
    assert not other.residuals
