"""Copies the states of update rules in a thread, while the next gradients are computed.

These states, such as Adam's moments, only change in an update. With Adam, they are two thirds of
the saved data. A thread copies them until some code asks a rule for its state: as long as there are
copies to make, reading the attribute ``_state`` of any rule waits for them. Every update, and any
code that changes a state, reads this attribute first. Only ``vars(rule)`` and ``gc`` bypass it.

An array is copied immediately if anything except its rule refers to the array or to its memory,
because code could then change it without reading ``_state``.
"""
from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Iterable

import numpy as np
from chainer.optimizer import UpdateRule as ChainerRule

from chainer_compat.updates import update_groups
from chainermn._process import runtime
from chainermn._types import Object, UpdateRule

_SMALL = 1 << 16  # bytes; smaller arrays are copied immediately, which takes less time
_PART = 1 << 22  # bytes; a thread that must wait for another one waits for one part


class _Pending(runtime.ProcessState):
    """The copies that this process makes. A forked child makes none."""

    def __init__(self) -> None:
        self.copies: LateCopies | None = None
        self.lock = threading.RLock()  # protects `copies` and the attribute below


class _StateAfterCopies:
    """The attribute ``_state`` of all rules while there are copies to make."""

    def __get__(self, rule: UpdateRule, rule_class: type) -> Object:
        finish_copies()
        return vars(rule)['_state']

    def __set__(self, rule: UpdateRule, state: Object) -> None:
        finish_copies()
        vars(rule)['_state'] = state


def finish_copies() -> None:
    """Copy the remaining states, and wait for the states that another thread copies."""
    pending = runtime.get(_Pending)
    copies = pending.copies
    try:
        if copies is not None:
            copies.finish()
    finally:
        with pending.lock:
            if pending.copies is copies:  # unless another checkpoint has begun in the meantime
                pending.copies = None
                with contextlib.suppress(AttributeError):  # another thread was faster
                    del ChainerRule._state


class LateCopies:
    """The copies of the states of update rules for one checkpoint.

    Args:
        models: The models that have the update rules.
    """

    def __init__(self, models: Iterable[Object] = ()) -> None:
        #: By the id of an array that may be copied late: the array, its rule and its name.
        self._owners: dict[int, tuple[np.ndarray, UpdateRule, str]] = {}
        self._parts: list[tuple[np.ndarray, np.ndarray]] = []
        self._threads: dict[int, int] = {}  # the thread that copies each part
        self._done: set[int] = set()  # the parts that have been copied
        self._n_parts = 0
        self._are_complete = threading.Event()
        self._is_interrupted = False
        for model in models:
            for param in model.params():
                rule = param.update_rule
                if rule is not None and _is_plain(rule):
                    for name, array in (vars(rule)['_state'] or {}).items():
                        if _is_large(array):
                            self._owners[id(array)] = array, rule, name

    def __contains__(self, array: object) -> bool:
        """Return whether :meth:`begin` copies an array."""
        return id(array) in self._owners

    def begin(self, arrays: dict[str, np.ndarray]) -> None:
        """Replace states with copies, which are complete after :meth:`finish`.

        Args:
            arrays: Arrays by name, to which the caller has no other references.
        """
        for name in [name for name, array in arrays.items() if array in self]:
            is_late = self._is_only_of_rule(id(arrays[name]))
            arrays[name] = self._add(arrays[name]) if is_late else arrays[name].copy()
        self._owners.clear()
        self._n_parts = len(self._parts)
        if self._parts:
            finish_copies()  # finish the copies of another checkpoint
            pending = runtime.get(_Pending)
            with pending.lock:
                pending.copies = self
                ChainerRule._state = _StateAfterCopies()
        else:
            self._are_complete.set()

    def finish(self) -> None:
        """Copy the remaining states, and wait for the states that another thread copies.

        A signal handler may interrupt this method and call it again. So the method also copies
        parts that this thread has already begun to copy. No handler runs between the check of
        ``_done`` and the copy.
        """
        is_finished = False
        thread = threading.get_ident()
        try:
            for number, (copy, source) in enumerate(self._parts):
                if self._threads.setdefault(number, thread) == thread and number not in self._done:
                    np.copyto(copy, source)
                    self._done.add(number)
            if len(self._done) == self._n_parts:
                self._parts = []  # release the references
                self._are_complete.set()
            self._are_complete.wait()
            is_finished = True
        finally:
            if not is_finished:  # for example after KeyboardInterrupt
                self._is_interrupted = True
                self._are_complete.set()

    def check(self) -> None:
        """Raise RuntimeError if a thread was interrupted in :meth:`finish`."""
        if self._is_interrupted:
            raise RuntimeError('the script was interrupted while its state was being copied')

    def _is_only_of_rule(self, key: int) -> bool:
        """Return whether an array can only be reached through its rule.

        Args:
            key: Id of the array.
        """
        array, rule, name = self._owners[key]
        states = vars(rule)['_state']
        if states.get(name) is not array:  # it has been replaced
            return False
        # References from the arrays to save, self._owners and the local variable.
        known = 3 + update_groups.count_references(rule, name)
        return (_count(states, name) == _ONE + known and _count(vars(rule), '_state') == _ONE + 1
                and not weakref.getweakrefcount(array))

    def _add(self, array: np.ndarray) -> np.ndarray:
        copy = np.empty_like(array)
        to, source = copy.reshape(-1), array.reshape(-1)
        length = max(_PART // array.itemsize, 1)
        self._parts.extend((to[start:start + length], source[start:start + length])
                           for start in range(0, array.size, length))
        return copy


def _is_plain(rule: UpdateRule) -> bool:
    """Return whether a rule stores its state in the same way as Chainer's rules."""
    return type(rule).serialize is ChainerRule.serialize and not any(
        '_state' in vars(cls) for cls in type(rule).__mro__ if cls is not ChainerRule)


def _is_large(array: object) -> bool:
    return (type(array) is np.ndarray and array.nbytes >= _SMALL
            and array.flags.owndata and array.flags.c_contiguous)


def _count(values: dict[str, Object], key: str) -> int:
    return sys.getrefcount(values[key])


_ONE = _count({'value': object()}, 'value')  # the count if the dict has the only reference
