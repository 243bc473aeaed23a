"""Files with the optimizer states of all shards of a store."""
from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Mapping
from typing import TypeAlias, TypedDict

import chainer
import numpy as np

from chainermn.kvstore._sharding import Key, KeyLayout
from chainermn.optimizers.proxy import open_atomic

#: The states of one parameter by name, such as momenta (arrays) and the number of steps ``t``.
OptimizerState: TypeAlias = Mapping[str, np.ndarray | float]


class OptimizerDescription(TypedDict):
    """The class and the hyperparameters of an optimizer, as plain data."""

    optimizer: str
    hyperparameters: dict[str, object]


def describe(optimizer: chainer.optimizer.GradientMethod) -> OptimizerDescription:
    """Return the class and the hyperparameters of an optimizer."""
    values = optimizer.hyperparam.get_dict()
    return {'optimizer': f'{type(optimizer).__module__}.{type(optimizer).__qualname__}',
            'hyperparameters': {name: value.item() if isinstance(value, np.generic) else value
                                for name, value in sorted(values.items())}}


def call_of(optimizer: chainer.optimizer.GradientMethod, with_hyperparameters: bool) -> str:
    """Return the class and the hyperparameters as a call, such as ``SGD(lr=0.1)``."""
    described = describe(optimizer)
    module, _, name = described['optimizer'].rpartition('.')
    if module.startswith('chainer.optimizers.'):
        module = ''
    values = described['hyperparameters'].items() if with_hyperparameters else ()
    return f'{module}{"." * bool(module)}{name}({", ".join(f"{k}={v!r}" for k, v in values)})'


_FORMAT = 1


def join_states(layout: KeyLayout, states: Mapping[int, OptimizerState]) -> OptimizerState:
    """Join the states of a key's shards.

    Args:
        layout: The layout of the key.
        states: The states by server. Servers without states are missing.

    Returns:
        The states of the full array. States that do not have the shape of the shard, such as the
        number of steps, come from the first server.
    """
    first = min(states)
    joined = dict(states[first])
    for name, value in joined.items():
        if not layout.is_split or not isinstance(value, np.ndarray) \
                or value.shape != layout.shard_shape(first):
            continue
        joined[name] = full = np.zeros(layout.shape, value.dtype)
        for server in layout.shards:
            if server in states:
                layout.shard(full, server)[...] = states[server][name]
    return joined


def write_states(path: str | os.PathLike[str], states: Mapping[Key, OptimizerState],
                 optimizer: OptimizerDescription | None, t: int) -> None:
    """Write optimizer states to an npz file, atomically.

    Args:
        path: Path of the file.
        states: States by key.
        optimizer: Description of the optimizer, which is also written if it is not ``None``.
        t: The number of updates of the optimizer.

    Raises:
        OSError: If the file cannot be written.
        TypeError: If a state is not a number or an array of numbers.
    """
    about = {'format': _FORMAT, 'keys': list(states), 'optimizer': optimizer, 't': t}
    arrays = {'about': np.array(json.dumps(about))}
    for i, (key, state) in enumerate(states.items()):
        for name, value in state.items():
            arrays[f'{i}/{name}'] = np.asarray(value)
            if arrays[f'{i}/{name}'].dtype.hasobject:
                raise TypeError(f'the state {name!r} of key {key!r} must be a number or a numeric '
                                f'array, not {value!r}')
    with open_atomic(os.fspath(path)) as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]


def read_states(path: str | os.PathLike[str]
                ) -> tuple[Mapping[Key, OptimizerState], OptimizerDescription | None, int | None]:
    """Read a file that :func:`write_states` wrote. No code in the file is executed.

    Returns:
        The states by key, the description of the optimizer, and its number of updates, if the file
        contains them.

    Raises:
        ValueError: If the file is corrupt or has a different format.
        OSError: If the file cannot be read.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            about = json.loads(str(file['about']))
            if about['format'] != _FORMAT:
                raise ValueError(f'its format version is {about["format"]}, but only version '
                                 f'{_FORMAT} is supported')
            states: dict[Key, dict[str, np.ndarray | float]] = {key: {} for key in about['keys']}
            for name in file.files:
                index, slash, state = name.partition('/')
                if slash:
                    states[about['keys'][int(index)]][state] = file[name]
            t = about.get('t')
            return states, about['optimizer'], None if t is None else int(t)
    except OSError:
        raise
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, EOFError,
            zipfile.BadZipFile) as error:
        # For a file that is not NPZ, NumPy suggests allow_pickle=True, which would be unsafe.
        reason = 'it is not an NPZ file' if 'allow_pickle' in str(error) else error
        raise ValueError(f'cannot read optimizer states from {os.fspath(path)}: {reason}. Pass a '
                         'file written by save_optimizer_states.') from error
