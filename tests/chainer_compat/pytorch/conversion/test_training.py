"""``export --training``: a program goes on with a training where the snapshot of it stopped."""

import os
import subprocess
import sys

import chainer
import chainer.links as L
import numpy as np
import pytest
import torch
from chainer import training

from chainer_compat import ConversionError
from chainer_compat import __main__ as main
from chainer_compat.pytorch.conversion.training import load_optimizer

pytestmark = pytest.mark.mpi_skip

NET = '''
import chainer, chainer.functions as F, chainer.links as L
from chainer import optimizer_hooks as hooks, optimizers
def make():
    return chainer.Sequential(L.Linear(4, 3), F.tanh, L.Linear(3, 2))
def adam(model):
    return optimizers.Adam(.02, eps=1e-3)
def nesterov(model):
    return optimizers.NesterovAG(.1)
def sgd(model):
    optimizer = optimizers.MomentumSGD(.1).setup(model)
    optimizer.add_hook(hooks.GradientClipping(.3))
    optimizer.add_hook(hooks.GradientHardClipping(-.2, .2))
    optimizer.add_hook(hooks.Lasso(.001))
    optimizer.add_hook(hooks.WeightDecay(.01))
    return optimizer
def noisy(model):
    optimizer = optimizers.SGD().setup(model)
    optimizer.add_hook(hooks.GradientNoise(.1))
    return optimizer
'''

DATA = '''
    random = np.random.RandomState(1)
    x, t = random.randn(16, 4).astype('f'), random.randint(0, 2, 16)
'''


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / 'net_to_move.py').write_text(NET)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, 'dont_write_bytecode', True)
    yield tmp_path
    sys.modules.pop('net_to_move', None)


def data():
    values = {'np': np}
    exec(DATA.replace('    ', ''), values)
    return values['x'], values['t']


def trainer(name, folder):
    """Train for 3 epochs of one batch, and write a snapshot."""
    import net_to_move

    np.random.seed(0)
    model = L.Classifier(net_to_move.make())
    optimizer = getattr(net_to_move, name)(model.predictor)
    predictor = optimizer.target
    hooks = [] if predictor is None else [*optimizer._hookable._pre_update_hooks.values()]
    optimizer.setup(model)
    for hook in hooks:
        optimizer.add_hook(hook)
    iterator = chainer.iterators.SerialIterator(
        chainer.datasets.TupleDataset(*data()), 16, shuffle=False)
    result = training.Trainer(training.updaters.StandardUpdater(iterator, optimizer),
                              (3, 'epoch'), folder)
    result.extend(training.extensions.snapshot(filename='snapshot'), trigger=(3, 'epoch'))
    result.run()
    return model, optimizer


def export(monkeypatch, *args):
    monkeypatch.setattr(sys, 'argv', ['chainer_compat', 'export', *args, '--model',
                                      'net_to_move:make', '--input', '2,4'])
    main.main()


def run(folder, command, n_processes):
    path = folder / 'moved' / 'train.py'
    text = path.read_text()
    assert 'import chainer' not in text
    for old, new in (
            ("    raise NotImplementedError('Return your data set here')",
             f'    import numpy as np{DATA}    return torch.utils.data.TensorDataset('
             'torch.tensor(x), torch.tensor(t))'),
            ('BATCH = 32', f'BATCH = {16 // n_processes}')):
        assert text.count(old) == 1
        text = text.replace(old, new)
    path.write_text(text)
    env = {k: v for k, v in os.environ.items() if k not in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK')}
    return subprocess.run([*command, str(path)], cwd=folder, text=True, env={
        **env, 'OMP_NUM_THREADS': '1', 'CHAINERMN_OVERLAY': '0', 'CHAINER_COMPAT': '0'},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


@pytest.mark.parametrize(('name', 'n_processes'), [
    ('adam', 1), ('nesterov', 1), ('sgd', 1), ('adam', 2)])
def test_a_training_goes_on(folder, monkeypatch, capsys, name, n_processes):
    model, optimizer = trainer(name, folder)
    export(monkeypatch, 'snapshot', 'moved', '--training', f'net_to_move:{name}')
    assert 'Wrote moved/train.py' in capsys.readouterr().out
    launcher = ['-m', 'torch.distributed.run', '--nproc-per-node', '2'] if n_processes > 1 else []
    result = run(folder, [sys.executable, *launcher], n_processes)
    assert result.returncode == 0, result.stdout
    assert 'epoch 4: loss' in result.stdout
    assert 'epoch 13: loss' in result.stdout
    x, t = data()
    for _ in range(10):
        optimizer.update(model, x, t)
    module = torch.load(folder / 'moved' / 'module_13.pt', weights_only=False)
    for path, param in model.predictor.namedparams():
        np.testing.assert_allclose(
            module.get_parameter(path[1:].replace('/', '.')).detach().numpy(), param.array,
            2e-5, 2e-6, err_msg=path)


def test_errors(folder, monkeypatch):
    trainer('adam', folder)
    chainer.serializers.save_npz('model', chainer.Sequential(L.Linear(4, 3), L.Linear(3, 2)))
    with pytest.raises(SystemExit, match='model does not contain the state of an optimizer'):
        export(monkeypatch, 'model', 'moved', '--training', 'net_to_move:adam')
    with pytest.raises(SystemExit, match='The hook GradientNoise has no equivalent'):
        export(monkeypatch, 'snapshot', 'moved', '--training', 'net_to_move:noisy')
    with pytest.raises(SystemExit, match='--training must be MODULE:FUNCTION'):
        export(monkeypatch, 'snapshot', 'moved', '--training', 'adam')
    assert not (folder / 'moved').exists()
    export(monkeypatch, 'snapshot', 'moved', '--training', 'net_to_move:adam')
    with pytest.raises(SystemExit, match='FileExistsError'):
        export(monkeypatch, 'snapshot', 'moved', '--training', 'net_to_move:adam')


def test_states_of_several_optimizers(folder):
    import net_to_move

    model = net_to_move.make()
    optimizer = net_to_move.adam(model).setup(model)
    names = [f'{name[1:]}/t' for name, _ in model.namedparams()]
    np.savez('both', **{f'{part}/{name}': 3 for part in ('a', 'b') for name in names})
    with pytest.raises(ConversionError, match='states of several optimizers: a/, b/'):
        load_optimizer('both.npz', optimizer)
