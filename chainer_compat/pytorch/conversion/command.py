"""``python -m chainer_compat export``: converts a snapshot to a PyTorch or ONNX file."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

DESCRIPTION = 'Converts a Chainer model and its snapshot to PyTorch (.pt) or ONNX (.onnx).'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument('snapshot', help='NPZ file of a model or trainer, or a checkpoint: a file '
                        'or its folder')
    parser.add_argument('output', help='file to write: *.pt, for torch.load, or *.onnx; with '
                        '--training, a folder')
    parser.add_argument('--model', required=True, metavar='MODULE:FUNCTION',
                        help='a function or class without arguments that returns the model, such '
                        'as net:make_model; net.py can be in the current folder')
    parser.add_argument('--input', required=True, action='append', metavar='SHAPE[:DTYPE]',
                        help='shape of an input, such as 1,3,224,224 or 2,10:int32; repeat it for '
                        'several inputs')
    parser.add_argument('--train', action='store_true',
                        help='convert the model for training instead of inference (*.pt only)')
    parser.add_argument('--training', metavar='MODULE:FUNCTION',
                        help='also convert the optimizer, and write a train.py that continues '
                        'training with both; the function takes the model and returns the '
                        'optimizer, with the hooks and learning rate of the training run')


def main(options: argparse.Namespace) -> None:
    """Load the model and its snapshot, convert it, and write the file."""
    from chainer_compat.pytorch.conversion.errors import ConversionError

    kind = _checked_kind(options)
    inputs = [_example(each) for each in options.input]
    if options.training:
        _export_training(options, inputs)
        return
    model = _model(options)
    try:
        from chainer_compat.pytorch.conversion.convert import to_torch

        prefix = _load(options, model, inputs)
        if kind == '.onnx':
            from chainer_compat.pytorch.conversion.onnx_file import to_onnx

            to_onnx(model, options.output, *inputs)
        else:
            _save(to_torch(model, *inputs, train=options.train), options.output)
    except (ConversionError, ImportError, OSError) as error:
        sys.exit(f'{type(error).__name__}: {error}')
    where = f' (from {prefix})' if prefix else ''
    print(f'Wrote {options.output}{where}. Its outputs match Chainer, except for rounding.')


def _checked_kind(options: argparse.Namespace) -> str:
    """Return the suffix of the output. Exit if an argument is wrong, before PyTorch is imported."""
    kind = os.path.splitext(options.output)[1]
    if not options.training:
        if kind == '.onnx' and options.train:
            sys.exit(f'With --train, the output must be a .pt file, not {options.output}.')
        if kind not in ('.pt', '.onnx'):
            sys.exit(f'The output must be a .pt file or an .onnx file, not {options.output}.')
    for option, name in ('--model', options.model), ('--training', options.training):
        if name and not name.partition(':')[2]:
            sys.exit(f'{option} must be MODULE:FUNCTION, not {name!r}.')
    if not os.path.exists(options.snapshot):
        sys.exit(f'FileNotFoundError: no such snapshot: {options.snapshot}')
    return kind


def _export_training(options: argparse.Namespace, inputs: Sequence[Any]) -> None:
    from chainer_compat.pytorch.conversion.convert import to_torch
    from chainer_compat.pytorch.conversion.errors import ConversionError
    from chainer_compat.pytorch.conversion.training import load_optimizer, write_training

    model = _model(options)
    try:
        _load(options, model, inputs)
        optimizer = _call('--training', options.training, model)
        if getattr(optimizer, 'target', None) is None:
            optimizer.setup(model)
        position = load_optimizer(options.snapshot, optimizer)
        module = to_torch(model, *inputs, train=True)
        write_training(options.output, module, optimizer, position, options.snapshot)
    except (ConversionError, ImportError, OSError) as error:
        sys.exit(f'{type(error).__name__}: {error}')
    print(f'Wrote {os.path.join(options.output, "train.py")}, module.pt and training.pt. '
          'Edit dataset() in train.py to return your data. The learning rate is from '
          f'{options.training}, because a snapshot does not contain it.')


def _load(options: argparse.Namespace, model: Any, inputs: Sequence[Any]) -> str:
    """Initialize the model and load its snapshot; return its path in the file."""
    from chainer_compat.pytorch.conversion.snapshots import load_snapshot
    from chainer_compat.pytorch.conversion.state import initialize, unchanged

    initialize(model, lambda: _run(model, inputs, options.input))
    with unchanged(model):
        _run(model, inputs, options.input)
    return load_snapshot(options.snapshot, model, f'the model of --model {options.model}')


def _model(options: argparse.Namespace) -> Any:
    import chainer

    from chainer_compat.pytorch.conversion.errors import name_of_kind

    model = _call('--model', options.model)
    if not isinstance(model, chainer.Link):
        sys.exit(f'--model {options.model} must return a chainer.Link, not {name_of_kind(model)}.')
    return model


def _call(option: str, name: str, *args: Any) -> Any:
    """Call a user function, given as ``MODULE:FUNCTION``, and return its result."""
    module, _, function = name.partition(':')
    if '' not in sys.path:
        sys.path.insert(0, '')
    try:
        return getattr(importlib.import_module(module), function)(*args)
    except Exception as error:  # raised by the user's code
        sys.exit(f'{option} {name} cannot be called: {type(error).__name__}: {error}')


def _run(model: Any, inputs: Sequence[Any], shapes: Sequence[str]) -> None:
    """Run the model, or exit with the reason why it cannot be called."""
    import chainer

    try:
        with chainer.using_config('train', False), chainer.no_backprop_mode():
            model(*inputs)
    except Exception as error:
        given = ' '.join(f'--input {shape}' for shape in shapes)
        sys.exit(f'The model cannot be called with {given}: {type(error).__name__}: {error}\n'
                 'Pass one --input for each argument. For a Classifier, make --model return '
                 'its predictor.')


def _example(text: str) -> Any:
    """Return an example input: normally distributed numbers, or zeros and ones for integers."""
    import numpy as np

    sizes, _, dtype = text.partition(':')
    try:
        shape = tuple(int(size) for size in sizes.split(',') if size)
        kind = np.dtype(dtype or 'float32')
        if min(shape, default=0) < 0:
            raise ValueError
    except (TypeError, ValueError):
        sys.exit(f'--input {text} must be a shape and an optional dtype, such as 1,3,224,224 or '
                 '2,10:int32.')
    random = np.random.RandomState(0)
    if kind.kind == 'f':
        return random.standard_normal(shape).astype(kind)
    return random.randint(0, 2, shape).astype(kind)


def _save(module: Any, path: str) -> None:
    import torch

    temporary = f'{path}.tmp'
    try:
        torch.save(module, temporary)
        os.replace(temporary, path)
    finally:
        if os.path.exists(temporary):
            os.remove(temporary)
