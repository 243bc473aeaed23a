"""Move training to PyTorch: a module, its optimizer, and a script that continues training."""

from __future__ import annotations

import contextlib
import inspect
import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import chainer
import torch
from chainer import optimizer_hooks

from chainer_compat.pytorch.conversion import optimizers, torch_optimizers
from chainer_compat.pytorch.conversion.errors import ConversionError
from chainer_compat.pytorch.conversion.snapshots import files_of, read
from chainer_compat.pytorch.conversion.tracked_array import Array
from chainer_compat.updates.sharded_states import ENTRY, merge


class TrainingPosition(NamedTuple):
    """The position at which training stopped; ``None`` if the snapshot does not contain it."""

    iteration: int | None
    epoch: int | None


def load_optimizer(path: str | Path, optimizer: Any) -> TrainingPosition:
    """Load the state of an optimizer from the snapshot of a trainer.

    Args:
        path: A trainer snapshot, or a file or the folder of a ChainerMN checkpoint. It must be the
            folder if each rank saved a shard of the state.
        optimizer: An optimizer that is set up with the model, or with a part of the model in the
            snapshot.

    Raises:
        ConversionError: If the file does not contain the state, or contains the states of several
            optimizers.
    """
    files = files_of(Path(path))
    with contextlib.ExitStack() as stack:
        of_ranks = [stack.enter_context(read(file)) for file in files]
        arrays = of_ranks[0]
        prefix = _prefix(arrays, optimizer, str(files[0]))
        for name, param in optimizer.target.namedparams():
            start = f'{prefix}{name.lstrip("/")}/'
            param.update_rule.serialize(chainer.serializers.NpzDeserializer(
                _complete_state(of_ranks, start) if start + ENTRY in arrays else arrays,
                path=start))
            optimizer.t = max(optimizer.t, param.update_rule.t)
        return TrainingPosition(_number(arrays, r'(.*/)?updater/iteration'),
                                _number(arrays, r'(.*/)?iterator:main/epoch'))


def _prefix(arrays: Mapping[str, Array], optimizer: Any, file: str) -> str:
    """Return the common prefix of the names of all states."""
    ends = [f'{name.lstrip("/")}/t' for name, _ in optimizer.target.namedparams()]
    starts = {key[:len(key) - len(ends[0])] for key in arrays if key.endswith(ends[0])}
    found = sorted(start for start in starts if start[-1:] in ('', '/') and all(
        start + end in arrays for end in ends))
    if len(found) != 1:
        raise ConversionError(
            f'{file} contains the states of several optimizers: {", ".join(found)}. Save a '
            'file that contains only one of them.' if found else
            f'{file} does not contain the state of an optimizer of these parameters, such as '
            f'{ends[0]!r}. It must be the snapshot of a trainer, or a checkpoint.')
    return found[0]


def _complete_state(of_ranks: Sequence[Mapping[str, Array]], start: str) -> dict[str, Array]:
    """Join the shards of the state of a parameter, whose names begin with ``start``."""
    try:
        return merge([
            {key: arrays[key] for key in arrays if key.startswith(start)} for arrays in of_ranks])
    except ValueError:
        raise ConversionError(
            'The file contains only one shard of the optimizer states, because the optimizer used '
            'shard_states=True. Pass the folder with the files of all ranks.') from None


def _number(arrays: Mapping[str, Array], pattern: str) -> int | None:
    found = [key for key in arrays if re.fullmatch(pattern, key)]
    return int(arrays[found[0]]) if len(found) == 1 else None


def write_training(folder: str | Path, module: torch.nn.Module, optimizer: Any,
                   position: TrainingPosition, source: str) -> None:
    """Write the module, the state of its optimizer, and ``train.py``, which continues training.

    Args:
        folder: The folder to write to. It is created if necessary.
        module: The module, from ``to_torch(..., train=True)``.
        optimizer: The Chainer optimizer.
        position: The position at which training stopped.
        source: The name of the snapshot.

    Raises:
        ConversionError: For the same reasons as in ``to_torch_optimizer``.
        FileExistsError: If the folder already contains a ``train.py``.
    """
    folder = Path(folder)
    new = optimizers.to_torch_optimizer(optimizer, module)
    names = {id(p): name for name, p in module.named_parameters()}
    groups = [{**{key: value for key, value in group.items() if key != 'params'},
               'params': [names[id(p)] for p in group['params']]} for group in new.param_groups]
    text = script(new, groups, optimizer, position, source)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / 'train.py', 'x', encoding='utf-8') as file:
        file.write(text)
    torch.save(module, folder / 'module.pt')
    torch.save({'groups': groups, 'optimizer': new.state_dict(), **position._asdict()},
               folder / 'training.pt')


def script(new: torch.optim.Optimizer, groups: list[dict[str, Any]], optimizer: Any,
           position: TrainingPosition, source: str) -> str:
    """Return the script that continues training."""
    kind = type(new)
    rates = sorted({group['lr'] for group in groups})
    params = [param for param in optimizers.actual(optimizer).target.params()
              if param.update_rule is not None and param.update_rule.enabled]
    hooks, _ = optimizers.remaining_hooks(optimizer, optimizers.kind_of(optimizer, params))
    sources: list[Any] = []
    if kind is torch_optimizers.NesterovAG:
        sources.append(kind)
    if 'chainer_eps' in groups[0]:
        sources.append(torch_optimizers.eps_before_correction)
    return SCRIPT.format(
        source=source,
        imports='import math\nimport os' if 'chainer_eps' in groups[0] else 'import os',
        sources=''.join(f'\n\n{_source(each)}\n' for each in sources),
        optimizer='' if kind is torch_optimizers.NesterovAG else 'torch.optim.',
        kind=kind.__name__,
        register='    optimizer.register_step_pre_hook(eps_before_correction)\n' if (
            'chainer_eps' in groups[0]) else '',
        rate=f'{rates[0]:g}' if len(rates) == 1 else 'different for each group',
        begin=position.epoch or 0,
        position=', '.join(f'{name} {value}' for name, value in position._asdict().items()
                           if value is not None) or 'an unknown position',
        hooks=''.join(textwrap.indent(_line(hook), ' ' * 12) for hook in hooks))


def _source(each: Any) -> str:
    """Return the source of a class or function, without type annotations."""
    text = inspect.getsource(each).rstrip()
    for typed, plain in (
            (': torch.optim.Optimizer, *_: Any) -> None:', ', *_):'),
            ('(self, closure: Callable[[], Any] | None = None) -> Any:', '(self, closure=None):'),
            (': Any, lr: float = .01, momentum: float = .9) -> None:', ', lr=.01, momentum=.9):')):
        text = text.replace(typed, plain)
    return text


def _line(hook: Any) -> str:
    kind = type(hook)
    if kind is optimizer_hooks.GradientClipping:
        return f'torch.nn.utils.clip_grad_norm_(module.parameters(), {hook.threshold})\n'
    if kind is optimizer_hooks.GradientHardClipping:
        change = f'clamp_({hook.lower_bound}, {hook.upper_bound})'
    elif kind is optimizer_hooks.Lasso:
        change = f'add_(torch.sign(p.detach()), alpha={hook.rate})'
    else:
        change = f'add_(p.detach(), alpha={hook.rate})'
    return f'for p in module.parameters():\n    if p.grad is not None:\n        p.grad.{change}\n'


SCRIPT = '''"""Continues the training run of {source}, which stopped at {position}.

Run it with python train.py, or with several processes: torchrun --nproc-per-node 2 train.py
"""

{imports}

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

EPOCHS = {begin} + 10
BATCH = 32  # per process
{sources}

def dataset():
    """Return the training data: pairs of an input and a label."""
    raise NotImplementedError('Return your dataset here')


def loss_of(module, x, t):
    return torch.nn.functional.cross_entropy(module(x), t)


def main():
    rank, size = int(os.environ.get('RANK', 0)), int(os.environ.get('WORLD_SIZE', 1))
    device = torch.device('cpu')
    if torch.cuda.is_available():
        device = torch.device('cuda', int(os.environ.get('LOCAL_RANK', 0)))
        torch.cuda.set_device(device)
    if size > 1:
        dist.init_process_group('nccl' if device.type == 'cuda' else 'gloo')

    folder = os.path.dirname(os.path.abspath(__file__))
    saved = torch.load(os.path.join(folder, 'training.pt'), weights_only=True)
    module = torch.load(os.path.join(folder, 'module.pt'), weights_only=False).to(device)
    optimizer = {optimizer}{kind}([
        {{**group, 'params': [module.get_parameter(name) for name in group['params']]}}
        for group in saved['groups']])
    optimizer.load_state_dict(saved['optimizer'])  # its learning rate is {rate}
{register}    parallel = DistributedDataParallel(module) if size > 1 else module

    data = dataset()
    sampler = DistributedSampler(data) if size > 1 else None
    loader = DataLoader(data, BATCH, shuffle=sampler is None, sampler=sampler)
    for epoch in range({begin}, EPOCHS):
        if sampler is not None:
            sampler.set_epoch(epoch)
        for x, t in loader:
            optimizer.zero_grad()
            loss = loss_of(parallel, x.to(device), t.to(device))
            loss.backward()
{hooks}            optimizer.step()
        if rank == 0:
            print(f'epoch {{epoch + 1}}: loss {{loss.item():.4f}}')
            torch.save(module, os.path.join(folder, f'module_{{epoch + 1}}.pt'))
    if size > 1:
        dist.barrier()  # wait until rank 0 has written the file
        dist.destroy_process_group()


if __name__ == '__main__':
    main()
'''
