"""Snapshots of optimizers: older versions can be loaded, and replace the whole state."""

import chainer
import chainer.links as L
import numpy as np
import pytest

pytestmark = pytest.mark.mpi_skip


def trained(create, n, dtype='f', configure=lambda optimizer: None):
    with chainer.using_config('dtype', np.dtype(dtype)):
        model = L.Linear(2, 1, initialW=1, nobias=True)
    optimizer = create().setup(model)
    configure(optimizer)
    update(optimizer, n)
    return optimizer


def update(optimizer, n):
    for _ in range(n):
        x = np.ones((1, 2), optimizer.target.W.dtype)
        optimizer.update(lambda x: chainer.functions.sum(optimizer.target(x)), x)


def saved(target):
    serializer = chainer.serializers.DictionarySerializer()
    serializer.save(target)
    return {key: np.array(value) for key, value in serializer.target.items()}


def load(target, arrays):
    chainer.serializers.NpzDeserializer(arrays).load(target)


@pytest.mark.parametrize('name', sorted(
    name for name, kind in vars(chainer.optimizers).items() if isinstance(kind, type)))
def test_snapshots_before_the_first_update(name):
    """They contain no states, so the next update makes them, as in the saved program."""
    create = getattr(chainer.optimizers, name)
    for n_before in 0, 2:
        loaded = trained(create, n_before)
        load(loaded, saved(trained(create, 0)))
        loaded.target.W.array[...] = 1
        update(loaded, 2)
        for key, value in saved(trained(create, 2)).items():
            np.testing.assert_array_equal(saved(loaded)[key], value)
    arrays = saved(trained(create, 1))
    for key in {*arrays} - {'t', 'epoch', 'W/t', 'W/beta_power'}:
        with pytest.raises(KeyError):
            load(trained(create, 0), {k: value for k, value in arrays.items() if k != key})


@pytest.mark.parametrize('n_before', [0, 5])
def test_snapshots_of_msvag_without_the_power(n_before):
    optimizer = trained(chainer.optimizers.MSVAG, 3)
    arrays = saved(optimizer)
    power = arrays.pop('W/beta_power')
    loaded = trained(chainer.optimizers.MSVAG, n_before)
    load(loaded, arrays)
    rule = loaded.target.W.update_rule
    assert rule.beta_power == pytest.approx(power, rel=1e-12)
    assert saved(loaded).keys() == {*arrays, 'W/beta_power'}


@pytest.mark.parametrize('kind', [chainer.serializer.Serializer, chainer.serializer.Deserializer])
@pytest.mark.parametrize('failing', ['m', 'beta_power'])
def test_msvag_after_a_failed_snapshot(kind, failing):
    """Training continues as without it."""
    class Full(kind):
        def __getitem__(self, key):
            return self

        def __call__(self, key, value):
            if key == failing:
                raise OSError('No space left on device')
            return value

    optimizer, other = [trained(chainer.optimizers.MSVAG, 3) for _ in range(2)]
    with pytest.raises(OSError, match='space'):
        Full().save(optimizer) if kind is chainer.serializer.Serializer else Full().load(optimizer)
    update(optimizer, 2)
    update(other, 2)
    np.testing.assert_array_equal(optimizer.target.W.array, other.target.W.array)
    assert str(saved(optimizer)) == str(saved(other))


def test_float32_copies_of_the_loaded_parameters():
    """Also if the snapshot has none; those of before do not stay."""
    def configure(optimizer):
        optimizer.use_fp32_update()

    optimizer = trained(lambda: chainer.optimizers.SGD(1e-4), 3, 'e', configure)
    arrays, model = saved(optimizer), saved(optimizer.target)
    update(optimizer, 2)
    expected = optimizer.target.W.update_rule._fp32_param.array.copy()
    load(optimizer.target, model)
    load(optimizer, arrays)
    update(optimizer, 2)
    np.testing.assert_array_equal(optimizer.target.W.update_rule._fp32_param.array, expected)
    del arrays['W/fp32_param']
    load(optimizer, arrays)
    assert optimizer.target.W.update_rule._fp32_param is None
    update(optimizer, 1)


def test_dynamic_loss_scale():
    def configure(optimizer):
        optimizer.loss_scaling()

    optimizer = trained(chainer.optimizers.SGD, 3, configure=configure)
    arrays = saved(optimizer)
    assert optimizer._loss_scale == 8
    loaded = trained(chainer.optimizers.SGD, 1, configure=configure)
    load(loaded, arrays)
    assert (loaded._loss_scale, loaded._loss_scaling_isnan_ever) == (8, False)
    del arrays['loss_scale'], arrays['loss_scaling_isnan_ever']
    load(loaded, arrays)
    assert loaded._loss_scale == 8


@pytest.mark.parametrize('by_rule', [True, False])
def test_updates_of_new_parameters(by_rule):
    """They start at 0, as with plain Chainer; Chainer 1 had one number for all parameters."""
    optimizer = chainer.optimizers.Adam().setup(chainer.Chain(a=L.Linear(2, 2)))
    x = np.ones((1, 2), 'f')
    for _ in range(3):
        optimizer.update(lambda: chainer.functions.sum(optimizer.target.a(x)))
    arrays = saved(optimizer)
    if not by_rule:
        arrays = {key: x for key, x in arrays.items() if not key.endswith('/t')}
    model = chainer.Chain(a=L.Linear(2, 2), b=L.Linear(2, 2))
    loaded = chainer.optimizers.Adam().setup(model)
    chainer.serializers.NpzDeserializer(arrays, strict=False).load(loaded)
    found = {name: param.update_rule.t for name, param in model.namedparams()}
    assert found == {'/a/W': 3, '/a/b': 3, **dict.fromkeys(['/b/W', '/b/b'], 0 if by_rule else 3)}
    with pytest.raises(KeyError):
        load(loaded, arrays)
