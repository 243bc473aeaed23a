"""The mark of a message of chainermn.functions: whether it is an activation or a gradient."""
from __future__ import annotations

import struct
from typing import NamedTuple

from chainermn._operations.message_header import Kind

_STRUCT = struct.Struct('=Bq?H')  # kind, number, needs_gradient, length of the text
_MAX_TEXT = 500

#: Maximum size of a mark, in bytes.
MAX_SIZE = _STRUCT.size + _MAX_TEXT


class Mark(NamedTuple):
    """Precedes the header of a message with an array or several arrays."""

    kind: Kind  # ACTIVATION or GRADIENT
    number: int  # of the activation
    needs_gradient: bool
    text: str  # the call of the sender, for errors

    def packed(self) -> bytes:
        text = self.text.encode()[:_MAX_TEXT]
        return _STRUCT.pack(self.kind, self.number, self.needs_gradient, len(text)) + text

    @classmethod
    def unpack(cls, message: memoryview) -> tuple[Mark, memoryview]:
        """Read a mark at the beginning of a message; return the mark and the rest."""
        kind, number, needs_gradient, length = _STRUCT.unpack_from(message)
        end = _STRUCT.size + length
        text = bytes(message[_STRUCT.size:end]).decode(errors='replace')
        return cls(Kind(kind), number, needs_gradient, text), message[end:]


def unexpected(rank: int, mark: Mark, source: int, call: str) -> ValueError:
    """Return the error for a gradient where data was expected, or the reverse.

    Args:
        rank: The rank that received it.
        mark: The mark of the message.
        source: The sender.
        call: The call that received it.
    """
    got, expected = ('a gradient', 'data') if mark.kind is Kind.GRADIENT else ('data', 'a gradient')
    calls = {rank: call, source: mark.text}
    return ValueError('\n'.join([
        f'chainermn.functions: rank {rank} got {got} from rank {source} where it expected '
        f'{expected}', *(f'  rank {each}: {text}' for each, text in sorted(calls.items())),
        'Each send needs a recv on the other rank. If a Variable is sent, both ranks have to run '
        'backward through it; send an array (x.array) if no gradient is needed.']))
