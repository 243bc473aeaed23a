"""Updates of all parameters by an optimizer, compared with Chainer's and PyTorch's.

Run it in an environment with ChainerMN and PyTorch, without which its columns are missing:
``python benchmarks/updates.py [--rounds 15] [--png FILE]``.

One process and one thread; the methods take turns.  "Chainer" calls the rule of each parameter, as
Chainer does without the patches.  "NumPy" updates a block of many parameters at a time, and
"fused" by PyTorch's fused kernels.  "PyTorch" is ``torch.optim`` with ``fused=True``, on parameters
of the same shapes.  The output shows milliseconds of an update (medians), and ratios to Chainer's
within a round.
"""

from __future__ import annotations

import inspect
import statistics
import time
from collections.abc import Callable

import _rounds
import chainer
import numpy as np
from chainer import optimizers

from chainer_compat.pytorch import availability
from chainer_compat.updates import one_pass, optimizer_steps

GOALS = {'160 of 32 x 32': (.06, .5), 'ResNet-50': (.25, .6)}  # with PyTorch, without


def shapes() -> dict[str, list[tuple[int, ...]]]:
    """Return the shapes of the parameters of each model."""
    resnet = chainer.links.ResNet50Layers(pretrained_model=None)
    return {'160 of 32 x 32': [(32, 32)] * 160,
            'ResNet-50': [param.shape for param in resnet.params()]}


def methods(name: str, shapes: list[tuple[int, ...]]) -> dict[str, Callable[[], object]]:
    """Return functions that update."""
    model = chainer.Chain()
    with model.init_scope():
        for i, shape in enumerate(shapes):
            setattr(model, f'p{i}', chainer.Parameter(np.ones(shape, 'f')))
    optimizer = getattr(optimizers, name)().setup(model)
    for param in model.params():
        param.grad = np.full(param.shape, .1, 'f')
    rule = type(optimizer.create_update_rule())

    def begin(optimizer: chainer.Optimizer) -> bool:
        optimizer.reallocate_cleared_grads()
        optimizer.check_nan_in_grads()
        return False

    def as_chainer() -> None:
        core, update, ours = rule.update_core_cpu, one_pass.update, optimizer_steps.begin
        rule.update_core_cpu, optimizer_steps.begin = inspect.unwrap(core), begin
        one_pass.update = lambda params, is_repeated: [param.update() for param in params]
        try:
            optimizer.update()
        finally:
            rule.update_core_cpu, one_pass.update, optimizer_steps.begin = core, update, ours

    def without_torch() -> None:
        with chainer.using_config('fused_updates', False):
            optimizer.update()

    found = {'Chainer': as_chainer, 'NumPy': without_torch}
    if not availability.why_unavailable():
        import torch

        torch.set_num_threads(1)
        params = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
        for param in params:
            param.grad = torch.full(param.shape, .1)
        options = {'momentum': .9} if name == 'MomentumSGD' else {}
        cls = torch.optim.SGD if options else torch.optim.Adam
        found |= {'fused': optimizer.update,
                  'PyTorch': cls(params, lr=1e-3, fused=True, **options).step}
    return found


def main() -> None:
    """Measures and prints."""
    args = _rounds.parser(__doc__, rounds=15).parse_args()
    ratios: dict[str, dict[str, list[float]]] = {'fused': {}, 'NumPy': {}}
    for model, model_shapes in shapes().items():
        for name in ('Adam', 'MomentumSGD'):
            times: dict[str, list[float]] = {}
            functions = methods(name, model_shapes)
            for n in range(2 if args.quick else args.rounds + 1):
                for method, function in functions.items():
                    start = time.perf_counter()
                    function()
                    if n:  # the first round warms up
                        times.setdefault(method, []).append(time.perf_counter() - start)
            row = f'{name}, {model}'
            print(f'{row}: ' + ', '.join(
                f'{method} {statistics.median(each) * 1e3:.2f} ms'
                for method, each in times.items()))
            for method, goal in zip(ratios, GOALS[model], strict=True):
                if method in times:
                    ratios[method][row] = _rounds.ratios(times[method], times['Chainer'])
                    print(f'  {method} over Chainer: '
                          f'{_rounds.times(times[method], times["Chainer"])}; goal {goal:g}')
    print(_rounds.load())
    if args.png:
        _rounds.chart(args.png, 'Update of all parameters', "times Chainer's",
                      {method: rows for method, rows in ratios.items() if rows}, {})


if __name__ == '__main__':
    main()
