"""Updates in blocks have the bits of an update of the whole parameter."""

import chainer
import numpy as np
import pytest
from chainer import optimizers

from chainer_compat import block_updates

pytestmark = pytest.mark.mpi_skip

OPTIMIZERS = {
    'SGD': {}, 'MomentumSGD': {}, 'NesterovAG': {}, 'CorrectedMomentumSGD': {}, 'AdaGrad': {},
    'AdaDelta': {}, 'RMSprop': {}, 'RMSpropGraves': {}, 'Adam': {},
    'AdamW': {'weight_decay_rate': .1}, 'AMSGrad': {}, 'AdaBound': {},
}
BLOCK = 1 << 12  # smaller than that of the package, for speed
SHAPE = 3, BLOCK - 5


@pytest.fixture(autouse=True)
def _without_pytorch(monkeypatch):
    monkeypatch.setattr(block_updates, 'BLOCK', BLOCK)
    with chainer.using_config('use_torch', 'never'):
        yield


def updated(make, arrays, gradients):
    """Return the parameter and the states after some updates."""
    link = chainer.Link()
    with link.init_scope():
        link.p = chainer.Parameter(arrays.copy(order='K'))
    optimizer = make().setup(link)
    for grad in gradients:
        link.p.grad = grad
        optimizer.update()
    return [link.p.array, *(link.p.update_rule.state or {}).values()]


@pytest.mark.parametrize('dtype', ['float16', 'float32', 'float64'])
@pytest.mark.parametrize('name', OPTIMIZERS)
def test_the_same_bits(name, dtype, sizes):
    random = np.random.RandomState(0)
    array = random.normal(size=SHAPE).astype(dtype)
    gradients = random.normal(size=(3, *SHAPE)).astype(dtype)

    def make():
        options = dict(OPTIMIZERS[name])
        if dtype == 'float16' and name not in ('SGD', 'MomentumSGD', 'NesterovAG',
                                               'CorrectedMomentumSGD'):
            options['eps'] = 1e-3
        return getattr(optimizers, name)(**options)

    in_blocks = updated(make, array, gradients)
    assert set(sizes) == {BLOCK, 3 * (BLOCK - 5) - 2 * BLOCK}
    sizes.clear()
    # Arrays in another order are updated as a whole.
    whole = updated(make, np.asfortranarray(array), [np.asfortranarray(x) for x in gradients])
    assert not sizes
    assert len(in_blocks) == len(whole)
    for x, y in zip(in_blocks, whole, strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


def test_missing_gradients():
    link = chainer.links.Linear(10, BLOCK // 10)
    optimizer = optimizers.Adam().setup(link)
    before = link.W.array.copy()
    link.cleargrads()
    optimizer.update()
    np.testing.assert_array_equal(link.W.array, before)
    link.W.grad = np.ones_like(before)
    optimizer.update()
    assert (link.W.array < before).all()


def test_states_are_those_of_the_parameter_after_an_error():
    link = chainer.Link()
    with link.init_scope():
        link.p = chainer.Parameter(np.ones(SHAPE, np.float16))
    link.p.grad = np.ones(SHAPE, np.float16)
    optimizer = optimizers.RMSprop(eps=1e-8).setup(link)
    with pytest.raises(ValueError, match='eps of RMSprop optimizer is too small'):
        optimizer.update()
    assert {state.shape for state in link.p.update_rule.state.values()} == {SHAPE}
    np.testing.assert_array_equal(link.p.array, 1)
