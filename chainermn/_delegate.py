"""A proxy: an object that stands for one Chainer object and changes a few of its methods.

The proxies of this package are not subclasses of what they wrap, because the wrapped object may
be of any class, the user's own included.
"""
from __future__ import annotations

import inspect
from typing import Any


class Delegate:
    """Stands for ``wrapped``: reads, writes and deletions of attributes go to it.

    Except those of attributes that the proxy's class declares: its methods, its properties, and
    the names that it annotates::

        class Loud(Delegate, wraps='quiet'):
            quiet: Any      # the wrapped object itself; named by `wraps`
            volume: int     # an attribute of the proxy

            def speak(self): ...   # instead of quiet.speak

    Special methods (``__len__``, ``__next__``, ...) are never forwarded: Python looks for them in
    the class, and for copying and pickling the proxy must answer for itself.

    Args:
        wrapped: The object to stand for.
    """

    _wraps: str
    _own: frozenset[str] = frozenset()

    def __init_subclass__(cls, wraps: str | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if wraps is not None:
            cls._wraps = wraps
        cls._own = frozenset(name for base in cls.__mro__ if base is not object
                             for name in (*vars(base), *inspect.get_annotations(base)))

    def __init__(self, wrapped: Any) -> None:
        object.__setattr__(self, self._wraps, wrapped)

    @classmethod
    def _owns(cls, name: str) -> bool:
        return name in cls._own or (name.startswith('__') and name.endswith('__'))

    def __getattr__(self, name: str) -> Any:  # only called for what is not found on the proxy
        # A proxy that is just being copied or unpickled has no attributes yet: asking the wrapped
        # object for them would come back here forever.
        if self._owns(name):
            raise AttributeError(f'{type(self).__name__!r} object has no attribute {name!r}',
                                 name=name, obj=self)
        return getattr(getattr(self, self._wraps), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if self._owns(name):
            object.__setattr__(self, name, value)
        else:
            setattr(getattr(self, self._wraps), name, value)

    def __delattr__(self, name: str) -> None:
        if self._owns(name):
            object.__delattr__(self, name)
        else:
            delattr(getattr(self, self._wraps), name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(getattr(self, self._wraps))})

    def __repr__(self) -> str:
        return f'<{type(self).__name__} of {getattr(self, self._wraps)!r}>'
