"""``python -m chainer_compat export``: snapshots become files that run without Chainer."""

import os
import subprocess
import sys

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
import torch
from chainer import training

from chainer_compat import __main__ as main
from chainer_compat.pytorch.conversion import snapshots
from chainer_compat.pytorch.conversion.errors import ConversionError
from chainermn.extensions._checkpointing import rank_file

pytestmark = pytest.mark.mpi_skip

NET = '''
import chainer, chainer.functions as F, chainer.links as L
def make():
    return chainer.Sequential(L.Linear(4, 3), F.relu, L.Linear(3, 2))
'''

LOAD = '''
import sys, torch
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("chainer", "chainer_compat", "cupy"):
            raise ImportError(name)
sys.meta_path.insert(0, Block())
for name in [name for name in sys.modules if name.startswith("chainer")]:
    del sys.modules[name]
print(torch.load(sys.argv[1], weights_only=False)(torch.ones(3, 4)).tolist())
'''


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / 'net_of_test.py').write_text(NET)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, 'dont_write_bytecode', True)
    yield tmp_path
    sys.modules.pop('net_of_test', None)


def net():
    return chainer.Sequential(L.Linear(4, 3), F.relu, L.Linear(3, 2))


def export(monkeypatch, *args):
    monkeypatch.setattr(sys, 'argv', ['chainer_compat', 'export', *args,
                                      '--model', 'net_of_test:make', '--input', '2,4'])
    main.main()


def trainer_of(model):
    iterator = chainer.iterators.SerialIterator([(np.ones(4, 'f'), np.int32(0))], 1)
    optimizer = chainer.optimizers.Adam().setup(L.Classifier(model))
    trainer = training.Trainer(
        training.StandardUpdater(iterator, optimizer), (1, 'iteration'), out='trainer')
    trainer.run()
    return trainer


def test_a_file_that_runs_without_chainer(folder, monkeypatch, capsys):
    model = net()
    chainer.serializers.save_npz('model.npz', model)
    export(monkeypatch, 'model.npz', 'model.pt')
    assert 'Wrote model.pt.' in capsys.readouterr().out
    run = subprocess.run([sys.executable, '-c', LOAD, 'model.pt'], check=True,
                         stdout=subprocess.PIPE, env={**os.environ, 'CHAINER_COMPAT': '0'})
    np.testing.assert_allclose(eval(run.stdout), model(np.ones((3, 4), 'f')).array, rtol=1e-5)


def test_a_snapshot_of_a_trainer(folder, monkeypatch, capsys):
    model = net()
    chainer.serializers.save_npz('snapshot_iter_1', trainer_of(model))
    export(monkeypatch, 'snapshot_iter_1', 'model.pt', '--train')
    assert '(from updater/model:main/predictor/)' in capsys.readouterr().out
    module = torch.load('model.pt', weights_only=False)
    assert (module.state_dict()['0.W'].numpy() == model[0].W.array).all()


def save(folder, model, iteration, rank, ranks, name='run'):
    """Write a rank's file of a checkpoint."""
    arrays = {}
    chainer.serializers.DictionarySerializer(arrays).save(model)
    rank_file.write(str(folder / f'job.{rank}.{iteration}'), arrays, rank_file.Tag(
        f'{name}-{iteration}', iteration, ranks, list(range(ranks)), rank))


@pytest.mark.parametrize('removed', [(), (10, 20)])
def test_a_checkpoint_after_a_restart_with_fewer_ranks(tmp_path, removed):
    """Rank 1 of the first job has left files, of which rank 0 may have removed its own."""
    models = {iteration: net() for iteration in (10, 20, 30, 40)}
    for iteration, ranks in (10, 2), (20, 2), (30, 1), (40, 1):
        for rank in range(ranks):
            if rank or iteration not in removed:
                save(tmp_path, models[iteration], iteration, rank, ranks)
    loaded = net()
    snapshots.load_snapshot(tmp_path, loaded)
    assert (loaded[0].W.array == models[40][0].W.array).all()


def test_checkpoints_that_are_incomplete(tmp_path):
    models = {iteration: net() for iteration in (10, 20, 30, 40)}
    for iteration, model in models.items():
        for rank in range(2):
            save(tmp_path, model, iteration, rank, 2)
    save(tmp_path, net(), 20, 1, 2, 'another run')
    (tmp_path / 'job.1.30').unlink()
    (tmp_path / 'job.0.40').write_bytes(b'PK')
    loaded = net()
    with pytest.warns(UserWarning) as warned:
        snapshots.load_snapshot(tmp_path, loaded)
    assert [str(each.message).split()[2] for each in warned] == ['40', '30', '20']
    assert (loaded[0].W.array == models[10][0].W.array).all()


def test_a_file_of_another_model(tmp_path):
    chainer.serializers.save_npz(tmp_path / 'other.npz', L.Linear(4, 3))
    with pytest.raises(ConversionError, match=r"does not contain all parameters of Sequential"):
        snapshots.load_snapshot(tmp_path / 'other.npz', net())


def test_no_file_after_an_error(folder, monkeypatch):
    chainer.serializers.save_npz('other.npz', L.Linear(4, 3))
    with pytest.raises(SystemExit, match=r'ConversionError: other\.npz does not contain'):
        export(monkeypatch, 'other.npz', 'model.pt')
    assert sorted(os.listdir(folder)) == ['net_of_test.py', 'other.npz']


@pytest.mark.parametrize('model, key, shape', [
    (lambda: chainer.Sequential(L.Linear(4, 3), F.relu, L.Linear(3, 5)), '1/W', r'\(5, 3\)'),
    (lambda: chainer.Sequential(L.Linear(4, 3), F.relu, L.Linear(3, 1)), '1/W', r'\(1, 3\)')])
@pytest.mark.parametrize('wrap, prefix', [(lambda model: model, ''),
                                          (trainer_of, 'updater/model:main/predictor/')])
def test_a_snapshot_of_another_size(folder, monkeypatch, model, key, shape, wrap, prefix):
    """NumPy would broadcast an array of one row or number to any size."""
    chainer.serializers.save_npz('snap.npz', wrap(model()))
    with pytest.raises(SystemExit, match=f'snap.npz: {prefix}{key} has shape {shape}, but the model'
                       r' of --model net_of_test:make needs \(2, 3\)\. Create the model'):
        export(monkeypatch, 'snap.npz', 'model.pt')
    assert not (folder / 'model.pt').exists()


@pytest.mark.parametrize('args, text', [
    (('model.npz', 'model.bin'), r'must be a \.pt file or an \.onnx file, not model\.bin\.'),
    (('model.npz', 'model.onnx', '--train'), r'With --train, .* a \.pt file, not model\.onnx\.'),
    (('none.npz', 'model.pt'), r'no such snapshot: none\.npz'),
    (('model.npz', 'model.pt', '--training', 'make'), "--training must be MODULE:FUNCTION, not 'm"),
    *((('model.npz', 'model.pt', '--input', each),
       f'--input {each} must be a shape and an optional dtype, such as 1,3,224,224 or 2,10:int32')
      for each in ('1x8', '1,8:flaot', '1,-8'))])
def test_wrong_arguments_are_found_before_pytorch_is_imported(folder, monkeypatch, args, text):
    chainer.serializers.save_npz('model.npz', net())
    for name in ('torch', 'chainer_compat.pytorch.conversion.convert'):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(SystemExit, match=text):
        export(monkeypatch, *args)


def test_a_model_that_cannot_be_called(folder, monkeypatch):
    with open('net_of_test.py', 'a') as file:
        file.write('net = make\ndef make():\n    return L.Classifier(net())\n')
    chainer.serializers.save_npz('model.npz', L.Classifier(net()))
    with pytest.raises(SystemExit, match=r'cannot be called with --input 2,4: \w+Error: .*\nPass '):
        export(monkeypatch, 'model.npz', 'model.pt')
    assert sorted(os.listdir(folder)) == ['model.npz', 'net_of_test.py']


@pytest.mark.parametrize('name, text', [
    ('none', r'FileNotFoundError: .*none'),
    ('text', 'text is not an NPZ file'),
    ('array.npy', 'array.npy is not an NPZ file'),
    ('part.npz', 'part.npz is not an NPZ file'),
    ('bits.npz', 'bits.npz is damaged: BadZipFile: ')])
@pytest.mark.parametrize('options', [(), ('--training', 'net_of_test:optimizer')])
def test_files_that_are_no_snapshots(folder, monkeypatch, name, text, options):
    (folder / 'text').write_text('text')
    np.save('array.npy', np.ones(3))
    chainer.serializers.save_npz('model.npz', net(), compression=False)
    data = (folder / 'model.npz').read_bytes()
    (folder / 'part.npz').write_bytes(data[:len(data) // 2])
    at = data.index(net()[0].b.array.tobytes())
    (folder / 'bits.npz').write_bytes(data[:at] + b'\1' + data[at + 1:])
    with pytest.raises(SystemExit, match=text):
        export(monkeypatch, name, 'model.pt', *options)


def test_a_program_with_an_error(folder, monkeypatch):
    chainer.serializers.save_npz('model.npz', net())
    (folder / 'net_of_test.py').write_text('def make(:\n')
    with pytest.raises(SystemExit, match=r'--model net_of_test:make cannot be called: SyntaxError'):
        export(monkeypatch, 'model.npz', 'model.pt')
    (folder / 'net_of_test.py').write_text('def make():\n    return 3\n')
    with pytest.raises(SystemExit, match=r'must return a chainer\.Link, not int'):
        export(monkeypatch, 'model.npz', 'model.pt')
