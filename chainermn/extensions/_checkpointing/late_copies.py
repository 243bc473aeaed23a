"""States of update rules are copied by a thread, while the next gradients are computed.

These states, such as Adam's moments, only change in an update, and are two thirds of what Adam
saves. So they are copied until the program asks any rule for its state: as long as there are
copies to make, the attribute ``_state`` of all rules waits for them. Every update, and every
program that changes a state, reads it first. Only ``vars(rule)`` and ``gc`` get around that.

An array that can be reached in another way is copied immediately: if anything but its
rule refers to it, or it shares its memory.
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

_SMALL = 1 << 16  # bytes; a smaller array is copied in less time than this takes
_PART = 1 << 22  # bytes; a thread that must wait waits for one part


class _Pending(runtime.ProcessState):
    """The copies that this process makes. A forked child makes none."""

    def __init__(self) -> None:
        self.copies: LateCopies | None = None
        self.lock = threading.RLock()  # protects them and the attribute below


class _StateAfterCopies:
    """The attribute ``_state`` of all rules while there are copies to make."""

    def __get__(self, rule: UpdateRule, rule_class: type) -> Object:
        finish_copies()
        return vars(rule)['_state']

    def __set__(self, rule: UpdateRule, state: Object) -> None:
        finish_copies()
        vars(rule)['_state'] = state


def finish_copies() -> None:
    """Wait until all states are copied, and help with that."""
    pending = runtime.get(_Pending)
    copies = pending.copies
    try:
        if copies is not None:
            copies.finish()
    finally:
        with pending.lock:
            if pending.copies is copies:  # not if another checkpoint has begun meanwhile
                pending.copies = None
                with contextlib.suppress(AttributeError):  # another thread was faster
                    del ChainerRule._state


class LateCopies:
    """The states of rules in one checkpoint.

    Args:
        models: The models whose rules they are.
    """

    def __init__(self, models: Iterable[Object] = ()) -> None:
        #: An array that may be copied late, its rule and its name, by its id.
        self._owners: dict[int, tuple[np.ndarray, UpdateRule, str]] = {}
        self._parts: list[tuple[np.ndarray, np.ndarray]] = []
        self._threads: dict[int, int] = {}  # that copies each part
        self._done: set[int] = set()  # the parts that are copied
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
        """Replace states by copies, which are complete after :meth:`finish`.

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

        A signal handler may call this in the middle of the same call. Hence it also copies what
        this thread has begun; and no handler runs between a look at ``_done`` and the copy.
        """
        is_finished = False
        thread = threading.get_ident()
        try:
            for number, (copy, source) in enumerate(self._parts):
                if self._threads.setdefault(number, thread) == thread and number not in self._done:
                    np.copyto(copy, source)
                    self._done.add(number)
            if len(self._done) == self._n_parts:
                self._parts = []  # frees the references
                self._are_complete.set()
            self._are_complete.wait()
            is_finished = True
        finally:
            if not is_finished:  # such as by KeyboardInterrupt
                self._is_interrupted = True
                self._are_complete.set()

    def check(self) -> None:
        """Raise RuntimeError if a thread was interrupted in :meth:`finish`."""
        if self._is_interrupted:
            raise RuntimeError('the program was interrupted while the state was copied')

    def _is_only_of_rule(self, key: int) -> bool:
        """Return whether an array can only be reached through its rule.

        Args:
            key: Id of the array.
        """
        array, rule, name = self._owners[key]
        states = vars(rule)['_state']
        if states.get(name) is not array:  # it was replaced since
            return False
        # The arrays to save, self._owners, and the variable.
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
    """Return whether the state of a rule is where Chainer's rules have it."""
    return type(rule).serialize is ChainerRule.serialize and not any(
        '_state' in vars(cls) for cls in type(rule).__mro__ if cls is not ChainerRule)


def _is_large(array: object) -> bool:
    return (type(array) is np.ndarray and array.nbytes >= _SMALL
            and array.flags.owndata and array.flags.c_contiguous)


def _count(values: dict[str, Object], key: str) -> int:
    return sys.getrefcount(values[key])


_ONE = _count({'value': object()}, 'value')  # if the dictionary has the only reference
