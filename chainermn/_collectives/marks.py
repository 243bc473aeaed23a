"""The mark of a message of chainermn.functions: whether it is an activation or a gradient."""
from __future__ import annotations

import struct
from typing import NamedTuple

from chainermn._operations import call_signature

_STRUCT = struct.Struct('=q?H')  # number, needs_gradient, length of the text
_MAX_TEXT = 500

#: Maximum size of a mark, in bytes.
MAX_SIZE = call_signature.SIZE + _STRUCT.size + _MAX_TEXT


class Mark(NamedTuple):
    """The header of a message with an array or several arrays."""

    kind: str  # 'activation' or 'gradient'
    number: int  # of the activation
    needs_gradient: bool
    text: str  # the call of the sender, for errors

    def packed(self) -> bytes:
        text = self.text.encode()[:_MAX_TEXT]
        return call_signature.pack(self.kind) + _STRUCT.pack(
            self.number, self.needs_gradient, len(text)) + text

    @classmethod
    def unpack(cls, kind: str, data: memoryview) -> tuple[Mark, memoryview]:
        """Read a mark from the data after its signature; return the mark and the rest."""
        number, needs_gradient, length = _STRUCT.unpack_from(data)
        end = _STRUCT.size + length
        text = bytes(data[_STRUCT.size:end]).decode(errors='replace')
        return cls(kind, number, needs_gradient, text), data[end:]


def unexpected(rank: int, mark: Mark, source: int, call: str) -> ValueError:
    """Return the error for a gradient where data was expected, or the reverse.

    Args:
        rank: The rank that received it.
        mark: The mark of the message.
        source: The sender.
        call: The call that received it.
    """
    got, expected = ('a gradient', 'data') if mark.kind == 'gradient' else ('data', 'a gradient')
    calls = {rank: call, source: mark.text}
    return ValueError('\n'.join([
        f'chainermn.functions: rank {rank} got {got} from rank {source} where it expected '
        f'{expected}', *(f'  rank {each}: {text}' for each, text in sorted(calls.items())),
        'Each send needs a recv on the other rank. If a Variable is sent, both ranks have to run '
        'backward through it; send an array (x.array) if no gradient is needed.']))
