"""The state of a Chainer model by PyTorch names: parameters, persistent values, attributes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import chainer
import numpy as np

from chainer_compat.graph.forward_state import ForwardState
from chainer_compat.pytorch.conversion.tracked_array import Array


def torch_name(path: str) -> str:
    """Return the PyTorch name for a path in Chainer, such as ``l1.W`` for ``/l1/W``."""
    return path.lstrip('/').replace('/', '.')


def parameters(model: chainer.Link) -> dict[str, chainer.Parameter]:
    """Return the initialized parameters by name."""
    return {torch_name(path): parameter for path, parameter in model.namedparams()
            if parameter.is_initialized}


def persistent_values(model: chainer.Link) -> dict[str, Array]:
    """Return the arrays and numbers that are saved with the model, except its parameters."""
    return {torch_name(f'{path}/{name}'): np.asarray(link.__dict__[name])
            for path, link in model.namedlinks() for name in sorted(link._persistent)
            if isinstance(link.__dict__[name], np.ndarray | np.generic | int | float)}


def other_arrays(model: chainer.Link) -> dict[str, Array]:
    """Return the arrays that are attributes of links but not saved with the model."""
    return {torch_name(f'{path}/{name}'): value
            for path, link in model.namedlinks() for name, value in link.__dict__.items()
            if isinstance(value, np.ndarray) and name not in link._persistent}


@contextlib.contextmanager
def unchanged(model: chainer.Link) -> Iterator[Callable[[], dict[str, Array]]]:
    """Restore the state of the links and random number generators at the end.

    Yields:
        A function that returns copies of the persistent values.
    """
    before = ForwardState([model])
    try:
        yield lambda: {name: value.copy() for name, value in persistent_values(model).items()}
    finally:
        before.restore()


def uninitialized(model: chainer.Link) -> list[str]:
    """Return the names of arrays that do not exist until the first input gives their sizes."""
    return [*(torch_name(path) for path, parameter in model.namedparams(include_uninit=True)
              if not parameter.is_initialized),
            *(torch_name(f'{path}/avg_mean') for path, link in model.namedlinks()
              if link.__dict__.get('avg_mean', 0) is None)]


def initialize(model: chainer.Link, run: Callable[[], object]) -> None:
    """Run the model once if some sizes depend on the first input."""
    if not uninitialized(model):
        return
    before = [(link, dict(link.__dict__)) for link in model.links()]
    with chainer.using_config('train', False), chainer.no_backprop_mode():
        run()
    for link, attributes in before:
        registered = {*link._params, *link._persistent, *getattr(link, '_children', ())}
        for name, value in attributes.items():
            is_new = value is None and (
                name in registered or isinstance(link.__dict__.get(name), np.ndarray))
            if not is_new:
                link.__dict__[name] = value
        for name in link.__dict__.keys() - attributes.keys() - registered:
            del link.__dict__[name]
