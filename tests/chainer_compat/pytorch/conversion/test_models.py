"""Models of Chainer's users give the same outputs and gradients in PyTorch, and train equally."""

import copy
import io
import pickle

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
import torch
from models_to_convert import DYNAMIC, MODELS, Net, draw, make, mlp

import chainer_compat

pytestmark = pytest.mark.mpi_skip


@pytest.mark.parametrize('train', [False, True])
@pytest.mark.parametrize('name', MODELS)
def test_models(name, train):
    model, inputs = make(name)
    module = chainer_compat.to_torch(model, *inputs, train=train,
                                     dynamic_batch=True if name in DYNAMIC else None)
    found = chainer_compat.compare(model, module, *inputs)
    assert found.first_difference is None, found
    assert max(found.functions.values()) < 2e-5
    assert max(found.outputs.values()) < 1e-5
    assert max(found.gradients.values()) < 1e-3
    assert set(dict(module.named_parameters())) == {
        path.lstrip('/').replace('/', '.') for path, _ in model.namedparams()}


@pytest.mark.parametrize('kind', ['SGD', 'Adam'])
def test_hundred_steps(kind):
    model, (x, t) = mlp()
    model.predictor.function = lambda self, x: self.l2(chainer.functions.relu(self.bn(self.l1(x))))
    module = chainer_compat.to_torch(model, x, t, train=True)
    ours = getattr(chainer.optimizers, kind)().setup(model)
    theirs = {'SGD': lambda p: torch.optim.SGD(p, lr=.01),
              'Adam': lambda p: torch.optim.Adam(p, lr=.001)}[kind](module.parameters())
    random = np.random.RandomState(1)
    for _ in range(100):
        x = random.standard_normal(x.shape).astype('f')
        t = random.randint(0, 3, len(t)).astype('i')
        ours.update(model, x, t)
        theirs.zero_grad()
        loss = module(torch.from_numpy(x), torch.from_numpy(t))
        loss.backward()
        theirs.step()
        assert abs(float(loss.detach()) - float(model.loss.array)) < 1e-3
    np.testing.assert_allclose(module.state_dict()['predictor.bn.avg_var'],
                               model.predictor.bn.avg_var, rtol=1e-3)


def saved_and_loaded(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize('load', [lambda module: module, saved_and_loaded, copy.deepcopy])
def test_modes(load):
    """Modes still select dropout and statistics if the module was saved, loaded or copied."""
    model, inputs = mlp()
    module = load(chainer_compat.to_torch(model, *inputs, train=True))
    tensors = [torch.from_numpy(x) for x in inputs]
    assert module(*tensors) != module(*tensors)
    module.eval()
    for other in module, load(chainer_compat.to_torch(model, *inputs)):
        assert other(*tensors) == other(*tensors)
    with pytest.raises(AssertionError, match='converted for inference'):
        other.train()(*tensors)


def test_dropout_that_the_model_chooses_for_inference():
    def run(self, x):
        with chainer.using_config('train', True):
            return F.dropout(x)

    x = torch.ones(9, 9)
    module = chainer_compat.to_torch(Net(run), draw(9, 9))
    assert not torch.equal(module(x), module(x))
    for model in Net(run), Net(lambda self, x: self.fc(x, chainer.config.train),
                               fc=L.SimplifiedDropconnect(9, 9)):
        module = chainer_compat.to_torch(model, draw(9, 9), train=True).eval()
        with pytest.raises(AssertionError, match='behaves differently in inference'):
            module(x)


@pytest.mark.parametrize('noise', [
    lambda h: h + .2 * np.random.randn(*h.shape).astype('f'),
    lambda h: h + np.random.normal(0, .2, h.shape).astype('f'),
    lambda h: h * np.random.uniform(.8, 1.2, size=h.shape).astype('f'),
    lambda h: F.gumbel_softmax(h, .5),
    lambda h: chainer.distributions.Normal(h, h * 0 + .2).sample(),
])
def test_noise(noise):
    module = chainer_compat.to_torch(Net(lambda self, x: noise(x)), draw(50, 40))
    x = torch.from_numpy(draw(50, 40))
    numbers = [(module(x) - x).std().item() for _ in range(3)]
    expected = (noise(chainer.Variable(draw(50, 40))).array - draw(50, 40)).std()
    np.testing.assert_allclose(numbers, expected, rtol=.1)
    assert len(set(numbers)) == 3


def test_batch_sizes_and_shapes():
    model, (x, t) = mlp()
    for example in x, x[:1]:
        module = chainer_compat.to_torch(model.predictor, example)
        for n in 1, 2, 9:
            assert module(torch.zeros(n, 2, 4)).shape == (n, 3)
    for each in module, pickle.loads(pickle.dumps(module)):
        with pytest.raises(AssertionError, match=(
                r'^Input x0 must have the shape \(batch, 2, 4\), as in the conversion, not '
                r'torch\.Size\(\[3, 4, 2\]\)\.$')):
            each(torch.zeros(3, 4, 2))
        for wrong in draw(3, 2, 4), draw(3, 2, 4).astype('d'), draw(3, 2, 4).tolist():
            with pytest.raises(AssertionError, match=(
                    r'^Input x0 must be a torch\.Tensor\. .* torch\.from_numpy\(x0\)\.$')):
                each(wrong)
    fixed = chainer_compat.to_torch(model, x, t, dynamic_batch=False)
    with pytest.raises(AssertionError, match=r'\(6, 2, 4\).*, not .* with dynamic_batch=True'):
        fixed(torch.zeros(2, 2, 4), torch.zeros(2, dtype=torch.int32))


def test_the_model_is_not_changed():
    model, (x, t) = mlp()
    with chainer.using_config('train', False):
        model(x, t)
    before = {path: p.array.copy() for path, p in model.namedparams()}
    mean = model.predictor.bn.avg_mean.copy()
    loss, random = model.loss, np.random.get_state()[1].copy()
    chainer_compat.to_torch(model, x, t, train=True)
    assert model.loss is loss
    assert all((p.array == before[path]).all() for path, p in model.namedparams())
    assert (model.predictor.bn.avg_mean == mean).all()
    assert (np.random.get_state()[1] == random).all()
