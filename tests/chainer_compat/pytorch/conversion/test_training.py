"""``export --training``: the exported script continues training from the snapshot."""

import os
import subprocess
import sys

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
import torch
import trainings_in_torch
from chainer import training
from jobs import run_job

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
            ("    raise NotImplementedError('Return your dataset here')",
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


SHARDED = '''
import sys
import chainer, chainermn, numpy as np, torch
import chainer.functions as F, chainer.links as L
import chainer_compat
from trainings_in_torch import assert_same, train, train_in_torch
comm = chainermn.create_communicator('naive')
np.random.seed(0)
with chainer.using_config('dtype', np.float64):
    model = chainer.Sequential(L.Linear(4, 50), F.tanh, L.Linear(50, 3))
    model(np.ones((1, 4)))
optimizer = chainermn.create_multi_node_optimizer(
    chainer.optimizers.Adam(.01, eps=1e-3), comm, shard_states=True).setup(model)
random = np.random.RandomState(comm.rank)
data = [(random.randn(4, 4), random.randint(0, 3, 4)) for _ in range(20)]
train(optimizer, data[:8])
sizes = [param.update_rule.state['m'].size for param in model.params()]
assert comm.allreduce_obj(sum(sizes)) == sum(param.size for param in model.params())
module = chainer_compat.to_torch(model, data[0][0], train=True)
new = chainer_compat.to_torch_optimizer(optimizer, module)
checkpointer = chainermn.create_multi_node_checkpointer('move', comm, path='saves')
checkpointer.save({'model': model, 'optimizer': optimizer}, 8)
states = optimizer.gather_states()
if comm.rank == 0:
    np.savez('states', **{path + name: array for path, each in states.items()
                          for name, array in each.items()})
every = comm.allgather_obj(data)
train(optimizer, data[8:])
train_in_torch(module, new, [(np.concatenate([x for x, _ in batch]), np.concatenate(
    [t for _, t in batch])) for batch in list(zip(*every))[8:]])
assert_same(model, module, 1e-10)
try:
    chainer_compat.load_torch_optimizer(optimizer, new, module)
except chainer_compat.ConversionError as error:
    print(error)
'''


def test_sharded_states(folder):
    job = run_job(folder, SHARDED, PYTHONPATH=os.path.dirname(trainings_in_torch.__file__))
    assert job.returncode == 0, job.stdout
    assert job.stdout.count('is a shard, because the optimizer has shard_states=True and was') == 2
    with chainer.using_config('dtype', np.float64):
        model = chainer.Sequential(L.Linear(4, 50), F.tanh, L.Linear(50, 3))
    optimizer = chainer.optimizers.Adam().setup(model)
    position = load_optimizer(folder / 'saves', optimizer)
    assert position == (None, None)
    with np.load(folder / 'states.npz') as states:
        assert len(states) == 8
        for path, param in model.namedparams():
            assert param.update_rule.t == optimizer.t == 7  # the first update broadcasts
            for name, array in param.update_rule.state.items():
                np.testing.assert_array_equal(array, states[path + name])
    file = min((folder / 'saves').glob('move.0.*'))
    with pytest.raises(ConversionError, match='only one shard of the optimizer states'):
        load_optimizer(file, chainer.optimizers.Adam().setup(model))


def test_states_of_several_optimizers(folder):
    import net_to_move

    model = net_to_move.make()
    optimizer = net_to_move.adam(model).setup(model)
    names = [f'{name[1:]}/t' for name, _ in model.namedparams()]
    np.savez('both', **{f'{part}/{name}': 3 for part in ('a', 'b') for name in names})
    with pytest.raises(ConversionError, match='states of several optimizers: a/, b/'):
        load_optimizer('both.npz', optimizer)
