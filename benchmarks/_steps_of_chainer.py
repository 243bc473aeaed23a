"""Training steps in Chainer; _steps_of_torch.py has the same steps in PyTorch."""

import importlib
import pathlib
import sys
from collections.abc import Callable

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np

import chainermn

EXAMPLES = pathlib.Path(__file__).parents[1] / 'examples'
Step = Callable[[], object]
Wrap = Callable[[chainer.Optimizer], chainer.Optimizer]


def wrapped(comm: 'chainermn.CommunicatorBase | None', overlap: bool) -> Wrap:
    """Return a function that makes an optimizer multi-node if there is a communicator."""
    if comm is None:
        return lambda optimizer: optimizer
    return lambda optimizer: chainermn.create_multi_node_optimizer(
        optimizer, comm, overlap=overlap)


def _of_example(folder: str, module: str):
    """Import a module of an example, and allow later imports of modules with the same name."""
    before = set(sys.modules)
    sys.path.insert(0, str(EXAMPLES / folder))
    try:
        return importlib.import_module(module)
    finally:
        sys.path.pop(0)
        for name in {*sys.modules} - before:
            if str(getattr(sys.modules[name], '__file__', '')).startswith(str(EXAMPLES)):
                del sys.modules[name]


def _classifying(network: chainer.Link, optimizer: chainer.Optimizer, shape: tuple[int, ...],
                 n_classes: int) -> Step:
    random = np.random.RandomState(0)
    x = random.rand(*shape).astype('f')
    t = random.randint(n_classes, size=len(x)).astype('i')
    model = L.Classifier(network)
    model.compute_accuracy = False
    optimizer.setup(model)
    return lambda: optimizer.update(model, x, t)


def cnn(wrap: Wrap) -> Step:
    layers: list = []
    for n_inputs in (3, 32, 32, 32, 32, 32):
        layers += [L.Convolution2D(n_inputs, 32, 3, pad=1), F.relu]
    network = chainer.Sequential(*layers, lambda x: F.mean(x, (2, 3)), L.Linear(32, 10))
    return _classifying(network, wrap(chainer.optimizers.MomentumSGD()), (16, 3, 32, 32), 10)


def resnet50(wrap: Wrap) -> Step:
    network = _of_example('imagenet', 'models').ResNet50(1000)
    return _classifying(network, wrap(chainer.optimizers.MomentumSGD()), (4, 3, 224, 224), 1000)


def perceptron(wrap: Wrap) -> Step:
    network = _of_example('mnist', 'train_mnist').MLP(1000)
    return _classifying(network, wrap(chainer.optimizers.Adam()), (100, 784), 10)


def lstm(wrap: Wrap) -> Step:
    class Network(chainer.Chain):
        def __init__(self):
            super().__init__()
            with self.init_scope():
                self.rnn = L.NStepLSTM(1, 128, 256, dropout=0)
                self.fc = L.Linear(256, 10)

        def forward(self, x):
            h, _, _ = self.rnn(None, None, list(x))
            return self.fc(h[0])

    return _classifying(Network(), wrap(chainer.optimizers.MomentumSGD()), (16, 32, 128), 10)


def dcgan(wrap: Wrap) -> Step:
    net, updater = _of_example('dcgan', 'net'), _of_example('dcgan', 'updater')
    generator, discriminator = net.Generator(100, 3, 32, 64), net.Discriminator(3, 64)
    real = np.random.RandomState(0).uniform(-1, 1, (32, 3, 32, 32)).astype('f')
    optimizers = {}
    for name, model in (('gen', generator), ('dis', discriminator)):
        optimizers[name] = wrap(chainer.optimizers.Adam(alpha=2e-4, beta1=.5))
        optimizers[name].setup(model)
    iterator = chainer.iterators.SerialIterator(real, len(real))
    return updater.DCGANUpdater(iterator, optimizers).update


def seq2seq(wrap: Wrap) -> Step:
    model = _of_example('seq2seq', 'seq2seq').Translator(
        1, range(5000), {**dict.fromkeys(range(5000)), _of_example('seq2seq', 'data').END: 0}, 256)
    random = np.random.RandomState(0)
    xs, ys = ([random.randint(1, 5000, n).astype('i') for n in random.randint(10, 21, 32)]
              for _ in range(2))
    optimizer = wrap(chainer.optimizers.Adam())
    optimizer.setup(model)
    optimizer.add_hook(chainer.optimizer_hooks.GradientClipping(5))
    return lambda: optimizer.update(model, xs, ys)


STEPS: dict[str, Callable[[Wrap], Step]] = {
    'CNN': cnn, 'ResNet-50': resnet50, 'perceptron': perceptron, 'LSTM': lstm, 'DCGAN': dcgan,
    'seq2seq': seq2seq}
