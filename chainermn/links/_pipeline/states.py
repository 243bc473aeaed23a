"""The state of links such as ``L.LSTM``: that of a micro-batch must not be used for another one."""
from __future__ import annotations

from typing import NoReturn

import chainer

from chainermn._types import Model


class StateOfAnotherMicroBatch:
    """Takes the place of a state, and raises an error if it is used."""

    def __init__(self, link: str) -> None:
        self._link = link

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith('__'):
            raise AttributeError(name)
        raise RuntimeError(
            f'Pipeline: {self._link} still has the state of another micro-batch, which consists of '
            'other examples. Call its reset_state() in forward, before its first step.')


def forget(model: Model) -> None:
    """Let links raise an error if they use the state that they have now."""
    for link in model.links():
        if hasattr(link, 'reset_state'):
            for name, value in [*vars(link).items()]:
                if isinstance(value, chainer.Variable) and not isinstance(value, chainer.Parameter):
                    setattr(link, name, StateOfAnotherMicroBatch(type(link).__name__))
