"""The state of an object: copied to arrays in host memory, with the random number generators."""
from __future__ import annotations

import copy
import importlib.util
import random
import sys
from collections.abc import Iterable, Mapping
from typing import Protocol, TypeVar

import chainer
import numpy as np

from chainermn._types import Object
from chainermn.extensions._checkpointing.late_copies import LateCopies
from chainermn.optimizers._delegate import unwrap

_RANDOM = 'chainermn/random/'

#: How often to copy iterators if their threads draw random numbers at the same time.
_MAX_ATTEMPTS = 10

_T = TypeVar('_T')


class _CopySerializer(chainer.serializers.DictionarySerializer):
    """A DictionarySerializer that copies the arrays, except those that are copied later."""

    def __init__(self, late: LateCopies, target: dict[str, np.ndarray] | None = None,
                 path: str = '') -> None:
        super().__init__(target, path)
        self._late = late

    def __getitem__(self, key: str) -> _CopySerializer:
        return _CopySerializer(self._late, self.target, self.path + key.strip('/') + '/')

    def __call__(self, key: str, value: _T) -> _T:
        name = self.path + key.lstrip('/')
        if isinstance(value, np.ndarray):
            self.target[name] = value if value in self._late else copy_array(value)
        else:
            super().__call__(key, value)
            if not isinstance(value, chainer.backends.cuda.ndarray):  # it was copied to the host
                self.target[name] = copy_array(self.target[name])
        return value


class _Serializable(Protocol):
    """An object that Chainer can serialize."""

    def serialize(self, serializer: chainer.AbstractSerializer) -> None: ...


class _Parts:
    """A dictionary of objects, as one object that Chainer can serialize."""

    def __init__(self, parts: Mapping[str, _Serializable]) -> None:
        self.parts = parts

    def serialize(self, serializer: chainer.AbstractSerializer) -> None:
        for name, part in self.parts.items():
            if not isinstance(name, str):
                raise TypeError(f'the names of the parts of a state are text, not {name!r}')
            if not hasattr(part, 'serialize'):
                raise TypeError(
                    f'{name!r} is of type {type(part).__name__}, which Chainer cannot serialize. '
                    'Pass objects with a method serialize: links, optimizers, iterators.')
            part.serialize(serializer[name])


def as_serializable(target: object) -> object:
    """Return a dictionary of objects as one object; return other objects unchanged."""
    return _Parts(target) if isinstance(target, Mapping) else target


def copy_state(target: object, late: LateCopies | None = None) -> dict[str, np.ndarray]:
    """Copy everything that an object serializes.  Waits for the GPU.

    Args:
        target: An object that Chainer can serialize, such as a trainer or a link.
        late: The arrays to copy later.

    Returns:
        New arrays in host memory, by name.
    """
    late = late or LateCopies()
    serializer = _CopySerializer(late)
    serializer.save(target)
    late.begin(serializer.target)
    return serializer.target


def copy_with_random(target: object, late: LateCopies) -> dict[str, np.ndarray]:
    """Copy everything that an object serializes, and the random number generators.

    Args:
        target: An object that Chainer can serialize, or a dictionary of such objects.
        late: The arrays to copy later.

    Returns:
        New arrays in host memory, by name.
    """
    arrays = copy_state(as_serializable(target), late)
    prefetching = _Parts({
        prefix.rstrip('/'): part for prefix, part in find_parts(target).items()
        if hasattr(unwrap(part), '_prefetch_loop')})
    for _ in range(_MAX_ATTEMPTS):
        arrays.update(capture_random())
        # The thread of an iterator may have drawn the order of the next epoch in the meantime.
        again = copy_state(prefetching)
        if all(key in arrays and np.array_equal(arrays[key], array)
               for key, array in again.items()):
            break
        arrays.update(again)
    return arrays


def copy_array(array: np.ndarray) -> np.ndarray:
    """Copy an array, and the objects in it."""
    return copy.deepcopy(array) if array.dtype.hasobject else array.copy(order='K')


def check_objects(arrays: Mapping[str, np.ndarray]) -> None:
    """Check that all arrays can be loaded without running code.

    Raises:
        TypeError: If an array holds objects other than ``None``.
    """
    for key, array in arrays.items():
        if array.dtype.hasobject and (array.ndim or array.item() is not None):
            raise TypeError(
                f'{key} is an array of Python objects ({array.dtype}), and loading it would run '
                'code from the file. Save numbers or text, or pass allow_pickle=True when you '
                'create the extension.')


def find_parts(target: object) -> dict[str, Object]:
    """Find the optimizers, models and iterators of an object.

    Args:
        target: The object to save or load.

    Returns:
        The parts, by the prefix of the names of their arrays.
    """
    if isinstance(target, Mapping):
        return {f'{name}/{prefix}': part for name, each in target.items()
                for prefix, part in find_parts(each).items()}
    updater: Object = getattr(target, 'updater', None)
    if updater is None or not hasattr(updater, 'get_all_optimizers'):
        return {'': target}
    parts: dict[str, Object] = {
        f'updater/iterator:{name}/': iterator
        for name, iterator in getattr(updater, '_iterators', {}).items()}
    for name, optimizer in updater.get_all_optimizers().items():
        parts[f'updater/optimizer:{name}/'] = optimizer
        parts[f'updater/model:{name}/'] = optimizer.target
    return parts


def late_copies(target: object) -> LateCopies:
    """Return what can be copied later: the states of the optimizers of an object."""
    optimizers = (unwrap(part) for part in find_parts(target).values())
    # Another serialize may change states before it returns, such as swap averages back.
    models = (optimizer.target for optimizer in optimizers
              if isinstance(optimizer, chainer.Optimizer)
              and type(optimizer).serialize is chainer.Optimizer.serialize)
    return LateCopies(model for model in models if isinstance(model, chainer.Link))


def find_buffers(target: object, keys: Iterable[str]) -> set[str]:
    """Return the names of the models' arrays that are not parameters; replicas may differ there.

    Args:
        target: The object that was copied.
        keys: Names of the arrays.
    """
    buffers: set[str] = set()
    for prefix, model in find_parts(target).items():
        if hasattr(model, 'namedparams'):
            parameters = {prefix + path.lstrip('/') for path, _ in model.namedparams()}
            buffers.update(key for key in keys
                           if key.startswith(prefix) and key not in parameters)
    return buffers


def capture_random() -> dict[str, np.ndarray]:
    """Return the states of ``numpy.random``, ``random`` and, if it is loaded, PyTorch, by name.

    Chainer's shuffling iterators and dropout draw from ``numpy.random``.  A resumed run draws the
    same numbers only if these states are saved.
    """
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, numbers, gauss_next = random.getstate()
    torch = sys.modules.get('torch')
    return {
        **({} if torch is None else {f'{_RANDOM}torch/cpu': torch.get_rng_state().numpy()}),
        f'{_RANDOM}numpy/{kind}': np.asarray(keys),
        f'{_RANDOM}numpy/position': np.asarray([position, has_gauss]),
        f'{_RANDOM}numpy/gauss': np.asarray(gauss),
        f'{_RANDOM}python/{version}': np.asarray(numbers, dtype=np.uint32),
        f'{_RANDOM}python/gauss': np.asarray([] if gauss_next is None else [gauss_next]),
    }


def restore_random(arrays: Mapping[str, np.ndarray]) -> None:
    """Set the states that :func:`capture_random` returned; ignores missing ones."""
    if f'{_RANDOM}numpy/MT19937' in arrays:
        position, has_gauss = arrays[f'{_RANDOM}numpy/position'].tolist()
        np.random.set_state(('MT19937', arrays[f'{_RANDOM}numpy/MT19937'], position, has_gauss,
                             float(arrays[f'{_RANDOM}numpy/gauss'])))
    if f'{_RANDOM}python/3' in arrays:
        gauss = arrays[f'{_RANDOM}python/gauss'].tolist()
        random.setstate((3, tuple(arrays[f'{_RANDOM}python/3'].tolist()),
                         gauss[0] if gauss else None))
    if f'{_RANDOM}torch/cpu' in arrays and importlib.util.find_spec('torch'):
        import torch

        torch.set_rng_state(torch.from_numpy(np.array(arrays[f'{_RANDOM}torch/cpu'])))
