"""A signal handler raises at any moment of a collective: correct results, or errors.

Python runs signal handlers after calls, at the beginning of functions, and in loops.
"""

import dis
import os
import sys

import numpy as np
import pytest
from mpi4py import MPI

import chainermn
from chainermn._consistency import signature_exchange

pytestmark = [pytest.mark.every_size, pytest.mark.mpi(min_size=2)]

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
PACKAGE = os.path.dirname(chainermn.__file__)
CALLS = {
    'allreduce': lambda comm: comm.allreduce(np.full(2, RANK + 1.)).tolist(),
    'allreduce of ints': lambda comm: comm.allreduce(np.array([RANK]), 'max').tolist(),
    'allgather_obj': lambda comm: comm.allgather_obj(str(RANK)),
    'bcast_obj': lambda comm: comm.bcast_obj(str(RANK), root=SIZE - 1),
    'bcast': lambda comm: comm.bcast(np.array([RANK]), root=SIZE - 1).tolist(),
    'barrier': lambda comm: comm.barrier(),
}


class LateError(Exception):
    """The exception of a handler."""


class Interrupt:
    """Raises an exception at the n-th moment of a collective at which a handler may run.

    An exception before the collective begins counts as raised before the call.
    """

    def __init__(self, comm, n, error):
        self.record, self.left, self.error = comm._context.check.record, n, error
        self.previous = {}

    def __call__(self, frame, event, arg):
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == 'return':
            self.previous[frame.f_back] = ''  # only calls of functions in C are followed by one
        if event == 'opcode':
            operation = dis.opname[frame.f_code.co_code[frame.f_lasti]]
            previous = self.previous.get(frame, 'CALL')  # of a new function
            self.previous[frame] = operation
            if self.record.inside is not None and previous.startswith(('CALL', 'JUMP_BACKWARD')):
                self.left -= 1
                if self.left < 0:
                    sys.settrace(None)
                    raise self.error
        return self


@pytest.mark.sample(3)
@pytest.mark.parametrize('name, error', [
    (name, [LateError, KeyboardInterrupt][n // 2 % 2]) for n, name in enumerate(CALLS)])
def test_small_collectives(name, error):
    comm = chainermn.create_communicator('naive')
    for _ in range(signature_exchange._MESSAGES + 1):
        comm.barrier()
    call, before = CALLS[name], sys.gettrace()
    wanted, n, is_over = call(comm), 0, False
    while not is_over:
        interrupt, result, raised = Interrupt(comm, n, error), None, None
        if RANK == SIZE - 1:
            sys.settrace(interrupt)
        try:
            result = call(comm)
        except BaseException as caught:
            raised = type(caught)
        finally:
            sys.settrace(before)
        outcomes = WORLD.allgather((result == wanted, raised))
        *others, (_, own) = outcomes
        assert own in (None, error, TypeError)  # of an object that cannot be (un)pickled
        assert len({*others}) == 1 and (others[0] == (True, None) or (own and others[0][1])), (
            n, outcomes)
        assert comm.allgather_obj(n) == [n] * SIZE  # it can still be used
        n, is_over = n + 1, not own
    assert n > 10
    comm.finalize()
