"""Training steps in PyTorch; _steps_of_chainer.py has the same steps in Chainer."""

from collections.abc import Callable

import numpy as np
import torch
from torch import nn

Step = Callable[[], object]
Wrap = Callable[[nn.Module], nn.Module]


#: Options of optimizers. By default, ``torch.optim`` is not fused.
OPTIMIZERS: dict[str, bool] = {}


def wrapped(is_parallel: bool, overlap: bool, kind: str = 'PyTorch') -> Wrap:
    """Return a function that prepares a module; with ``is_parallel``, DDP averages its gradients.

    ``overlap`` is ignored, because DDP always overlaps communication with the backward pass.
    """
    is_fused = 'fused' in kind or 'compiled' in kind
    if is_fused:
        OPTIMIZERS['fused'] = True

    def wrap(module: nn.Module) -> nn.Module:
        if 'autocast' in kind:
            module.forward = torch.autocast('cpu', torch.bfloat16)(module.forward)
        if is_fused:
            module = module.to(memory_format=torch.channels_last)
        if 'compiled' in kind:
            module.compile()
        if is_parallel:
            return nn.parallel.DistributedDataParallel(module, broadcast_buffers=False)
        return module

    return wrap


def _classifying(module: nn.Module, optimizer: Callable, shape: tuple[int, ...], n_classes: int,
                 **options: float) -> Step:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(shape, generator=generator)
    t = torch.randint(n_classes, shape[:1], generator=generator)
    if OPTIMIZERS and x.ndim == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    made = optimizer(module.parameters(), **options, **OPTIMIZERS)

    def step() -> None:
        made.zero_grad()
        nn.functional.cross_entropy(module(x), t).backward()
        made.step()

    return step


def cnn(wrap: Wrap) -> Step:
    layers: list[nn.Module] = []
    for n_inputs in (3, 32, 32, 32, 32, 32):
        layers += [nn.Conv2d(n_inputs, 32, 3, padding=1), nn.ReLU()]
    module = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    return _classifying(wrap(module), torch.optim.SGD, (16, 3, 32, 32), 10, lr=.01, momentum=.9)


class Bottleneck(nn.Module):
    """A block of ResNet-50, with the stride in the 3x3 convolution, as ``examples/imagenet``."""

    def __init__(self, inputs: int, width: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, padding=1, bias=False), nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs))
        self.short = nn.Identity() if inputs == outputs else nn.Sequential(
            nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.layers(x) + self.short(x))


def resnet50_module() -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(),
                               nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for n_blocks, width, first in ((3, 64, 1), (4, 128, 2), (6, 256, 2), (3, 512, 2)):
        for n in range(n_blocks):
            layers.append(Bottleneck(inputs, width, 4 * width, 1 if n else first))
            inputs = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000))


def resnet50(wrap: Wrap) -> Step:
    return _classifying(wrap(resnet50_module()), torch.optim.SGD, (4, 3, 224, 224), 1000, lr=.01,
                        momentum=.9)


def perceptron(wrap: Wrap) -> Step:
    module = nn.Sequential(nn.Linear(784, 1000), nn.ReLU(), nn.Linear(1000, 1000), nn.ReLU(),
                           nn.Linear(1000, 10))
    return _classifying(wrap(module), torch.optim.Adam, (100, 784), 10)


def lstm(wrap: Wrap) -> Step:
    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(128, 256, batch_first=True)
            self.fc = nn.Linear(256, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(self.rnn(x)[1][0][0])

    return _classifying(wrap(Network()), torch.optim.SGD, (16, 32, 128), 10, lr=.01, momentum=.9)


def dcgan(wrap: Wrap) -> Step:
    width = 64
    generator = wrap(nn.Sequential(
        nn.Linear(100, 128 * width, bias=False), nn.Unflatten(1, (2 * width, 8, 8)),
        nn.BatchNorm2d(2 * width), nn.ReLU(),
        nn.ConvTranspose2d(2 * width, width, 4, 2, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
        nn.ConvTranspose2d(width, 3, 4, 2, 1), nn.Tanh()))
    discriminator = wrap(nn.Sequential(
        nn.Conv2d(3, width, 4, 2, 1), nn.LeakyReLU(.2),
        nn.Conv2d(width, 2 * width, 4, 2, 1, bias=False), nn.BatchNorm2d(2 * width),
        nn.LeakyReLU(.2), nn.Flatten(), nn.Linear(128 * width, 1)))
    of_generator, of_discriminator = (
        torch.optim.Adam(each.parameters(), lr=2e-4, betas=(.5, .999), **OPTIMIZERS)
        for each in (generator, discriminator))
    real = torch.rand(32, 3, 32, 32) * 2 - 1
    softplus = nn.functional.softplus

    def step() -> None:
        drawn = generator(torch.rand(32, 100) * 2 - 1)
        of_discriminator.zero_grad()
        (softplus(-discriminator(real)).mean()
         + softplus(discriminator(drawn.detach())).mean()).backward()
        of_discriminator.step()
        of_generator.zero_grad()
        softplus(-discriminator(drawn)).mean().backward()
        of_generator.step()

    return step


def seq2seq(wrap: Wrap) -> Step:
    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.source, self.target = nn.Embedding(5000, 256), nn.Embedding(5001, 256)
            self.encoder = nn.LSTM(256, 256)
            self.decoder = nn.LSTM(256, 256)
            self.fc = nn.Linear(256, 5001)

        def forward(self, xs: list[torch.Tensor], ys: list[torch.Tensor]) -> torch.Tensor:
            def packed(embed: nn.Embedding, sentences: list[torch.Tensor]
                       ) -> nn.utils.rnn.PackedSequence:
                together = nn.utils.rnn.pack_sequence(sentences, enforce_sorted=False)
                return together._replace(data=embed(together.data))

            _, states = self.encoder(packed(self.source, xs))
            end = torch.zeros(1, dtype=torch.int64)
            outputs, _ = self.decoder(packed(self.target, [torch.cat([end, y]) for y in ys]),
                                      states)
            words = nn.utils.rnn.pack_sequence([torch.cat([y, end]) for y in ys],
                                               enforce_sorted=False)
            return nn.functional.cross_entropy(self.fc(outputs.data), words.data)

    random = np.random.RandomState(0)  # for the same number of words as in Chainer
    xs, ys = ([torch.from_numpy(random.randint(1, 5000, n)) for n in random.randint(10, 21, 32)]
              for _ in range(2))
    module = wrap(Network())
    optimizer = torch.optim.Adam(module.parameters(), **OPTIMIZERS)

    def step() -> None:
        optimizer.zero_grad()
        module(xs, ys).backward()
        nn.utils.clip_grad_norm_(module.parameters(), 5)
        optimizer.step()

    return step


STEPS: dict[str, Callable[[Wrap], Step]] = {
    'CNN': cnn, 'ResNet-50': resnet50, 'perceptron': perceptron, 'LSTM': lstm, 'DCGAN': dcgan,
    'seq2seq': seq2seq}
