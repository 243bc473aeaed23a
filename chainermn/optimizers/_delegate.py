"""A proxy base class: wraps a Chainer object and overrides a few of its methods.

The proxies of this package do not subclass the wrapped object's class, because that can be any
class, including user-defined ones.
"""
from __future__ import annotations

import inspect
from typing import Any

from chainermn._types import Object


class Delegate:
    """Forwards attribute access to ``wrapped``.

    Attributes declared in the proxy's class stay on the proxy: methods, properties, and annotated
    names::

        class Loud(Delegate, wraps='quiet'):
            quiet: Quiet    # the wrapped object; name given by `wraps`
            volume: int     # an attribute of the proxy

            def speak(self): ...   # instead of quiet.speak

    Special methods (``__len__``, ``__next__``, ...) are never forwarded: Python looks them up in
    the class, and copying and pickling must apply to the proxy itself.

    Args:
        wrapped: The object to wrap.
    """

    _wraps: str
    _proxy_names: frozenset[str] = frozenset()

    def __init_subclass__(cls, wraps: str | None = None, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if wraps is not None:
            cls._wraps = wraps
        cls._proxy_names = frozenset(name for base in cls.__mro__ if base is not object
                                     for name in (*vars(base), *inspect.get_annotations(base)))

    def __init__(self, wrapped: Object) -> None:
        object.__setattr__(self, self._wraps, wrapped)

    @classmethod
    def _is_on_proxy(cls, name: str) -> bool:
        return name in cls._proxy_names or (name.startswith('__') and name.endswith('__'))

    def _holder(self, name: str) -> Object:
        """Return the object with an attribute that is not on the proxy: the wrapped object."""
        return getattr(self, self._wraps)

    def __getattr__(self, name: str) -> Any:  # only called if the proxy has no such attribute
        # While a proxy is copied or unpickled, it has no attributes yet, and looking up the wrapped
        # object would recurse forever.
        if self._is_on_proxy(name):
            raise AttributeError(f'{type(self).__name__!r} object has no attribute {name!r}',
                                 name=name, obj=self)
        return getattr(self._holder(name), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if self._is_on_proxy(name):
            object.__setattr__(self, name, value)
        else:
            setattr(self._holder(name), name, value)

    def __delattr__(self, name: str) -> None:
        if self._is_on_proxy(name):
            object.__delattr__(self, name)
        else:
            delattr(self._holder(name), name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(getattr(self, self._wraps))})

    def __repr__(self) -> str:
        return f'<{type(self).__name__} of {getattr(self, self._wraps)!r}>'


def unwrap(value: Object) -> Object:
    """Return the object inside all proxies."""
    while isinstance(value, Delegate):
        value = getattr(value, value._wraps)
    return value
