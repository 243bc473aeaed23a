"""Models of Chainer's users give the same outputs and gradients in PyTorch, and train equally."""

import copy
import io

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
import pytest
import torch
import vision_models
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


@pytest.mark.slow
@pytest.mark.parametrize('mode', ['inference', 'training'])
def test_resnet50(mode):
    """``vision_models.py`` converts the others, with larger images."""
    found = vision_models.convert('ResNet50Layers', mode, size=64)
    assert max(found[each] for each in ('functions', 'outputs', 'gradients')) < 1e-9


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


def test_renormalization_continues_after_loading():
    model = chainer.Sequential(L.Linear(4, 3), L.BatchRenormalization(3, rmax=1.5, dmax=.5))
    module = saved_and_loaded(chainer_compat.to_torch(model, draw(6, 4), train=True))
    for _ in range(3):
        expected = model(draw(6, 4)).array
        np.testing.assert_allclose(module(torch.from_numpy(draw(6, 4))).detach(), expected,
                                   rtol=1e-3, atol=1e-5)
    with chainer.using_config('train', False):
        np.testing.assert_allclose(module.eval()(torch.from_numpy(draw(6, 4))).detach(),
                                   model(draw(6, 4)).array, rtol=1e-3, atol=1e-5)


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
        with pytest.raises(AssertionError, match='something else in inference'):
            module(x)


def test_random_numbers_of_the_program():
    """As in dropout with one mask for all time steps."""
    def run(self, x, mask):
        return F.gaussian(F.dropout(self.fc(x), mask=mask), x, eps=2 * mask)

    model, mask = Net(run, fc=L.Linear(5, 5)), (draw(4, 5) > 0).astype('f')
    module = chainer_compat.to_torch(model, draw(4, 5), mask, train=True)
    np.testing.assert_allclose(
        module(torch.from_numpy(draw(4, 5)), torch.from_numpy(1 - mask)).detach(),
        model(draw(4, 5), 1 - mask).array, rtol=1e-5, atol=1e-6)


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


def test_copies_and_means():
    def run(self, x, lengths):
        mask = np.array(x) != 0
        total = F.sum(self.embed(x) * np.asarray(mask, 'f')[:, :, None], axis=1)
        return F.sum(total / lengths[:, None].astype('f')) / len(x), np.array([row[0] for row in x])

    model = Net(run, embed=L.EmbedID(9, 4))
    lengths = np.array([4, 2, 1], 'i')
    module = chainer_compat.to_torch(model, np.ones((3, 4), 'i'), lengths)
    x = np.array([[1, 0, 2, 5], [0, 0, 1, 2], [3, 8, 0, 0]], 'i')
    for actual, expected in zip(module(torch.from_numpy(x), torch.from_numpy(lengths)),
                                model(x, lengths), strict=True):
        np.testing.assert_allclose(actual.detach(), getattr(expected, 'array', expected), rtol=1e-5)


def test_half_precision_inside():
    """Outputs in float32 are rounded as much as the float16 functions before them."""
    with chainer.using_config('dtype', np.dtype('float16')):
        model = Net(lambda self, x: F.cast(F.tanh(self.fc(F.cast(x, 'float16'))), 'float32'),
                    fc=L.Linear(50, 40))
    module = chainer_compat.to_torch(model, draw(4, 50))
    assert module.state_dict()['fc.W'].dtype == torch.float16


def test_conditions_of_distributions():
    model = Net(lambda self, x: chainer.distributions.Uniform(
        low=np.zeros(3, 'f'), high=np.ones(3, 'f')).log_prob(chainer.Variable(x)))
    module = chainer_compat.to_torch(model, np.full((2, 3), .5, 'f'))
    assert module(torch.tensor([[.5, 2., -1.]])).tolist() == [[0., -np.inf, -np.inf]]


def test_a_model_of_chainer_4():
    class Model(chainer.Chain):
        def __call__(self, x):
            return F.tanh(self.fc(x))

    model = Model()
    model.add_link('fc', L.Linear(4, 3))
    module = chainer_compat.to_torch(model, draw(2, 4))
    np.testing.assert_allclose(module(torch.from_numpy(draw(5, 4))).detach(),
                               model(draw(5, 4)).array, rtol=1e-5)


def test_inference_after_training_mode():
    model, (x, t) = mlp()
    module = chainer_compat.to_torch(model, x, t, train=True).eval()
    with chainer.using_config('train', False):
        expected = model(x, t)
    np.testing.assert_allclose(module(torch.from_numpy(x), torch.from_numpy(t)).detach(),
                               expected.array, rtol=1e-5)


def test_a_module_for_inference_cannot_be_trained():
    model, inputs = mlp()
    module = chainer_compat.to_torch(model, *inputs).train()
    with pytest.raises(AssertionError, match='converted for inference'):
        module(*map(torch.from_numpy, inputs))


def test_batch_sizes_and_shapes():
    model, (x, t) = mlp()
    for example in x, x[:1]:
        module = chainer_compat.to_torch(model.predictor, example)
        for n in 1, 2, 9:
            assert module(torch.zeros(n, 2, 4)).shape == (n, 3)
    with pytest.raises(AssertionError, match=r"must have the shape \('batch', 2, 4\)"):
        module(torch.zeros(2, 4, 2))
    fixed = chainer_compat.to_torch(model, x, t, dynamic_batch=False)
    with pytest.raises(AssertionError, match='must have the shape'):
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


def test_shared_parameters_stay_shared():
    link = L.Linear(3, 3)
    model = chainer.Sequential(link, chainer.functions.tanh, link)
    module = chainer_compat.to_torch(model, draw(2, 3))
    state = module.state_dict(keep_vars=True)
    assert len(list(module.parameters())) == 2
    assert {name.rpartition('.')[2] for name in state} == {'W', 'b'}
