"""Updates of all parameters by an optimizer, compared with Chainer's and PyTorch's.

Run it in an environment with ChainerMN and PyTorch (without PyTorch, its columns are missing):
``python benchmarks/updates.py [--rounds 15] [--svg FILE]``.

There is one process with one thread; the methods take turns. ChainerMN 7 calls the rule of each
parameter, like Chainer without patches. ChainerMN 8 updates all parameters with PyTorch's fused
kernels; without PyTorch, it updates a block of many parameters at a time. PyTorch runs
``torch.optim`` with ``fused=True``, on parameters with the same shapes. The output shows the
milliseconds of an update (medians), and ratios within a round.
"""

from __future__ import annotations

import inspect
import statistics
import time
from collections.abc import Callable

import _rounds
import chainer
import numpy as np
from _rounds import TORCH, V7, V8, WITHOUT_TORCH
from chainer import optimizers

from chainer_compat.pytorch import availability
from chainer_compat.updates import one_pass, optimizer_steps

SMALL = 'small (160 of 32 x 32)'
GOALS = {SMALL: (.06, .5), 'ResNet-50': (.25, .6)}  # with PyTorch, without


def shapes() -> dict[str, list[tuple[int, ...]]]:
    """Return the shapes of the parameters of each model."""
    resnet = chainer.links.ResNet50Layers(pretrained_model=None)
    return {SMALL: [(32, 32)] * 160,
            'ResNet-50': [param.shape for param in resnet.params()]}


def methods(name: str, shapes: list[tuple[int, ...]]) -> dict[str, Callable[[], object]]:
    """Return a function that updates all parameters, for each method."""
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
        core, update, start = rule.update_core_cpu, one_pass.update, optimizer_steps.begin
        rule.update_core_cpu, optimizer_steps.begin = inspect.unwrap(core), begin
        one_pass.update = lambda params, is_repeated: [param.update() for param in params]
        try:
            optimizer.update()
        finally:
            rule.update_core_cpu, one_pass.update, optimizer_steps.begin = core, update, start

    def without_torch() -> None:
        with chainer.using_config('fused_updates', False):
            optimizer.update()

    found = {V7: as_chainer, WITHOUT_TORCH: without_torch}
    if not availability.why_unavailable():
        import torch

        torch.set_num_threads(1)
        params = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
        for param in params:
            param.grad = torch.full(param.shape, .1)
        options = {'momentum': .9} if name == 'MomentumSGD' else {}
        cls = torch.optim.SGD if options else torch.optim.Adam
        found |= {V8: optimizer.update,
                  TORCH: cls(params, lr=1e-3, fused=True, **options).step}
    return found


def main() -> None:
    """Run the benchmark and print the results."""
    args = _rounds.parser(__doc__, rounds=15).parse_args()
    drawn: dict[str, dict[str, list[float]]] = {}
    rows: list[list] = []
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
            rows.append([row, *(statistics.median(times[method]) * 1e3
                               for method in _rounds.in_order(times))])
            for method, goal in zip((V8, WITHOUT_TORCH), GOALS[model], strict=True):
                if method in times:
                    print(f'{row}: {method} over {V7}: {_rounds.times(times[method], times[V7])}; '
                          f'goal {goal:g}')
            for method, each in times.items():
                drawn.setdefault(method, {})[row] = [1e3 * seconds for seconds in each]
    _rounds.table(['update', *(f'{method}, ms' for method in _rounds.in_order(drawn))], rows)
    print(_rounds.load())
    if args.svg:
        _rounds.chart(args.svg, 'Update of all parameters', 'time, ms', drawn, is_log=True)


if __name__ == '__main__':
    main()
