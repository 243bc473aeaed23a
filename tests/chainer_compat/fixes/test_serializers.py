"""NPZ and HDF5 files hold what was put into them, on every NumPy."""

import chainer
import chainer.links as L
import numpy as np
import pytest
from chainer import serializers

pytestmark = pytest.mark.mpi_skip

VALUES = {
    'nothing': None,
    'zero': 0,
    'float': 1.5,
    'numpy scalar': np.float32(.1),
    'bool': np.bool_(True),
    '0-d': np.array(3, 'i'),
    'empty': np.zeros((0, 2), 'f'),
    'float16': np.arange(6, dtype='e').reshape(2, 3),
    'big-endian': np.arange(3, dtype='>f8'),
    'uint8': np.array([0, 255], 'B'),
    'strided': np.arange(12, dtype='d').reshape(3, 4)[::2, 1::2],
}


def same(a, b):
    if b is None:
        return a is None
    return np.shape(a) == np.shape(b) and np.asarray(a).dtype == np.asarray(b).dtype and (
        np.array_equal(a, b))


class Network(chainer.Chain):
    """One with parameters of every kind: set, not set yet, persistent, None."""

    def __init__(self, given=None):
        super().__init__()
        with self.init_scope():
            self.known = L.Linear(3, 2)
            self.unknown = L.Linear(given, 2)
            self.normalization = L.BatchNormalization(4)
        self.add_persistent('scalar', 3.25)
        self.add_persistent('array', np.arange(3))
        self.add_persistent('nothing', None)


@pytest.fixture(params=['npz', 'hdf5'])
def files(request, tmp_path):
    """Give (save, load), of NPZ or HDF5."""
    if request.param == 'hdf5':
        pytest.importorskip('h5py', reason='needs h5py')
    save, load = (getattr(serializers, f'{action}_{request.param}') for action in ('save', 'load'))
    path = str(tmp_path / f'file.{request.param}')
    return lambda obj: save(path, obj), lambda obj: load(path, obj)


class Holder:
    """Serializes a dictionary, with a child for each second entry."""

    def __init__(self, values):
        self.values = values

    def serialize(self, serializer):
        for i, (key, value) in enumerate(self.values.items()):
            at = serializer['child'] if i % 2 else serializer
            self.values[key] = at(key, value)


def test_values(files):
    save, load = files
    save(Holder(dict(VALUES)))
    # With None in its place a value comes back as it was written.
    read = Holder(dict.fromkeys(VALUES))
    load(read)
    for key, value in VALUES.items():
        assert same(read.values[key], value), key
    # An array is filled, a number is of the type that was there.
    like = Holder({k: np.full_like(v, 7) if isinstance(v, np.ndarray) else v
                   for k, v in VALUES.items()})
    arrays = {k: v for k, v in like.values.items() if isinstance(v, np.ndarray)}
    load(like)
    for key, value in VALUES.items():
        assert same(like.values[key], value), key
        assert type(like.values[key]) is type(value), key
    assert all(like.values[key] is array for key, array in arrays.items() if array.ndim)


def test_objects_in_npz(tmp_path):
    """None, and what else needs pickle, can be read although NumPy refuses it by default."""
    path = str(tmp_path / 'file.npz')
    with open(path, 'wb') as file:
        serializers.save_npz(file, Holder({'a': np.array([1, 'b', None], object), 'n': None}))
    read = Holder({'a': None, 'n': 1})
    serializers.load_npz(path, read)
    assert read.values['a'].tolist() == [1, 'b', None]
    assert read.values['n'] is None


def test_npz_by_parts(tmp_path):
    path = tmp_path / 'file.npz'
    net = Network(5)
    serializers.save_npz(str(path), net, compression=False)
    part = L.Linear(3, 2)
    serializers.load_npz(str(path), part, path='known/')
    assert same(part.W.array, net.known.W.array)
    with pytest.raises(KeyError):
        serializers.load_npz(str(path), Network(5).normalization, path='known/')
    kept = L.Linear(3, 2)
    kept.b.array[:] = 9
    serializers.load_npz(str(path), kept, path='known/', ignore_names=['known/b'])
    assert kept.b.array.tolist() == [9, 9]
    with np.load(path, allow_pickle=True) as file:
        assert {'known/W', 'known/b', 'scalar'} <= set(file.files)


def test_hdf5_refuses_text(tmp_path):
    h5py = pytest.importorskip('h5py', reason='needs h5py')
    with h5py.File(tmp_path / 'file.h5', 'w') as file, pytest.raises(TypeError, match='conversion'):
        serializers.HDF5Serializer(file)('text', 'abc')
