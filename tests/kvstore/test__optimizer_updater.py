"""An optimizer in the store: its errors, and its states, saved and loaded."""

import pathlib

import chainer
import numpy as np
import pytest
from chainer import optimizer_hooks as hooks
from chainer import optimizers

from chainer_compat.updates import block_updates


def set_up(*add):
    optimizer = optimizers.SGD().setup(chainer.links.Linear(2, 2))
    for hook in add:
        optimizer.add_hook(hook)
    return optimizer


def test_hooks_for_the_whole_model_are_an_error(kv, same_error):
    error = same_error(kv.set_optimizer, set_up(hooks.GradientClipping(1)))
    assert isinstance(error, ValueError)
    assert 'needs all parameters together' in str(error) and 'update_on_kvstore=False' in str(error)


@pytest.mark.mpi(min_size=2)
def test_splitting_after_init_is_an_error(create, same_error):
    kv = create('dist_sync', bigarray_bound=6)
    kv.init(['a', 'b'], [np.zeros((3, 2)), np.zeros(3)])
    error = same_error(kv.set_optimizer, set_up(hooks.GradientLARS()))
    assert isinstance(error, ValueError)
    assert "split over the servers: 'a': float64 (3, 2)" in str(error) and "'b'" not in str(error)


@pytest.mark.mpi(min_size=2)
def test_different_optimizers_are_an_error(dist, same_error, comm):
    for make in (lambda: optimizers.SGD(comm.rank + 1),
                 lambda: optimizers.SGD() if comm.rank else optimizers.Adam()):
        error = same_error(dist.set_optimizer, make())
        assert isinstance(error, ValueError)
        assert 'the ranks made different calls' in str(error)
        assert ': KVStore.set_optimizer SGD(lr=' in str(error)


# --- saving and loading states ---

SHAPES = {'w': (5, 3), 'b': (3,), 7: ()}


def gradients(step, kv):
    return [np.asarray(np.random.RandomState(step * 7 + i).randn(*shape), np.float32)
            for i, shape in enumerate(SHAPES.values())]


def store(create, type, bound, optimizer):
    kv = create(type, bigarray_bound=bound)
    kv.set_optimizer(optimizer)
    return kv


def init(kv, values=None):
    kv.init(list(SHAPES), values or [np.ones(shape, np.float32) for shape in SHAPES.values()])


def steps(kv, first, last):
    """Make the same steps on all ranks; in dist_async only rank 0 pushes."""
    for step in range(first, last):
        if kv.type != 'dist_async' or kv.rank == 0:
            kv.push(list(SHAPES), gradients(step, kv))
    kv.barrier()


@pytest.mark.parametrize('type, bound', [('local', 1), ('dist_sync', 10**6), ('dist_sync', 1)])
def test_one_pass_for_all_keys(create, type, bound, monkeypatch):
    """As Chainer's own rules update one parameter after another."""
    groups = []
    update_group = block_updates.update_group
    monkeypatch.setattr(block_updates, 'update_group', lambda rule, members, *args: (
        groups.append(len(members)), update_group(rule, members, *args)))
    optimizer = optimizers.Adam(.1)
    kv = store(create, type, bound, optimizer)
    init(kv)
    model = chainer.Link()
    with model.init_scope():
        for key, shape in SHAPES.items():
            setattr(model, f'p{key}', chainer.Parameter(np.ones(shape, np.float32)))
    reference = optimizers.Adam(.1).setup(model)
    for step in range(3):
        if step == 2:  # the hyperparameters are read at each step
            optimizer.alpha = reference.alpha = .01
        groups.clear()
        kv.push(list(SHAPES), gradients(step, kv))
        assert len(groups) <= 1 and sum(groups) == len(kv._backend.server.shards)
        for key, gradient in zip(SHAPES, gradients(step, kv), strict=True):
            getattr(model, f'p{key}').grad = np.asarray(gradient * kv.num_workers)
            getattr(model, f'p{key}').update()
    for key, x in zip(SHAPES, kv.pull(list(SHAPES)), strict=True):
        np.testing.assert_allclose(x, getattr(model, f'p{key}').array, rtol=1e-6)


@pytest.mark.parametrize('type, make', [
    ('local', optimizers.SMORMS3), ('dist_sync', optimizers.MSVAG),
    ('dist_async', optimizers.Adam)])
def test_training_resumes_with_the_same_results(create, type, make, path, comm):
    """Also with other shards, and with states that are loaded before ``init``."""
    kv = store(create, type, 1, make())
    init(kv)
    steps(kv, 0, 3)
    values = kv.pull(list(SHAPES))
    path = path if type.startswith('dist') else f'{path}-{comm.rank}'
    kv.save_optimizer_states(path)
    steps(kv, 3, 6)
    expected = kv.pull(list(SHAPES))

    for bound, is_loaded_first in ((1, False), (10**6, True)):
        again = store(create, type, bound, make())
        if is_loaded_first:
            again.load_optimizer_states(path)
        init(again, values)
        if not is_loaded_first:
            again.load_optimizer_states(path)
        steps(again, 3, 6)
        for x, y in zip(again.pull(list(SHAPES)), expected, strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize('type', ['dist_sync'])
def test_one_file_for_any_number_of_ranks(create, comm, type, path):
    """One rank loads the states that many ranks saved, and vice versa."""
    kv = store(create, type, 1, optimizers.MomentumSGD(.1))
    init(kv)
    steps(kv, 0, 2)
    if type == 'dist_sync' or comm.rank == 0:
        kv.save_optimizer_states(path)
    comm.barrier()
    with np.load(path, allow_pickle=False) as file:
        found = {name: file[name] for name in file.files if name != 'about'}
    assert found['0/v'].shape == (5, 3) and found['2/v'].shape == ()
    scale = kv.num_workers
    expected = -.1 * (.9 * gradients(0, kv)[0] + gradients(1, kv)[0]) * scale
    np.testing.assert_allclose(found['0/v'], expected, rtol=1e-5)
    other = store(create, 'dist_sync' if type == 'local' else 'local', 1,
                  optimizers.MomentumSGD(.1))
    init(other)
    other.load_optimizer_states(path)
    other.push('w', np.zeros((5, 3), np.float32))
    np.testing.assert_allclose(other.pull('w'), 1 + .9 * expected, rtol=1e-5)


def test_loading_drops_the_states_of_other_keys(create, path):
    kv = store(create, 'dist_sync', 10**6, optimizers.MomentumSGD(1., 1.))
    kv.init(['a', 'b'], [np.zeros(2), np.zeros(2)])
    kv.push('a', np.ones(2) / kv.num_workers)
    kv.save_optimizer_states(path)
    for _ in range(3):
        kv.push('b', np.ones(2) / kv.num_workers)
    kv.load_optimizer_states(path)
    before = kv.pull('b')
    kv.push('b', np.ones(2) / kv.num_workers)
    np.testing.assert_allclose(kv.pull('b'), before - 1)


def test_hyperparameters(create, path, comm):
    kv = store(create, 'dist_sync', 10**6, optimizers.Adam(.25, eps=np.float32(.5)))
    init(kv)
    steps(kv, 0, 1)
    kv.save_optimizer_states(path, dump_optimizer=True)
    optimizer = optimizers.Adam(1.)
    other = store(create, 'dist_sync', 10**6, optimizer)
    other.load_optimizer_states(path)
    assert (optimizer.alpha, optimizer.eps) == (.25, .5)
    kv.save_optimizer_states(path)
    optimizer.alpha = 1.
    other.load_optimizer_states(path)
    assert optimizer.alpha == 1.


def test_files_of_other_optimizers(create, path, comm, same_error):
    kv = store(create, 'dist_sync', 10**6, optimizers.Adam(.25))
    init(kv)
    steps(kv, 0, 1)
    kv.save_optimizer_states(path, dump_optimizer=True)
    sgd = store(create, 'dist_sync', 10**6, optimizers.SGD())
    error = same_error(sgd.load_optimizer_states, path)
    assert isinstance(error, ValueError) and 'chainer.optimizers.adam.Adam' in str(error)

    kv.save_optimizer_states(path)
    init(sgd)
    error = same_error(sgd.load_optimizer_states, path)
    assert isinstance(error, ValueError) and "states of key 'w'" in str(error)
    assert "['m', 't', 'v']" in str(error)

    other = store(create, 'dist_sync', 10**6, optimizers.Adam())
    other.load_optimizer_states(path)
    error = same_error(other.init, 'w', np.zeros((2, 2), 'f'))
    assert isinstance(error, ValueError) and '(5, 3), but must have shape (2, 2)' in str(error)
    # The failed call added no key.
    other.init(['other', 'w'], [np.zeros(3, 'f'), np.ones((2, 2), 'f')])
    calls = []
    other.set_updater(lambda key, input, stored: calls.append((key, stored.shape)))
    other.push(['other', 'w'], [np.zeros(3, 'f'), np.ones((2, 2), 'f')])
    calls = [call for calls in comm.allgather_obj(calls) for call in calls]
    assert sorted(calls) == [('other', (3,)), ('w', (2, 2))]


def test_corrupt_files(create, path, comm, same_error):
    kv = store(create, 'dist_sync', 10**6, optimizers.Adam())
    error = same_error(kv.load_optimizer_states, path + '.missing')
    assert isinstance(error, FileNotFoundError)
    error = same_error(kv.save_optimizer_states, path + '/no/such/folder')
    assert isinstance(error, OSError)
    for n, write in enumerate((
            lambda file: file.write(b'text'),
            lambda file: None,
            lambda file: np.savez(file, about=np.array([print], dtype=object)),
            lambda file: np.savez(file, other=np.zeros(3)),
            lambda file: np.save(file, np.zeros(3)),
            lambda file: np.savez(file, about=np.array('{}')),
    )):
        if comm.rank == 0:
            with open(path, 'wb') as file:
                write(file)
        error = same_error(kv.load_optimizer_states, path)
        assert isinstance(error, ValueError), n
        assert 'cannot read optimizer states from' in str(error), n


def test_a_failed_save_keeps_the_old_file(create, comm, path, monkeypatch, same_error):
    kv = store(create, 'dist_sync', 10**6, optimizers.Adam())
    init(kv)
    steps(kv, 0, 1)
    kv.save_optimizer_states(path)
    steps(kv, 1, 2)

    def savez(file, **arrays):
        file.write(b'half')
        raise OSError('no space left')

    with monkeypatch.context() as patch:
        patch.setattr(np, 'savez', savez)
        error = same_error(kv.save_optimizer_states, path)
    assert isinstance(error, OSError) and 'no space left' in str(error)
    kv.load_optimizer_states(path)
    if comm.rank == 0:
        assert [file.name for file in pathlib.Path(path).parent.iterdir()] == ['a.name with.dots']
