"""The table of operations: the compared values, the data sent, and the events waited for.

All code that treats operations differently reads this table: the call signature, the errors if
calls do not match, the timeline, and deadlock detection.
"""
from __future__ import annotations

import enum
from typing import NamedTuple

#: The parts of a call that must be the same on all ranks. CALL: the operation with its root and op;
#: DTYPE: also the dtype; SHAPE: also the shape.
CALL, DTYPE, SHAPE = 1, 2, 3

#: The operation of a rank that has reached the end of the script.
END = 'end of the script'

#: In the operation ``join``, this number and larger ones enter it and encode its options.
ENTER_JOIN = 4

#: A request of a dist_async KVStore: a push or pull.
REQUEST = 'KVStore request'

#: Messages of differentiable functions. Errors call them by their public names.
SEND, RECV = 'chainermn.functions.send', 'chainermn.functions.recv'
#: Messages with the gradients of these functions: the first one receives, the second one sends.
BACKWARD_OF_SEND, BACKWARD_OF_RECV = f'backward of {SEND}', f'backward of {RECV}'


class Payload(enum.Enum):
    """The kind of data that an operation sends or receives."""

    NOTHING = enum.auto()
    ARRAYS = enum.auto()
    OBJECT = enum.auto()  # pickled
    MODEL = enum.auto()  # its parameters or gradients


class Waits(enum.Enum):
    """The events that an operation waits for."""

    RANKS = enum.auto()  # until all ranks have called it
    RECEIVER = enum.auto()  # until its message is received
    SENDER = enum.auto()  # until its message is sent
    MESSAGES = enum.auto()  # until several messages are sent or received
    BACKGROUND = enum.auto()  # until background threads have exchanged messages
    NOTHING = enum.auto()


class Operation(NamedTuple):
    """An operation of a communicator.

    Attributes:
        name: The name in errors and on the timeline.
        equal: The parts of the call that must be the same on all ranks. ``None`` if the ranks do
            not compare the call, as for messages.
        payload: The kind of data that it sends.
        waits_for: The events that it waits for.
        digest_of: The values from which the number in the signature is computed, if it is a digest.
        advice: Advice in case the digests differ or, without a digest, the shapes.
        is_of_optimizers: Whether optimizers call it. Some ranks may then call it through an
            optimizer, and others directly.
        is_internal: Whether only this package calls it. Tests cover all other operations.
    """

    name: str
    equal: int | None = CALL
    payload: Payload = Payload.NOTHING
    waits_for: Waits = Waits.RANKS
    digest_of: str = ''
    advice: str = ''
    is_of_optimizers: bool = False
    is_internal: bool = False


ARRAYS, OBJECT, MODEL = Payload.ARRAYS, Payload.OBJECT, Payload.MODEL

_SAME_GRADIENTS = (
    'All ranks need the same model with gradients for the same parameters (zero_fill=True counts a '
    'missing gradient as zero) and the same compression.')

_PARTS = (
    ' If each rank has its own part of the model (MultiNodeChainList, Pipeline), use an ordinary '
    'optimizer; for data parallelism as well, pass a communicator of the ranks that have the same '
    'part: comm.split(part, comm.rank).')

#: All operations. Their order may change between versions, because all ranks run the same version.
OPERATIONS = (
    Operation('bcast', CALL, ARRAYS),
    Operation('gather', DTYPE, ARRAYS),
    Operation('allgather', DTYPE, ARRAYS),
    Operation('alltoall', DTYPE, ARRAYS),
    Operation('scatter', CALL, ARRAYS),
    Operation('allreduce', SHAPE, ARRAYS),
    Operation('allreduce_many', SHAPE, ARRAYS, digest_of='arrays', advice=(
        'Pass the same number of arrays with the same dtypes and shapes on all ranks.')),
    Operation('multi_node_mean', SHAPE, ARRAYS),
    Operation('reduce', SHAPE, ARRAYS),
    Operation('reduce_scatter', SHAPE, ARRAYS, digest_of='arrays', advice=(
        'Each rank passes one array per rank. The arrays for one rank must have the same shape, '
        'and all arrays the same dtype.')),
    Operation('allgather_shards', SHAPE, ARRAYS, digest_of='arrays', is_internal=True,
              advice=('Pass arrays with the same dtypes and shapes on all ranks.')),

    Operation('bcast_obj', CALL, OBJECT),
    Operation('gather_obj', CALL, OBJECT),
    Operation('allgather_obj', CALL, OBJECT),
    Operation('scatter_obj', CALL, OBJECT),
    Operation('allreduce_obj', CALL, OBJECT),

    Operation('bcast_data', SHAPE, MODEL, digest_of='parameters', is_of_optimizers=True, advice=(
        'All ranks need the same model with the same parameters initialized.' + _PARTS)),
    Operation('multi_node_mean_grad', SHAPE, MODEL, digest_of='parameters', is_of_optimizers=True,
              advice=_SAME_GRADIENTS),
    Operation('queue_gradients', SHAPE, MODEL, digest_of='parameters', is_internal=True,
              advice=_SAME_GRADIENTS),

    Operation('barrier'),
    Operation('split'),
    Operation('new_group', SHAPE, digest_of='groups', advice=(
        'Pass the same ranks, in the same order, on all ranks.')),
    Operation('join', is_internal=True),
    Operation('serve', is_internal=True),
    Operation('mean_queue', is_internal=True),
    Operation('finalize'),
    Operation('check_replicas', equal=None, is_internal=True),
    Operation(END, is_internal=True),
    Operation('failed', is_internal=True),

    Operation('send', None, ARRAYS, Waits.RECEIVER),
    Operation('send_obj', None, OBJECT, Waits.RECEIVER),
    Operation('recv', None, ARRAYS, Waits.SENDER),
    Operation('recv_obj', None, OBJECT, Waits.SENDER),
    Operation('isend', None, ARRAYS, Waits.NOTHING),
    Operation('irecv', None, ARRAYS, Waits.NOTHING),
    Operation('wait', None, ARRAYS, Waits.SENDER),
    Operation('waitall', None, waits_for=Waits.MESSAGES),
    Operation(REQUEST, None, OBJECT, Waits.BACKGROUND),
    Operation('wait for means', None, MODEL, Waits.BACKGROUND),
    Operation(SEND, None, ARRAYS, Waits.RECEIVER),
    Operation(RECV, None, ARRAYS, Waits.SENDER),
    Operation(BACKWARD_OF_RECV, None, ARRAYS, Waits.RECEIVER),
    Operation(BACKWARD_OF_SEND, None, ARRAYS, Waits.SENDER),
)

BY_NAME = {operation.name: operation for operation in OPERATIONS}


def collectives() -> frozenset[str]:
    """Return the names of the collectives that user code can call."""
    return frozenset(each.name for each in OPERATIONS
                     if each.waits_for is Waits.RANKS and not each.is_internal)


def waiting_for(*kinds: Waits) -> frozenset[str]:
    """Return the names of the operations that wait for one of these events."""
    return frozenset(each.name for each in OPERATIONS if each.waits_for in kinds)
