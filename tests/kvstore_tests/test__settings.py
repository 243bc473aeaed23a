"""Compression, with what the sender keeps; states of the optimizer, saved and loaded."""

import pathlib

import numpy as np
import pytest
from chainer import optimizers

from chainermn.communicators import compression
from chainermn.kvstore import RowSparse, _messages


def adding(kv):
    kv.set_updater(lambda key, input, stored: stored.__iadd__(input))


def quantized(values, residual, threshold):
    """What of the values is sent, and what is left; the page in one line each."""
    value = values + residual
    sent = threshold * ((value >= threshold).astype('f') - (value <= -threshold))
    return sent, value - sent


@pytest.mark.parametrize('bound', [1_000_000, 1], ids=['whole', 'cut'])
@pytest.mark.parametrize('shape', [(7,), (5, 7), (40,)])
@pytest.mark.parametrize('type', ['dist_sync', 'dist_async'])
def test_compressed_pushes(create, type, bound, shape):
    """Each rank keeps what it has not sent, until it is."""
    kv = create(type, bigarray_bound=bound)
    kv.init('w', np.zeros(shape, np.float32))
    adding(kv)
    kv.set_gradient_compression({'type': '2bit', 'threshold': .5})
    expected = np.zeros(shape, np.float32)
    residuals = [np.zeros(shape, np.float32) for _ in range(kv.num_workers)]
    for step in range(6):
        for rank in range(kv.num_workers):
            # Numbers of which sums are exact.
            pushed = np.random.RandomState(10 * step + rank).randint(-8, 9, shape) / 8
            pushed = pushed.astype(np.float32)
            sent, residuals[rank] = quantized(pushed, residuals[rank], .5)
            expected += sent
            if rank == kv.rank:
                kv.push('w', pushed)
    kv.barrier()
    np.testing.assert_array_equal(kv.pull('w'), expected)


@pytest.mark.parametrize('dtype', [np.float16, np.float32, np.float64])
def test_bytes_of_a_compressed_push(dist, dtype):
    """16 values take the place of one float32."""
    n = 160_000
    dist.init('w', np.zeros(n, dtype))
    plain = sent_bytes(dist, np.ones(n, dtype))
    dist.set_gradient_compression({'type': '2bit'})
    compressed = sent_bytes(dist, np.ones(n, dtype))
    assert n * np.dtype(dtype).itemsize <= plain <= n * np.dtype(dtype).itemsize + 100
    assert n // 4 <= compressed <= n // 4 + 100


def sent_bytes(kv, x):
    return sum(len(_messages.joined(_messages.buffers(entries)))
               for entries in kv._pushed([kv._layouts['w']], [x]).values())


def test_what_is_not_compressed(dist):
    shape = (4, 2)
    dist.init(['int', 'sparse'], [np.zeros(shape, int), RowSparse([], np.zeros((0, 2)), shape)])
    adding(dist)
    dist.set_gradient_compression({'type': '2bit', 'threshold': 100.})
    rows = RowSparse([3], np.ones((1, 2)), shape)
    dist.push(['int', 'sparse'], [np.ones(shape, int), rows])
    dist.barrier()
    np.testing.assert_array_equal(dist.pull('int'), np.full(shape, dist.num_workers))
    np.testing.assert_array_equal(dist.row_sparse_pull('sparse', row_ids=np.arange(4)).todense(),
                                  rows.todense() * dist.num_workers)


@pytest.mark.parametrize('type', ['local', 'device'])
def test_between_devices(create, type):
    kv = create(type)
    kv.init('w', np.zeros(3, np.float32))
    adding(kv)
    kv.set_gradient_compression({'type': '2bit', 'threshold': .5})
    kv.push('w', [np.array([.75, .25, 0], 'f'), np.array([.25, -.5, -9], 'f')])
    np.testing.assert_array_equal(kv.pull('w'), [.5, -.5, -.5])
    kv.push('w', [np.array([.25, .25, 0], 'f'), np.array([.25, 0, 0], 'f')])
    np.testing.assert_array_equal(kv.pull('w'), [1.5, 0, -1])
    kv.push('w', np.array([.25, .25, .25], 'f'))  # of one device: does not travel
    np.testing.assert_array_equal(kv.pull('w'), [1.75, .25, -.75])


@pytest.mark.mpi(min_size=2)
def test_ranks_need_the_same_compression(dist, same_error, comm):
    error = same_error(dist.set_gradient_compression,
                       {'type': '2bit', 'threshold': 1. + comm.rank})
    assert isinstance(error, ValueError)
    assert 'do not call the same' in str(error)
    assert repr(compression.TwoBit(1.)) in str(error)


# --- states ----------------------------------------------------------------------------------

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
    """Steps of all ranks together, one after another; only rank 0 pushes to dist_async."""
    for step in range(first, last):
        if kv.type != 'dist_async' or kv.rank == 0:
            kv.push(list(SHAPES), gradients(step, kv))
    kv.barrier()


@pytest.fixture
def path(tmp_path, comm):
    return comm.bcast_obj(str(tmp_path / 'a.name with.dots'))


@pytest.mark.parametrize('type', ['local', 'dist_sync', 'dist_async'])
@pytest.mark.parametrize('make', [lambda: optimizers.Adam(.1), lambda: optimizers.SMORMS3(.1)],
                         ids=['Adam', 'SMORMS3'])
def test_go_on_as_if_nothing_had_happened(create, type, make, path, comm):
    """With other parts, and with states that come before the keys."""
    kv = store(create, type, 1, make())
    init(kv)
    steps(kv, 0, 3)
    values = kv.pull(list(SHAPES))
    path = path if type.startswith('dist') else f'{path}-{comm.rank}'
    kv.save_optimizer_states(path)
    steps(kv, 3, 6)
    expected = kv.pull(list(SHAPES))

    for bound, is_loaded_first in ((1, False), (10**6, True), (10**6, False)):
        again = store(create, type, bound, make())
        if is_loaded_first:
            again.load_optimizer_states(path)
        init(again, values)
        if not is_loaded_first:
            again.load_optimizer_states(path)
        steps(again, 3, 6)
        for x, y in zip(again.pull(list(SHAPES)), expected, strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize('type', ['local', 'dist_sync'])
def test_one_file_for_any_number_of_ranks(create, comm, type, path):
    """What many ranks have written, one rank reads, and the other way round."""
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


def test_files_of_others(create, path, comm, same_error):
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
    assert isinstance(error, ValueError) and '(5, 3), not (2, 2)' in str(error)


def test_damaged_files(create, path, comm, same_error):
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
        assert 'has no states of a KVStore' in str(error), n


def test_an_old_file_stays_whole(create, comm, path, monkeypatch, same_error):
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


def test_states_start_anew_with_another_optimizer(kv):
    kv.init(0, np.zeros(2, 'f'))
    for _ in range(2):
        kv.set_optimizer(optimizers.MomentumSGD(1., 1.))
        if kv.rank == 0 or kv.type in ('dist_sync', 'dist_device_sync'):
            kv.push(0, np.ones(2, 'f'))
        kv.barrier()
    n = kv.num_workers if kv.type in ('dist_sync', 'dist_device_sync') else 1
    np.testing.assert_array_equal(kv.pull(0), np.full(2, -2 * n))
