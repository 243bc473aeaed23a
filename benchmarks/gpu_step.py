"""On one GPU: a training step of ResNet-50 in Chainer and in PyTorch, and updates of parameters.

``python benchmarks/gpu_step.py [--batch 64] [--rounds 3]``; on a machine without a network, use
``tests/gpu/offline.py``. The benchmark needs CuPy. Without a PyTorch build for GPUs, only Chainer
is measured.

Steps: images of 224 x 224 pixels, MomentumSGD. The kinds of steps take turns, each in its own
process. ChainerMN 8 computes with PyTorch's kernels (``CHAINER_USE_TORCH=always``). "Without
PyTorch", it uses CuPy's kernels, without the convolutions of cuDNN. "Host" is the time until
``update`` returns, before the GPU has finished.

Updates: the time with one launch for all parameters, compared with a launch for each parameter.
"""

import itertools
import json
import os
import pathlib
import runpy
import statistics
import subprocess
import sys
import time

import _rounds
from _rounds import TORCH, V8, WITHOUT_TORCH
from gpu import why_not

MODELS = pathlib.Path(__file__).parents[1] / 'examples' / 'imagenet' / 'models.py'
#: For each kind of step: whether Chainer computes it, and the dtype of matrix multiplications.
KINDS = {
    WITHOUT_TORCH: (True, ''),
    **{f'{name}, {dtype}': (name == V8, dtype)
       for dtype in ('float32', 'tf32', 'bfloat16') for name in (V8, TORCH)},
}
SHAPES = {'small (160 of 32 x 32)': lambda: [(32, 32)] * 160,
          'ResNet-50': lambda: [param.shape for param in _resnet50().params()]}


def _resnet50():
    return runpy.run_path(str(MODELS))['ResNet50'](1000)


# --- steps ---------------------------------------------------------------------------------------


def step_of_chainer(batch: int, side: int, dtype: str):
    """Return a function that makes a step."""
    import chainer
    import cupy

    chainer.global_config.use_torch = 'always' if dtype else 'never'
    chainer.global_config.torch_compute_dtype = None if dtype in ('', 'float32') else dtype
    model = chainer.links.Classifier(_resnet50())
    model.compute_accuracy = False
    model.to_device('@cupy:0')
    optimizer = chainer.optimizers.MomentumSGD(1e-9).setup(model)
    x = cupy.random.standard_normal((batch, 3, side, side), cupy.float32)
    t = cupy.arange(batch, dtype='i')
    return lambda: optimizer.update(model, x, t)


def step_of_torch(batch: int, side: int, dtype: str):
    """Return a function that makes a step."""
    import _steps_of_torch
    import torch

    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = dtype == 'tf32'
    module = _steps_of_torch.resnet50_module().cuda()
    optimizer = torch.optim.SGD(module.parameters(), 1e-9, momentum=.9)
    x, t = torch.randn(batch, 3, side, side).cuda(), torch.arange(batch).cuda()
    autocast = torch.autocast('cuda', torch.bfloat16, enabled=dtype == 'bfloat16')

    def step() -> None:
        optimizer.zero_grad()
        with autocast:
            loss = torch.nn.functional.cross_entropy(module(x), t)
        loss.backward()
        optimizer.step()

    return step


def medians(call, n: int) -> tuple[float, float]:
    """Return the milliseconds of a call, in total and on the host."""
    import cupy

    device, steps, hosts = cupy.cuda.Device(), [], []
    for k in range(n + 3):
        device.synchronize()
        start = time.perf_counter()
        call()
        host = time.perf_counter() - start
        device.synchronize()
        if k >= 3:  # the first calls compile kernels
            steps.append((time.perf_counter() - start) * 1e3)
            hosts.append(host * 1e3)
    return statistics.median(steps), statistics.median(hosts)


def steps(args) -> None:
    """Print the times of steps, and the ratios to PyTorch."""
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    for _, kind in itertools.product(range(args.rounds), KINDS):
        done = subprocess.run(
            [sys.executable, '-W', 'ignore', __file__, '--work', kind, *sys.argv[1:]],
            stdout=subprocess.PIPE, text=True, check=True)
        if done.stdout:
            found[kind].append(json.loads(done.stdout))
    rows = []
    for kind, times in found.items():
        if times:
            step, host = (statistics.median(column) for column in zip(*times, strict=True))
            rows.append([kind, step, host, args.batch / step * 1e3])
    _rounds.table(['step', 'time, ms', 'host, ms', 'images per second'], rows,
                  f'ResNet-50, {args.batch} images')
    for kind, times in found.items():
        other = kind.replace(V8, TORCH)
        if times and other != kind and found.get(other):
            print(f'{kind} over {other}: ' + _rounds.times(
                [step for step, _ in times], [step for step, _ in found[other]]))


def work(kind: str, args) -> None:
    """In the process of a kind: print the times of a round; nothing if PyTorch cannot use GPUs."""
    is_chainer, dtype = KINDS[kind]
    if dtype:
        try:
            import torch
        except ImportError:
            return
        if not torch.cuda.is_available():
            return
    make = step_of_chainer if is_chainer else step_of_torch
    step = make(args.batch, 32 if args.quick else 224, dtype)
    print(json.dumps(medians(step, 1 if args.quick else 6)))


# --- updates -------------------------------------------------------------------------------------


def optimizer_of(shapes, name: str, with_hooks: bool, separately: bool):
    """Return an optimizer of parameters with gradients."""
    import chainer
    import cupy
    from chainer import optimizer_hooks

    model = chainer.Link()
    with model.init_scope():
        for i, shape in enumerate(shapes):
            setattr(model, f'p{i}', chainer.Parameter(cupy.ones(shape, 'f')))
    optimizer = getattr(chainer.optimizers, name)().setup(model)
    if with_hooks:
        optimizer.add_hook(_as_in_chainer(optimizer_hooks.WeightDecay(1e-4), separately))
        optimizer.add_hook(_as_in_chainer(optimizer_hooks.GradientClipping(1.), separately))
    for param in model.params():
        param.grad = cupy.ones_like(param.array)
        if separately:
            param.update_rule.unknown = None  # rules with unknown attributes are called separately
    return optimizer


def _as_in_chainer(hook, separately: bool):
    """Return a hook that is called as in Chainer, for each parameter, if ``separately``."""
    if not separately:
        return hook
    call = getattr(type(hook).__call__, '__wrapped__', type(hook).__call__)
    return type(type(hook).__name__, (type(hook),), {'__call__': call})(
        *vars(hook).values())


def updates(args) -> None:
    """Print times of updates."""
    n = 2 if args.quick else 15
    rows = []
    for (model, shapes), name, with_hooks in itertools.product(
            [*SHAPES.items()][:1 if args.quick else None], ('MomentumSGD', 'Adam'), (False, True)):
        times = [medians(optimizer_of(shapes(), name, with_hooks, separately).update, n)[0]
                 for separately in (False, True)]
        row = f'{model}, {name}{", decay, clipping" * with_hooks}'
        rows.append([row, *times, times[0] / times[1]])
    _rounds.table(['update', 'one launch, ms', 'a launch per parameter, ms', 'ratio'], rows)


def main() -> None:
    """Measure steps, then updates."""
    parser = _rounds.parser(__doc__, rounds=3)
    parser.add_argument('--batch', type=int, default=64, help='default: %(default)s')
    args = parser.parse_args()
    if reason := why_not():
        sys.exit(f'benchmarks/gpu_step.py {reason}')
    os.environ.setdefault('OMP_NUM_THREADS', '1')
    if args.quick:
        args.rounds, args.batch = 1, 1
    if args.work:
        work(args.work, args)
        return
    import cupy

    name = cupy.cuda.runtime.getDeviceProperties(0)['name'].decode()
    print(f'{name}; CuPy {cupy.__version__}, CUDA {cupy.cuda.runtime.runtimeGetVersion()}\n')
    steps(args)
    updates(args)


if __name__ == '__main__':
    main()
