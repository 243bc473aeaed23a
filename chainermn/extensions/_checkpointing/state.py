"""Copies the states of an object and the random number generators to arrays in host memory."""
from __future__ import annotations

import copy
import importlib.util
import random
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import chainer
import numpy as np

from chainermn.extensions._checkpointing.classes import capture_classes
from chainermn.extensions._checkpointing.late_copies import LateCopies
from chainermn.extensions._checkpointing.parts import SavedParts
from chainermn.extensions._checkpointing.progress import capture_epochs
from chainermn.optimizers._delegate import unwrap

_RANDOM = 'chainermn/random/'

#: Maximum number of attempts to copy iterators whose threads draw random numbers at the same time.
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
            self.target[name] = value if value in self._late else _copy_array(value)
        else:
            super().__call__(key, value)
            if not isinstance(value, chainer.backends.cuda.ndarray):  # it was copied to the host
                self.target[name] = _copy_array(self.target[name])
        return value


@dataclass
class CopiedState:
    """The state of a rank in a checkpoint, copied for the thread that writes it."""

    arrays: Mapping[str, np.ndarray]  # by name
    buffers: set[str]  # names of arrays, for rank_file.write
    own: set[str]  # names of arrays, for rank_file.write
    late: LateCopies  # the copies that are not complete yet

    @classmethod
    def of(cls, parts: SavedParts, allow_pickle: bool, arrays: dict[str, np.ndarray] | None = None
           ) -> CopiedState:
        """Copy the state of an object, and add the information that loading requires.

        Args:
            parts: The parts of the object.
            allow_pickle: Whether to accept arrays of Python objects.
            arrays: The arrays of the object by name, if it has already been serialized; they are
                replaced with copies. Otherwise, the object and the random number generators are
                serialized here.

        Raises:
            TypeError: If the state contains Python objects, unless ``allow_pickle`` is true.
        """
        late, is_serialized = late_copies(parts), arrays is not None
        if arrays is None:
            arrays = _copy_with_random(parts, late)
        if not allow_pickle:
            check_objects(arrays)
        if is_serialized:
            arrays.update({key: _copy_array(array) for key, array in arrays.items()
                           if array not in late})
            late.begin(arrays)
        buffers, own = parts.buffers(arrays), parts.of_one_rank(arrays)
        arrays.update({**capture_classes(parts), **capture_epochs(parts)})
        return cls(arrays, buffers, own, late)


def copy_state(target: object, late: LateCopies | None = None) -> dict[str, np.ndarray]:
    """Copy everything that an object serializes. Waits for the GPU.

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


def _copy_with_random(parts: SavedParts, late: LateCopies) -> dict[str, np.ndarray]:
    """Copy everything that an object serializes, and the random number generators."""
    arrays = copy_state(parts.whole, late)
    prefetching = {prefix: part for prefix, part in parts.all.items()
                   if hasattr(unwrap(part), '_prefetch_loop')}
    for _ in range(_MAX_ATTEMPTS):
        arrays.update(capture_random())
        # The thread of an iterator may have shuffled the next epoch in the meantime.
        again = {prefix + name: array for prefix, iterator in prefetching.items()
                 for name, array in copy_state(iterator).items()}
        if all(key in arrays and np.array_equal(arrays[key], array)  # some arrays may be new
               for key, array in again.items()):
            break
        arrays.update(again)
    return arrays


def _copy_array(array: np.ndarray) -> np.ndarray:
    """Copy an array and the objects in it."""
    return copy.deepcopy(array) if array.dtype.hasobject else array.copy(order='K')


def check_objects(arrays: Mapping[str, np.ndarray]) -> None:
    """Check that all arrays can be loaded without running code.

    Raises:
        TypeError: If an array contains objects other than ``None``.
    """
    for key, array in arrays.items():
        if array.dtype.hasobject and (array.ndim or array.item() is not None):
            raise TypeError(
                f'{key} is an array of Python objects ({array.dtype}), and loading it would run '
                'code from the file. Save numbers or text, or pass allow_pickle=True when you '
                'create the extension.')


def late_copies(parts: SavedParts) -> LateCopies:
    """Return the arrays that can be copied later: the states of the optimizers."""
    optimizers = map(unwrap, parts.all.values())
    # A custom serialize method may change states before it returns, such as to restore averages.
    models = (optimizer.target for optimizer in optimizers
              if isinstance(optimizer, chainer.Optimizer)
              and type(optimizer).serialize is chainer.Optimizer.serialize)
    return LateCopies(model for model in models if isinstance(model, chainer.Link))


def capture_random() -> dict[str, np.ndarray]:
    """Return the states of ``numpy.random``, ``random`` and, if imported, PyTorch, by name.

    Chainer's shuffling iterators and dropout use ``numpy.random``. A resumed run uses the same
    random numbers only if these states are saved.
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
    """Restore the states that :func:`capture_random` returned; missing states are ignored."""
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
