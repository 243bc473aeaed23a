"""Random trainings with all pairs of options give what one process computes."""

import one_process
import pytest
from mpi4py import MPI
from overlapping_communicator import OverlappingCommunicator

import chainermn


# One rank sends nothing.
@pytest.fixture(scope='module', params=['naive', 'flat'] if MPI.COMM_WORLD.size > 1 else ['flat'])
def comms(request):
    """For double buffering, and for everything else."""
    plain = chainermn.create_communicator(request.param)
    overlapping = OverlappingCommunicator(plain.mpi_comm)
    yield overlapping, plain
    overlapping.finalize()
    plain.finalize()


@pytest.mark.filterwarnings('ignore:overflow', 'ignore:invalid value', 'ignore:divide by zero',
                            'ignore:Non finite')
@pytest.mark.parametrize('seeds', [
    range(15), pytest.param(range(15, 500), marks=[pytest.mark.full, pytest.mark.limit(1800)])],
    ids=['15', '485'])
def test_same_parameters_as_in_one_process(comms, seeds):
    overlapping, plain = comms
    for seed in seeds:
        is_double = one_process.Case(seed, plain.size).mode == 'double buffering'
        one_process.check(seed, overlapping if is_double else plain)
