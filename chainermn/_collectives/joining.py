"""The exchange of ``chainermn.join``: which ranks still have data."""
from __future__ import annotations

from chainermn._collectives.context import Communicator
from chainermn._collectives.operation import operation
from chainermn._operations import call_signature
from chainermn._operations.call_signature import pack
from chainermn._operations.table import END


@operation('join')
def join_turn(comm: Communicator, number: int) -> tuple[int, ...]:
    """Exchange the states of all ranks.  Collective: every rank calls it."""
    messages = comm._context.check.gather(pack('join', number=number))
    return tuple(call_signature.unpack(message).number for message in messages)


def join_responses(comm: Communicator, error: BaseException) -> tuple[int | None, ...] | None:
    """Return the states of the ranks that raised an error of the check; see ``Channel``."""
    signatures = comm._context.check.mismatch_of(error)
    if signatures is None:
        return None
    if any(each.failed or each.operation == END for each in signatures):
        return ()
    return tuple(each.number if each.operation == 'join' else None for each in signatures)
