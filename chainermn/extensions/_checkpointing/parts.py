"""The parts of an object to save or load: optimizers, models, iterators and trainers."""
from __future__ import annotations

from collections.abc import Iterable, Mapping

import chainer

from chainermn._types import Object
from chainermn.optimizers._sharded_states.sharded_update import ShardedUpdate


class SavedParts:
    """The parts of an object, which are found once per checkpoint or resume.

    The keys of each dict are the prefixes of the names of the parts' arrays.

    Args:
        target: The object to save or load, such as a trainer or a link; or a dict of such objects.
    """

    def __init__(self, target: object) -> None:
        #: All parts, as one object that Chainer can serialize.
        self.whole: Object = target
        objects: dict[str, Object] = {'': target}
        if isinstance(target, Mapping):
            self.whole = _Dictionary(target)
            objects = {f'{name}/': each for name, each in target.items()}
        self.trainers = {prefix: each for prefix, each in objects.items()
                         if isinstance(each, chainer.training.Trainer)}
        #: Optimizers, models and iterators.
        self.all = {prefix + name: part for prefix, each in objects.items()
                    for name, part in _parts_of(each).items()}
        self.models = {prefix: part for prefix, part in self.all.items()
                       if hasattr(part, 'namedparams')}
        self.iterators = {prefix: part for prefix, part in self.all.items()
                          if isinstance(part, chainer.dataset.Iterator)
                          or 'updater/iterator:' in prefix}
        #: The prefixes of optimizers that keep sharded states.
        self.sharded = tuple(prefix for prefix, part in self.all.items()
                             if isinstance(getattr(part, '_stepper', None), ShardedUpdate)
                             or getattr(part, 'has_sharded_states', False))

    def buffers(self, keys: Iterable[str]) -> set[str]:
        """Return the names of the models' arrays that are not parameters, so replicas may differ.

        Args:
            keys: Names of all arrays.
        """
        parameters = {prefix + path.lstrip('/') for prefix, model in self.models.items()
                      for path, _ in model.namedparams()}
        return {key for key in keys if key.startswith((*self.models,)) and key not in parameters}

    def of_one_rank(self, keys: Iterable[str]) -> set[str]:
        """Return the names of the arrays that always differ between ranks.

        These are the states of iterators and the residuals of compression.

        Args:
            keys: Names of all arrays.
        """
        residuals = [f'{prefix}compression/' for prefix, part in self.all.items()
                     if hasattr(part, 'compression')]
        return {key for key in keys if key.startswith((*self.iterators, *residuals))}


def _parts_of(target: Object) -> dict[str, Object]:
    """Return the parts of a trainer; any other object is a single part."""
    updater: Object = getattr(target, 'updater', None)
    if not hasattr(updater, 'get_all_optimizers'):
        return {'': target}
    parts: dict[str, Object] = {
        f'updater/iterator:{name}/': iterator
        for name, iterator in getattr(updater, '_iterators', {}).items()}
    for name, optimizer in updater.get_all_optimizers().items():
        parts[f'updater/optimizer:{name}/'] = optimizer
        parts[f'updater/model:{name}/'] = optimizer.target
    return parts


class _Dictionary:
    """A dict of objects, as one object that Chainer can serialize."""

    def __init__(self, objects: Mapping[str, Object]) -> None:
        self.objects = objects

    def serialize(self, serializer: chainer.AbstractSerializer) -> None:
        for name, each in self.objects.items():
            if not isinstance(name, str):
                raise TypeError(f'the keys of a state must be strings, not {name!r}')
            if not hasattr(each, 'serialize'):
                raise TypeError(
                    f'{name!r} is of type {type(each).__name__}, which Chainer cannot serialize. '
                    'Pass objects with a serialize method, such as links, optimizers or iterators.')
            each.serialize(serializer[name])
