"""The communicators that most of these tests run with."""

from mpi4py import MPI
from shared_fixtures import communicators

# One rank sends nothing.
comm = communicators('flat') if MPI.COMM_WORLD.size == 1 else communicators('naive', 'flat')
