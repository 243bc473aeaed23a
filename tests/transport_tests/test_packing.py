"""Parameters of a model to one flat buffer and back."""

import chainer
import chainer.links as L
import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import numpy as np
import pytest

from chainermn._transport import packing

pytestmark = pytest.mark.mpi_skip

FLOATS = st.sampled_from(['float16', 'float32', 'float64'])
ARRAYS = st.lists(
    hnp.arrays(np.float32, hnp.array_shapes(min_dims=0, min_side=0, max_side=4),
               elements=st.integers(-100, 100)), min_size=1, max_size=5)


@hypothesis.given(ARRAYS, FLOATS)
def test_pack_and_unpack(arrays, dtype):
    arrays = [x.T if n % 2 else x for n, x in enumerate(arrays)]
    buffer = packing.pack(arrays, dtype)
    assert buffer.dtype == dtype
    np.testing.assert_array_equal(buffer, np.concatenate([x.flatten() for x in arrays]))
    copies = [np.full_like(x, 7) for x in arrays]
    packing.unpack(buffer, copies, 1.)
    for x, copy in zip(arrays, copies, strict=True):
        np.testing.assert_array_equal(copy, x)
    packing.unpack(buffer, copies, .5)
    for x, copy in zip(arrays, copies, strict=True):
        np.testing.assert_array_equal(copy, x / 2)


def test_one_contiguous_array_is_not_copied():
    x = np.arange(6.).reshape(2, 3)
    assert np.shares_memory(packing.pack([x]), x)
    assert not np.shares_memory(packing.pack([x.T]), x)
    assert not np.shares_memory(packing.pack([x], np.float32), x)
    assert not np.shares_memory(packing.pack([x, x]), x)


def test_unpack_in_place_over_the_buffer():
    x = np.arange(6.).reshape(2, 3)
    packing.unpack(packing.pack([x]), [x], .5)
    np.testing.assert_array_equal(x, np.arange(6.).reshape(2, 3) / 2)
    packing.unpack(packing.pack([x]), [x])
    np.testing.assert_array_equal(x, np.arange(6.).reshape(2, 3) / 2)


def test_unpack_rounds_float16_once():
    """5 / 3 in float16, and not 5 times a third that was rounded already."""
    x = np.zeros(1, np.float16)
    assert np.float16(5) * np.float16(1 / 3) != np.float16(5 / 3)
    for dtype in (np.float16, np.float32):
        packing.unpack(np.array([5.], dtype), [x], 1 / 3)
        assert x[0] == np.float16(5 / 3)
    packing.unpack(np.array([3 * 65504.], np.float32), [x], 1 / 3)
    assert x[0] == 65504


def test_by_dtype():
    a, b, c, d = (np.zeros(1, dtype) for dtype in ('f4', 'f2', 'f4', 'f8'))
    groups = packing.by_dtype([a, b, c, d])
    assert [[id(x) for x in group] for group in groups] == [[id(a), id(c)], [id(b)], [id(d)]]
    assert packing.by_dtype([]) == []


@pytest.fixture
def model():
    model = chainer.Chain(b=L.Linear(3, 2), a=L.Linear(3, 2), lazy=L.Linear(None, 2, nobias=True))
    with model.a.init_scope():
        model.a.W = model.b.W
    model.cleargrads()
    return model


def test_parameters(model):
    arrays = packing.parameters(model, 'data')
    assert list(arrays) == ['/a/W', '/a/b', '/b/b']  # /b/W is /a/W, and lazy has none yet
    assert arrays['/a/W'] is model.b.W.array
    assert packing.parameters(model, 'grad') == {}
    model.b.W.grad = np.ones((2, 3), np.float32)
    assert list(packing.parameters(model, 'grad')) == ['/a/W']
    arrays = packing.parameters(model, 'grad', zero_fill=True)
    assert list(arrays) == ['/a/W', '/a/b', '/b/b']
    assert arrays['/a/W'] is model.a.W.grad
    assert (arrays['/a/W'] == 1).all()
    assert arrays['/b/b'] is model.b.b.grad
    assert (arrays['/b/b'] == 0).all()


def test_describe(model):
    assert packing.describe(packing.parameters(model, 'data')) == {
        '/a/W': 'float32 (2, 3)', '/a/b': 'float32 (2,)', '/b/b': 'float32 (2,)'}


def test_bad_parameters_are_named(model):
    with pytest.raises(TypeError, match='expected a model'):
        packing.parameters(np.zeros(3), 'data')
    link = chainer.Link()
    with link.init_scope():
        link.n = chainer.Parameter(np.zeros(3, np.int32))
        link.m = chainer.Parameter(np.zeros(3, np.longdouble))
    link.n.grad = np.zeros(3, np.int32)
    with pytest.raises(TypeError, match=f'parameter /m: arrays of dtype {link.m.dtype} cannot'):
        packing.parameters(link, 'data')
    link.m.array = np.zeros(3)
    assert list(packing.parameters(link, 'data')) == ['/m', '/n']
    with pytest.raises(TypeError, match='parameter /n: gradients of dtype int32 cannot be'):
        packing.parameters(link, 'grad')


def test_check_finite(model):
    packing.check_finite(model)
    model.b.b.grad = np.array([1, np.inf], np.float32)
    with pytest.raises(ValueError, match='mean gradient of /b/b is not finite'):
        packing.check_finite(model)


@pytest.mark.parametrize('attribute', ['data', 'grad'])
def test_what_is_read_only_is_refused(attribute):
    """A backward pass may leave such a gradient: that of a sum is one number, broadcast."""
    link = chainer.Link()
    with link.init_scope():
        link.w = chainer.Parameter(np.zeros(3, np.float32))
    setattr(link.w, attribute, np.broadcast_to(np.float32(1), 3))
    with pytest.raises(ValueError, match=r'/w: its (array|gradient) is read-only'):
        packing.parameters(link, attribute)


def test_gradients_of_one_dtype_are_looked_at_once():
    link = chainer.Link()
    with link.init_scope():
        link.a = chainer.Parameter(np.zeros((2, 3), np.float32))
        link.b = chainer.Parameter(np.zeros(4, np.float32))
        link.lazy = chainer.Parameter()
    link.cleargrads()
    for zero_fill in (False, True):
        if not zero_fill:
            link.a.grad = np.ones((2, 3), np.float32)
        arrays = packing.parameters(link, 'grad', zero_fill)
        assert list(arrays) == (['/a', '/b'] if zero_fill else ['/a'])
    link.lazy.initialize(2)
    link.lazy.grad = np.ones(2, np.float32)
    arrays = packing.parameters(link, 'grad')
    assert packing.describe(arrays) == {
        '/a': 'float32 (2, 3)', '/b': 'float32 (4,)', '/lazy': 'float32 (2,)'}
    group, = packing.by_dtype(packing.listed(arrays))
    assert [*map(id, group)] == [*map(id, arrays.values())]
    assert packing.shapes_of(group) == ((2, 3), (4,), (2,))
    link.b.grad = link.b.grad.reshape(4)  # another array
    assert packing.listed(packing.parameters(link, 'grad'))[1] is link.b.grad
    link.b.array = np.zeros(5, np.float64)
    link.b.grad = np.zeros(5, np.float64)
    arrays = packing.parameters(link, 'grad')
    assert packing.describe(arrays) == {
        '/a': 'float32 (2, 3)', '/b': 'float64 (5,)', '/lazy': 'float32 (2,)'}
    assert [packing.shapes_of(group) for group in packing.by_dtype(packing.listed(arrays))] == [
        ((2, 3), (2,)), ((5,),)]
