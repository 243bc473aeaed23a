"""The module ``chainer.function_set`` of Chainer 1."""

from typing import Any

import chainer

from chainer_compat.dialect.old_arguments import warn


class FunctionSet(chainer.Chain):
    """A Chain that registers links on assignment and exposes its arrays as tuples."""

    def __init__(self, **links: Any) -> None:
        super().__init__()
        warn('FunctionSet belongs to the Chainer 1 API: use chainer.Chain.')
        for name, link in links.items():
            setattr(self, name, link)

    def __setattr__(self, name: str, value: Any) -> None:
        if not isinstance(value, chainer.Link):
            return super().__setattr__(name, value)
        if value.name is not None:
            raise ValueError(f'The link is already registered as {value.name}.')
        if name in self.__dict__:
            getattr(self, name).name = None
            delattr(self, name)
        with self.init_scope():
            super().__setattr__(name, value)

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    def collect_parameters(self) -> 'FunctionSet':
        """Return the model itself, as the argument of ``Optimizer.setup``."""
        return self

    def copy_parameters_from(self, arrays: Any) -> None:
        """Copy arrays from any device into the parameters."""
        for param, array in zip(self.params(), arrays, strict=False):
            chainer.backend.copyto(param.array, array)

    @property
    def parameters(self) -> tuple[Any, ...]:
        """The arrays of the parameters."""
        return tuple(param.array for param in self.params())

    @parameters.setter
    def parameters(self, arrays: Any) -> None:
        for param, array in zip(self.params(), arrays, strict=True):
            param.array = array

    @property
    def gradients(self) -> tuple[Any, ...]:
        """The arrays of the gradients."""
        return tuple(param.grad for param in self.params())

    @gradients.setter
    def gradients(self, arrays: Any) -> None:
        for param, array in zip(self.params(), arrays, strict=True):
            param.grad = array
