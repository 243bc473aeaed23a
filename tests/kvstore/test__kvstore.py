"""Arguments and results of all types of stores; errors of collective calls on all ranks."""

import inspect
import os
import re

import chainer
import numpy as np
import pytest
from shared_fixtures import raises_on_all

from chainermn import kvstore

FILE = os.path.basename(__file__)
X = np.arange(6, dtype=np.float32).reshape(2, 3)
ROWS = kvstore.RowSparse([0], X[:1], (2, 3))


DTYPES = ['bool', 'int8', 'uint64', 'int64', 'float16', 'float32', 'float64', 'complex64',
          'complex128']


@pytest.mark.parametrize('shape', [(), (0, 3)])
def test_any_dtype_and_shape(kv, shape):
    kv.init(DTYPES, [np.zeros(shape, dtype) for dtype in DTYPES])
    for x in kv.pull(DTYPES):
        np.testing.assert_array_equal(x, np.zeros(shape))
    kv.barrier()
    kv.push(DTYPES, [np.ones(shape, dtype) for dtype in DTYPES])
    kv.barrier()
    for dtype, x in zip(DTYPES, kv.pull(DTYPES), strict=True):
        assert (x.dtype, x.shape) == (np.dtype(dtype), shape)
        np.testing.assert_array_equal(
            x, np.ones(shape, dtype) * (1 if dtype == 'bool' else pushes(kv)))


def pushes(kv):
    """Number of pushes that are summed when each rank pushes once."""
    return kv.num_workers if kv.type in ('dist_sync', 'dist_device_sync') else 1


def test_equal_keys_of_a_push_are_summed(kv):
    """As in MXNet, also the name of the method; the updater is called once."""
    calls = []
    kv.init(['x', 'y', 'r'], [X, X, ROWS])

    def update(key, pushed, stored):
        calls.append(key)
        stored[...] = pushed

    kv._set_updater(update)
    if kv.type != 'dist_async' or kv.rank == 0:
        kv.push(['x', 'y', 'x', 'r', 'x', 'r'], [X, X, [X, 2 * X], ROWS, 3 * X, X])
    kv.barrier()
    x, y = kv.pull(['x', 'y'])
    np.testing.assert_array_equal(x, 7 * X * pushes(kv))
    np.testing.assert_array_equal(y, X * pushes(kv))
    r = kv.row_sparse_pull('r', row_ids=[0, 1]).todense()
    np.testing.assert_array_equal(r, (X + ROWS.todense()) * pushes(kv))
    by_rank = kv._backend.gather('test', calls)
    if kv.rank == 0:
        assert sorted(key for keys in by_rank for key in keys) == ['r', 'x', 'y']


def test_sums_of_float16_beyond_its_range(kv):
    """The values of devices, the rows of RowSparse and the workers, before they are rescaled."""
    big = np.full((2, 3), 60000, np.float16)
    rows = kvstore.RowSparse([0, 1, 0, 1], np.full((4, 3), 60000, np.float16), (2, 3))
    zero = np.zeros((2, 3), np.float16)
    kv.init(['x', 'r', 's'], [zero, kvstore.RowSparse.from_dense(zero), zero])
    kv.set_optimizer(chainer.optimizers.SGD(2.**-10), 1 / (4 * pushes(kv)))
    if kv.type != 'dist_async' or kv.rank == 0:
        kv.push(['x', 'r', 's'], [[big] * 4, [rows, rows], [rows, big, big]])
    kv.barrier()
    expected = np.full((2, 3), -60000 * 2.**-10)
    for x in (*kv.pull(['x', 's']), kv.row_sparse_pull('r', row_ids=[0, 1]).rows):
        np.testing.assert_allclose(x, expected, rtol=1e-3)


@pytest.mark.parametrize('add_hook', [False, True])
def test_small_means_reach_the_float32_copy(kv, add_hook):
    """rescale_grad removes a loss scale; the mean is not representable in float16."""
    sgd = chainer.optimizers.SGD(2.**14)
    sgd.use_fp32_update()
    sgd.setup(chainer.links.Linear(1, 1))
    if add_hook:
        def double(rule, param):
            param.grad = param.grad * 2
        double.call_for_each_param = True
        sgd.add_hook(double, 'double')
    kv.init('x', np.zeros(2, np.float16))
    kv.set_optimizer(sgd, 2.**-14 / pushes(kv))
    if kv.type != 'dist_async' or kv.rank == 0:
        kv.push('x', np.array([2.**-14, 3 * 2.**-13], np.float16))
    kv.barrier()
    np.testing.assert_array_equal(
        kv.pull('x'), -np.array([2.**-14, 3 * 2.**-13]) * (1 + add_hook))


def test_an_optimizer_needs_floating_point(kv, same_error):
    kv.init(['n', 'x'], [np.zeros(3, int), X])
    kv.set_optimizer(chainer.optimizers.SGD(), .5)
    error = same_error(kv.push, 'n', np.ones(3, int))
    assert isinstance(error, TypeError) and "key 'n' has dtype int64" in str(error)
    kv.push('x', X)


def test_pull_skips_row_sparse_keys(kv):
    kv.init(['sparse', 'dense'], [ROWS, X])
    out = [np.full((2, 3), 9, np.float32) for _ in range(2)]
    with pytest.warns(UserWarning, match='use row_sparse_pull'):
        kv.pull(['sparse', 'dense'], out=out)
    np.testing.assert_array_equal(out[0], np.full((2, 3), 9))
    np.testing.assert_array_equal(out[1], X)
    with pytest.warns(UserWarning, match='use row_sparse_pull'):
        assert kv.pull('sparse') is None


# Calls that are an error: the type and a part of the text.
ERRORS = {
    'push before init': (lambda kv: kv.push('new', X), ValueError, "'new' is not initialized"),
    'pull before init': (lambda kv: kv.pull('new', X.copy()), ValueError,
                         "'new' is not initialized"),
    'row_sparse_pull before init': (lambda kv: kv.row_sparse_pull('new', row_ids=[0]), ValueError,
                                    "'new' is not initialized"),
    'init twice': (lambda kv: kv.init('x', X), ValueError, "'x' is already initialized"),
    'init twice in a list': (lambda kv: kv.init(['y', 'y'], [X, X]), ValueError,
                             "'y' is already initialized"),
    'several values in init': (lambda kv: kv.init('y', [X, X]), ValueError, 'one value for each'),
    'shape': (lambda kv: kv.push('x', X.T), ValueError, r'shape \(2, 3\), but .* \(3, 2\)'),
    'dtype': (lambda kv: kv.push('x', X.astype(int)), TypeError,
              'has dtype float32, but the array has dtype int64'),
    'shape of out': (lambda kv: kv.pull('x', X.T.copy()), ValueError, 'has shape'),
    'dtype of out': (lambda kv: kv.pull('x', X.astype(int)), TypeError, 'has dtype'),
    'read-only out': (lambda kv: kv.pull('x', np.broadcast_to(X[0], (2, 3))), ValueError,
                      'writable'),
    'second of a list': (lambda kv: kv.push('x', [X, X.T]), ValueError, 'has shape'),
    'no array': (lambda kv: kv.push('x', 3), TypeError, 'must be a NumPy array, CuPy array'),
    'variable': (lambda kv: kv.push('x', chainer.Variable(X)), TypeError, 'Pass its .array'),
    'masked': (lambda kv: kv.init('y', np.ma.masked_array(X)), TypeError, 'must be a NumPy'),
    'objects': (lambda kv: kv.init('y', X.astype(object)), TypeError, 'dtype object'),
    'type of key': (lambda kv: kv.push(1.5, X), TypeError, 'an int or a str, not 1.5'),
    'bool key': (lambda kv: kv.push(True, X), TypeError, 'an int or a str, not True'),
    'too few values': (lambda kv: kv.push(['x', 'x'], [X]), ValueError, 'expected 2 elements'),
    'too few outs': (lambda kv: kv.pull(['x', 'x'], X.copy()), ValueError, 'expected 2 elements'),
    'no value': (lambda kv: kv.push('x', []), ValueError, "empty list for key 'x'"),
    'rows of a dense key': (lambda kv: kv.row_sparse_pull('x', row_ids=[0]), ValueError,
                            'not initialized with a RowSparse'),
    'no row_ids': (lambda kv: kv.row_sparse_pull('r'), TypeError, 'needs row_ids'),
    'row_ids beyond': (lambda kv: kv.row_sparse_pull('r', row_ids=[0, 2]), ValueError,
                       'from 0 to 1'),
    'negative row_ids': (lambda kv: kv.row_sparse_pull('r', row_ids=np.array([-1])), ValueError,
                         'from 0 to 1'),
    'float row_ids': (lambda kv: kv.row_sparse_pull('r', row_ids=np.zeros(1)), TypeError,
                      'array of integers'),
    'row_ids for others': (lambda kv: kv.row_sparse_pull(
        'r', out=[ROWS, ROWS], row_ids=[np.zeros(1, int)] * 3), ValueError, 'has 3 arrays'),
    'updater': (lambda kv: kv.set_updater(3), TypeError, 'must be callable'),
    'arguments of updater': (lambda kv: kv.set_updater(lambda x, stored: None), TypeError,
                             r'updater\(key, pushed, stored\), but its signature is <lambda>'),
    'optimizer': (lambda kv: kv.set_optimizer('sgd'), TypeError, 'set_optimizer needs'),
    'compression type': (lambda kv: kv.set_gradient_compression({'type': '1bit'}), ValueError,
                         "'1bit'"),
    'no compression type': (lambda kv: kv.set_gradient_compression({'threshold': 1}), ValueError,
                            "type '2bit'"),
    'no dict': (lambda kv: kv.set_gradient_compression('2bit'), TypeError, 'dict'),
    'negative threshold': (lambda kv: kv.set_gradient_compression(
        {'type': '2bit', 'threshold': -1}), ValueError, 'threshold'),
    'threshold': (lambda kv: kv.set_gradient_compression({'type': '2bit', 'threshold': 'x'}),
                  TypeError, 'threshold'),
    'other parameter': (lambda kv: kv.set_gradient_compression({'type': '2bit', 'bits': 2}),
                        ValueError, 'bits'),
    'save without optimizer': (lambda kv: kv.save_optimizer_states('x'), RuntimeError,
                               'set_optimizer first'),
    'load without optimizer': (lambda kv: kv.load_optimizer_states('x'), RuntimeError,
                               'set_optimizer first'),
}

#: Not collective in dist_async.
NOT_COLLECTIVE = ('push', 'pull', 'row_sparse_pull')


def test_errors_of_all_ranks(kv, same_error):
    kv.init(['x', 'r'], [X, ROWS])
    for name, (call, kind, text) in ERRORS.items():
        check_error(name, same_error(call, kv), kind, text)
    check_usable(kv)


def check_error(name, error, kind, text):
    assert isinstance(error, kind), (name, error)
    assert re.search(text, str(error)), (name, error)


def check_usable(kv):
    for x in (0 * X, X):
        kv.push('x', x)
        kv.barrier()
        np.testing.assert_array_equal(kv.pull('x'), x * pushes(kv))
        kv.barrier()


@pytest.mark.mpi(min_size=2)
def test_an_error_of_one_rank_is_raised_on_all(comm, create, same_error):
    kv = create('dist_sync')
    kv.init(['x', 'r'], [X, ROWS])
    good = {'row_sparse_pull': lambda: kv.row_sparse_pull('r', row_ids=[0]),
            'pull': lambda: kv.pull('x'), 'push': lambda: kv.push('x', X),
            'init': lambda: kv.init('y', X)}
    for name, (call, kind, text) in ERRORS.items():
        method = next((method for method in good if f'kv.{method}(' in source(call)), 'push')
        bad = comm.size - 1
        error = same_error(lambda: call(kv) if comm.rank == bad else good[method]())  # noqa: B023
        check_error(name, error, kind, text)
        check_usable(kv)


def test_an_error_of_one_rank_is_its_own_in_dist_async(comm, create):
    """The servers continue."""
    kv = create('dist_async')
    kv.init(['x', 'r'], [X, ROWS])
    for name, (call, kind, text) in ERRORS.items():
        if comm.rank == comm.size - 1 and any(
                f'kv.{method}(' in source(call) for method in NOT_COLLECTIVE):
            try:
                error = call(kv)
            except Exception as caught:
                error = caught
            check_error(name, error, kind, text)
        assert kv.pull('x').shape == X.shape
    kv.barrier()
    check_usable(kv)


def source(function):
    return inspect.getsource(function).split('kv:', 1)[1]


def test_with_statement(comm):
    with kvstore.create('dist_async', comm) as kv:
        kv.init(0, X)
        kv.barrier()
    with pytest.raises(ValueError, match='closed'):
        kv.pull(0)
    kv._backend._service._thread.join()
    with kvstore.create() as kv:
        kv.init(0, X)
    assert kv.type == 'local'


#: By name, calls that have no other error.
AFTER_CLOSE = {
    'init': lambda kv: kv.init('y', X), 'push': lambda kv: kv.push('x', X),
    'pull': lambda kv: kv.pull('x'), 'barrier': lambda kv: kv.barrier(),
    'row_sparse_pull': lambda kv: kv.row_sparse_pull('r', row_ids=[0]),
    'set_updater': lambda kv: kv.set_updater(lambda key, x, stored: None),
    'set_optimizer': lambda kv: kv.set_optimizer(chainer.optimizers.SGD()),
    'set_gradient_compression': lambda kv: kv.set_gradient_compression({'type': '2bit'}),
    'save_optimizer_states': lambda kv: kv.save_optimizer_states('x'),
    'load_optimizer_states': lambda kv: kv.load_optimizer_states('x')}


@pytest.mark.parametrize('name', AFTER_CLOSE)
def test_a_closed_store_cannot_be_used(kv, name, same_error):
    kv.init(['x', 'r'], [X, ROWS])
    kv.close()
    error = same_error(lambda: AFTER_CLOSE[name](kv))
    check_error(name, error, ValueError, r'closed on this rank.* do not use it after close\(\)')


def returned(key, pushed, stored):
    return stored + pushed


def raised(key, pushed, stored):
    stored += pushed['a']


@pytest.mark.parametrize('updater, line, text', [
    (returned, 0, 'returned a new array, which has no effect. Change stored in place'),
    (raised, 1, 'only integers')])
def test_errors_of_the_updater(kv, updater, line, text):
    """They give the key and the line; in a store of one process, as a note."""
    kv.init('x', X)
    kv.set_updater(updater)
    with pytest.raises((TypeError, IndexError), match=text) as error:
        kv.push('x', X)
        kv.pull('x')
    notes = ' '.join(getattr(error.value, '__notes__', ())) if kv.num_workers == 1 else ''
    line += updater.__code__.co_firstlineno
    assert f"in the updater for key 'x', at {FILE}:{line}" in str(error.value) + notes
    kv.barrier()
    np.testing.assert_array_equal(kv.pull('x'), X)


def test_results_of_the_updater_without_an_error(kv):
    """Such as those of methods that change an array in place and return it."""
    kv.init('x', 0 * X)
    for updater in (lambda key, pushed, stored: np.add(stored, pushed, out=stored),
                    lambda key, pushed, stored: stored.fill(1) or 3.):
        kv.set_updater(updater)
        kv.push('x', X)
    kv.barrier()
    np.testing.assert_array_equal(kv.pull('x'), np.ones_like(X))


@pytest.mark.mpi(min_size=2)
@pytest.mark.compares_calls
def test_init_on_one_rank_only(comm, create):
    kv = create('dist_sync')
    with raises_on_all(ValueError, match=r"call init\('w', value\) first on all ranks"):
        if comm.rank == 0:
            kv.init('w', X)
        kv.push('w', X)
