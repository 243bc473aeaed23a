"""The call signature: a fixed-size description of the operation that a rank calls."""
from __future__ import annotations

import functools
import hashlib
import struct
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

import numpy as np

from chainermn._operations.table import BY_NAME, CALL, DTYPE, OPERATIONS, SHAPE, Operation
from chainermn._process import runtime
from chainermn._process.program_place import program_lines

DTYPES = tuple(np.dtype(name) for name in (
    'bool', 'int8', 'int16', 'int32', 'int64', 'uint8', 'uint16', 'uint32', 'uint64',
    'float16', 'float32', 'float64', 'complex64', 'complex128'))
CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
NO_DTYPE = 255

OPS = ('', 'sum', 'prod', 'max', 'min')

#: The operations that have a signature.
NAMES = tuple(each.name for each in OPERATIONS if each.equal is not None)
_NUMBER = {name: number for number, name in enumerate(NAMES)}

MAX_INLINE_DIMS = 8
# Fields: operation, op, update, root, dtype, failed, device, dimensions, caller, number, shape
_STRUCT = struct.Struct(f'=BBHiBBBBIq{MAX_INLINE_DIMS}q')
_CALLER = struct.Struct('=I')
_CALLER_OFFSET = struct.calcsize('=BBHiBBBB')
_PADDING = tuple((0,) * (MAX_INLINE_DIMS - n) for n in range(MAX_INLINE_DIMS + 1))
SIZE = _STRUCT.size
_MASK = 2**30 - 1  # Python computes faster with 30 bits
MAX_UPDATE = 2**16 - 1
#: Size of an identifier in bytes.
IDENTIFIER_SIZE = 6


def digest(value: object) -> int:
    """Return a 63-bit digest, which is the same on all ranks for the same strings and numbers."""
    hashed = hashlib.blake2b(repr(value).encode(), digest_size=8).digest()
    return int.from_bytes(hashed, 'little') >> 1


#: The lines of user code that were running, innermost first.
Place: TypeAlias = tuple[str, ...]


class _Places(runtime.ProcessState):
    """A digest of the places at which this process has created objects, in order, by name."""

    def __init__(self) -> None:
        self.digests: dict[str, int] = {}


class Caller:
    """The caller of an operation: an extension or another part of this package, not user code.

    Args:
        name: The name of the caller, which must be the same on all ranks of every correct job. For
            example, it is not the name of a subclass, which may be used on one rank only.
        options: Options by name, which must be the same on all ranks.
        advice: Advice in case the options differ.
        warning: First and last line of the warning about allowed differences.
        if_missing: Advice in case other ranks make a different call instead.

    Attributes:
        place: The lines of user code that created the object, if they are compared; see
            :meth:`remember_place`.
        is_place_accepted: Whether the place may differ between ranks.
        digest: 31-bit digest of name, options and state; 0 stands for user code.
        options_digest: Digest of name and options.
    """

    def __init__(self, name: str, options: Mapping[str, str] | None = None, advice: str = (
            'Use the same options on all ranks, and change them on all ranks.'),
            warning: tuple[str, str] = ('', ''), if_missing: str = '') -> None:
        self.name = name
        self.advice = advice
        self.if_missing = if_missing
        self.warning = warning
        self._state_digest = 0
        self._state: Callable[[], Mapping[str, str]] = dict
        self._harmless_digest, self._are_accepted = 0, False
        self.place: Place = ()
        self._place_digest, self.is_place_accepted = 0, False
        #: Function that returns, by name, values that cause only a warning if they differ.
        self.harmless: Callable[[], Mapping[str, str]] = dict
        self.set_options(options or {})

    def set_options(self, options: Mapping[str, str]) -> None:
        """Replace the options."""
        self._options = dict(options)
        self.options_digest = digest((self.name, self._options))
        self._short_digest = self.options_digest & _MASK
        self.set_digests(self._state_digest, self._harmless_digest)

    def set_state(self, state: Callable[[], Mapping[str, str]],
                  harmless: Callable[[], Mapping[str, str]]) -> None:
        """Replace the functions that return frequently changing values.

        Args:
            state: Function that returns, by name, further values that must be the same on all
                ranks; they are listed in an error.
            harmless: Function that returns, by name, values that cause only a warning if they
                differ.
        """
        self._state, self.harmless = state, harmless

    def set_digests(self, state: int, harmless: int) -> None:
        """Replace the digests of the values that the functions of :meth:`set_state` return."""
        self._state_digest, self._harmless_digest = state, harmless
        self.digest = digest = ((self._short_digest ^ state) & _MASK) + 1 if self.name else 0
        #: Also differs between ranks if harmless values or the places differ, unless that was
        #: accepted.
        self.identity = (digest ^ (0 if self._are_accepted else harmless)
                         ^ (0 if self.is_place_accepted else self._place_digest))

    def accept_differences(self) -> None:
        """Ignore differences in harmless values from now on."""
        self._are_accepted = True
        self.set_digests(self._state_digest, self._harmless_digest)

    def remember_place(self) -> None:
        """Compare the lines of user code that create the object with those on other ranks."""
        self.place = program_lines()
        digests = runtime.get(_Places).digests
        digests[self.name] = digest((digests.get(self.name), self.place))
        self._place_digest = digest(self.place) & _MASK
        self.set_digests(self._state_digest, self._harmless_digest)

    def created(self) -> int:
        """Return a digest of the places of all objects of this name that were created so far."""
        return runtime.get(_Places).digests.get(self.name, 0)

    def accept_place(self) -> None:
        """Ignore differences between places from now on."""
        self.is_place_accepted = True
        self.set_digests(self._state_digest, self._harmless_digest)

    @property
    def options(self) -> dict[str, str]:
        """The options and the state."""
        return {**self._options, **self._state()}

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), '_options': self.options, '_state': dict, 'harmless': dict}


#: User code.
PROGRAM = Caller('')


class Update(NamedTuple):
    """An update of an optimizer.

    Attributes:
        number: The number of the update, for errors.
        since_last: The number of updates begun since gradients were last averaged, including this
            one. The ranks compare this number.
    """

    number: int
    since_last: int

    def text(self, iteration: int | None = None) -> str:
        """Describe the update, for errors.

        Args:
            iteration: The iteration of the Trainer, if a Trainer is running. It also counts the
                updates before a resume.
        """
        if iteration is None and not self.since_last:
            return ''
        return (f', update {self.number}' if iteration is None else f', iteration {iteration}') + (
            f', {self.since_last} updates since gradients were last averaged'
            if self.since_last > 1 else '')


#: For calls that no optimizer makes.
NO_UPDATE = Update(0, 0)


class CallSignature(NamedTuple):
    """The unpacked signature of one rank's call.

    ``update`` is the number of updates that an optimizer has begun since gradients were last
    averaged, or 0 if no optimizer makes the call. ``caller`` is the digest of the :class:`Caller`.
    ``number`` depends on the operation: a digest of shapes or parameters, a length in bytes, or the
    way in which shapes are sent. If ``ndim`` exceeds ``MAX_INLINE_DIMS``, ``shape`` is empty and
    ``number`` is the digest of the shape.
    """

    operation: str
    op: str
    update: int
    root: int
    code: int
    failed: bool
    device: bool
    ndim: int
    caller: int
    number: int
    shape: tuple[int, ...]

    @property
    def dtype(self) -> np.dtype:
        return DTYPES[self.code]

    @property
    def declared(self) -> Operation:
        return BY_NAME[self.operation]

    def key(self, equal: int | None) -> tuple[object, ...]:
        """Return the part of the call that must be the same on all ranks."""
        assert equal is not None
        key: tuple[object, ...] = (
            self.operation, self.root, self.op, self.update, self.caller)
        if equal >= DTYPE:
            key += (self.code,)
        if equal >= SHAPE:
            key += (self.ndim, self.shape, self.number)
        return key

    @property
    def arguments(self) -> str:
        """The known properties of the arguments as text."""
        words = []
        if self.code != NO_DTYPE:
            words.append(str(self.dtype))
            if self.declared.equal != CALL or self.shape:
                words.append(str(self.shape) if self.ndim <= MAX_INLINE_DIMS else
                             f'with {self.ndim} dimensions')
        if self.op:
            words.append(f'op={self.op!r}')
        if self.root >= 0:
            words.append(f'root={self.root}')
        return ' '.join(words)

    def __str__(self) -> str:
        return f'{self.operation} {self.arguments}'.rstrip()


@functools.lru_cache(maxsize=4096)
def pack(operation: str, shape: tuple[int, ...] = (), dtype: np.dtype | None = None, root: int = -1,
         op: str = '', device: bool = False, number: int = 0, failed: bool = False,
         update: int = 0) -> bytes:
    """Return the signature as ``SIZE`` bytes."""
    ndim = len(shape)
    if ndim > MAX_INLINE_DIMS:
        shape, number = (), digest(shape)
    return _STRUCT.pack(_NUMBER[operation], OPS.index(op), update, root,
                        NO_DTYPE if dtype is None else CODES[dtype], failed, device, ndim, 0,
                        number, *shape, *_PADDING[len(shape)])


def with_caller(signature: bytes, caller: int) -> bytes:
    """Return the signature with the digest of its caller."""
    changed = bytearray(signature)
    _CALLER.pack_into(changed, _CALLER_OFFSET, caller)
    return bytes(changed)


def unpack(data: bytes | bytearray | memoryview, offset: int = 0) -> CallSignature:
    """Read a signature from a buffer."""
    return _unpack(bytes(data[offset:offset + SIZE]))


@functools.lru_cache(maxsize=4096)
def identifier(signature: bytes) -> bytes:
    """Return a digest of the parts of a signature that identify a call.

    It differs between calls that do not match. For operations whose shapes must be the same, it
    also differs between matching calls with different devices or updates.
    """
    call = unpack(signature)
    equal = call.declared.equal
    parts = signature if equal == SHAPE else repr(call.key(equal)).encode()
    return hashlib.blake2b(parts, digest_size=IDENTIFIER_SIZE).digest()


def identifier_of_caller(signature: bytes, caller: int) -> bytes:
    """Return a digest of a call and its caller. Not cached: callers change their digests often."""
    number = int.from_bytes(identifier(signature), 'little') ^ caller
    return number.to_bytes(IDENTIFIER_SIZE, 'little')


@functools.lru_cache(maxsize=4096)
def _unpack(data: bytes) -> CallSignature:
    (operation, op, update, root, code, failed, device, ndim, caller, number, *shape
     ) = _STRUCT.unpack(data)
    return CallSignature(NAMES[operation], OPS[op], update, root, code, bool(failed),
                         bool(device), ndim, caller, number,
                         tuple(shape[:ndim]) if ndim <= MAX_INLINE_DIMS else ())
