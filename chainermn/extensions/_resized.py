"""Loads a trainer that another number of ranks saved: what replicas share, and what must change.

The model, the optimizer and the count of iterations are those that were saved.  Each iterator goes
on in the same epoch, at the same part of it, in an order of its own, as the ranks' data sets have
another length now.  Extensions and their triggers take what rank 0 had saved, where they find it.
"""
from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import chainer


class Resized(chainer.serializers.NpzDeserializer):
    """A NpzDeserializer for another number of ranks.

    Args:
        arrays: What was saved, by name.
        target: What will be loaded into.
    """

    def __init__(self, arrays: Mapping[str, Any], target: Any, path: str = '') -> None:
        super().__init__(arrays, path=path)
        self._target = target
        self.strict = not re.match('(extensions|extension_triggers|stop_trigger)/', path)

    def __getitem__(self, key: str) -> Resized:
        return Resized(self.npz, self._target, self.path + key.strip('/') + '/')

    def __call__(self, key: str, value: Any) -> Any:
        found = re.match('(updater/iterator:([^/]*)/)', self.path)
        if found is None or not hasattr(self._target, 'updater'):
            return super().__call__(key, value)
        saved = _Progress(self.npz, found[1])
        if self.path != found[1] or key not in saved.values:
            return value
        if key in ('epoch', 'is_new_epoch'):
            return type(value)(saved.values[key])
        try:
            length = len(self._target.updater.get_iterator(found[2]).dataset)
        except (AttributeError, TypeError):  # it has none, or one without an end
            length = 0
        position = min(int(saved.part * length), max(length - 1, 0))
        if key == 'current_position':
            return position
        if key == 'previous_epoch_detail':
            return saved.epoch + (position / length if length else 0.)
        return value


class _Progress:
    """How far a saved iterator was."""

    def __init__(self, arrays: Mapping[str, Any], path: str) -> None:
        self.values = {key: arrays[path + key].item()
                       for key in ('epoch', 'is_new_epoch', 'current_position',
                                   'previous_epoch_detail') if path + key in arrays}
        self.epoch = self.values.get('epoch', 0)
        order = next((arrays[path + key] for key in ('order', '_order') if path + key in arrays),
                     None)
        if order is not None and order.size:
            self.part = self.values.get('current_position', 0) / order.size
        else:  # how far it was before the last batch
            self.part = self.values.get('previous_epoch_detail', 0.) - self.epoch
        self.part = min(max(self.part, 0.), 1.)
