"""Files that Chainer 1.24 to 6.7 wrote: same outputs, updates and training as in that version.

``write_snapshots.py`` wrote the files and the values, with these versions.
"""

import copy
import pathlib
import pickle
import runpy
import types
import zipfile

import chainer
import numpy as np
import pytest
from chainer import serializers

pytestmark = [pytest.mark.mpi_skip, pytest.mark.filterwarnings('ignore')]

HERE = pathlib.Path(__file__).parent
FILES = sorted(HERE.glob('*.zip'))
snapshots = types.SimpleNamespace(**runpy.run_path(str(HERE / 'write_snapshots.py')))


@pytest.fixture(params=FILES, ids=[path.stem for path in FILES])
def folder(request, tmp_path):
    with zipfile.ZipFile(request.param) as archive:
        archive.extractall(tmp_path)
    (tmp_path / 'version').write_text(request.param.stem)
    return tmp_path


@pytest.fixture
def same(folder):
    """Give a function that compares values with those of the old version."""
    with np.load(folder / 'reference.npz') as reference:
        old = dict(reference)

    def compare(name, value):
        np.testing.assert_allclose(value, old[name], rtol=1e-5, atol=1e-5, err_msg=name)

    return compare


def compare_outputs(model, same):
    for name, array in snapshots.outputs(model).items():
        same(f'outputs/{name}', array)
    np.testing.assert_array_equal(model.array, snapshots.values(3))
    assert model.number == 2.5


def compare_updates(name, optimizer, model, same):
    assert optimizer.t == snapshots.N_UPDATES
    snapshots.update(optimizer, model)
    for param, array in snapshots.parameters(model).items():
        same(f'updated/{name}{param}', array)


def test_model(folder, same):
    model = snapshots.make_model()
    serializers.load_npz(folder / 'model.npz', model)
    compare_outputs(model, same)


def test_pickled_model(folder, same):
    # Strings of Python 2 need the encoding.
    model = pickle.loads((folder / 'model.pickle').read_bytes(), encoding='latin1')
    compare_outputs(model, same)
    model.cleargrads()
    model.to_device('@numpy')
    other = snapshots.make_model()
    other.copyparams(model)
    assert {p for p, _ in other.namedparams()} == {p for p, _ in model.namedparams()}
    assert model.copy().count_params() == other.count_params() > 0
    assert pickle.loads(pickle.dumps(model)).number == 2.5


class WithSlots(chainer.Link):
    __slots__ = ('extra',)


class State:
    def __getstate__(self):
        return {'number': self.number}

    def __setstate__(self, state):
        self.number = state['number'] + 1


class WithState(chainer.Chain, State):
    pass


@pytest.mark.parametrize('copied', [copy.copy, copy.deepcopy,
                                    lambda link: pickle.loads(pickle.dumps(link))])
def test_links_with_another_state(copied):
    """Like objects that are no links."""
    link, other = WithSlots(), WithState()
    link.extra, link.number, other.number = [1], 2, 3
    assert (copied(link).extra, copied(link).number, list(copied(link).params())) == ([1], 2, [])
    assert vars(copied(other)) == {'number': 4}


@pytest.mark.parametrize('kind', ['npz', 'h5'])
def test_optimizers(folder, same, kind):
    if kind == 'h5':
        pytest.importorskip('h5py', reason='needs h5py')
    load = serializers.load_npz if kind == 'npz' else serializers.load_hdf5
    for name in snapshots.OPTIMIZERS if kind == 'npz' else ['adam']:
        optimizer, model = snapshots.make_optimizer(name)
        load(folder / f'{name}_model.{kind}', model)
        load(folder / f'{name}.{kind}', optimizer)
        compare_updates(name, optimizer, model, same)


@pytest.mark.parametrize('kind', ['npz', 'h5'])
def test_trainer(folder, same, kind):
    path = folder / f'trainer.{kind}'
    if kind == 'h5' and not path.exists():
        pytest.skip('Chainer on Python 3 cannot write it')
    elif kind == 'h5':
        pytest.importorskip('h5py', reason='needs h5py')
    resumed = snapshots.resume(
        path, serializers.load_npz if kind == 'npz' else serializers.load_hdf5)
    version = (folder / 'version').read_text()
    for name in ('iteration', 'epoch', 'lr', 't', 'log_iterations', 'best'):
        same(f'trainer/{name}', resumed[name])
    with np.load(folder / 'reference.npz') as reference:
        # Later epochs have another order since version 5.
        n = 2 if version < '5' else None
        np.testing.assert_allclose(resumed['losses'][:n], reference['trainer/losses'][:n], 1e-4)
        # Versions 1 and 2 did not save the mean since the last entry, which is the third one.
        n = 2 if version < '3' else 3 if version < '5' else None
        np.testing.assert_allclose(
            resumed['log_losses'][:n], reference['trainer/log_losses'][:n], 1e-4)


def test_object_not_in_hdf5():
    deserializer = object.__new__(serializers.HDF5Deserializer)  # without h5py
    deserializer.group, deserializer.strict = None, True
    with pytest.raises(KeyError, match='name'):
        deserializer['child']['grandchild']('name', 0)
    deserializer.strict = False
    assert deserializer['child']('name', 3) == 3
