"""A law of objects of the same kind, which ranks may create and use in any order."""

import dataclasses
import itertools

import pytest
from hypothesis import strategies as st
from laws.law import law, planted

import chainermn
from chainermn._operations.call_signature import Caller

pytestmark = pytest.mark.mpi(min_size=2)

_numbers = itertools.count()

#: How one rank differs from the others: it creates another object first, creates one of the objects
#: on a different line, or creates them in the reverse order.
DIFFERENCES = '', '', 'more', 'line', 'order'


@dataclasses.dataclass(frozen=True)
class Objects:
    """Objects that ranks create, and use for operations.

    Attributes:
        lines: The line that creates each object.
        different: A rank, and how it creates them.
        uses: For each operation: its name, the object that this rank uses, and the object that the
            others use.
    """

    lines: tuple[int, ...]
    different: tuple[int, str]
    uses: tuple[tuple[str, int, int], ...]
    communicator: str

    def created(self, rank, size):
        """Return the lines that create objects, in order, and the place of each object in them."""
        lines, places = [*self.lines], [*range(len(self.lines))]
        if rank == self.different[0] % size:
            if self.different[1] == 'more':
                lines, places = [9, *lines], [place + 1 for place in places]
            elif self.different[1] == 'line':
                lines[0] = 8
            elif self.different[1] == 'order':
                lines, places = lines[::-1], places[::-1]
        return lines, places


objects = st.builds(
    Objects, lines=st.lists(st.integers(1, 3), min_size=2, max_size=3).map(tuple),
    different=st.tuples(st.integers(0, 2), st.sampled_from(DIFFERENCES)),
    uses=st.lists(st.tuples(st.sampled_from(['barrier', 'allreduce_obj', 'bcast_obj']),
                            st.integers(0, 1), st.integers(0, 1)),
                  min_size=1, max_size=6).map(tuple),
    communicator=st.sampled_from(['naive', 'flat']))


@law(objects, planted(Caller, 'created', lambda created: lambda self: 0), examples=20)
def test_objects(comm, program):
    """Ranks that use different ones of the objects that all created raise; all else is allowed."""
    name = f'object {next(_numbers)}'
    lines, places = program.created(comm.rank, comm.size)
    made = []
    for line in lines:
        scope = {'Caller': Caller, 'name': name}
        exec(compile('\n' * line + 'made = Caller(name); made.remember_place()', 'program.py',
                     'exec'), scope)
        made.append(scope['made'])
    all_created = [program.created(rank, comm.size) for rank in range(comm.size)]
    accepted = set()  # ranks and objects whose lines may differ
    for operation, mine, other in program.uses:
        used = [mine if rank == program.different[0] % comm.size else other
                for rank in range(comm.size)]
        of_ranks = {created[at[n]] for (created, at), n in zip(all_created, used, strict=True)}
        pairs = {(rank, all_created[rank][1][n]) for rank, n in enumerate(used)}
        is_wrong = len(of_ranks) > 1 and not pairs & accepted and all(
            created == all_created[0][0] for created, _ in all_created)
        if not is_wrong and (len(of_ranks) > 1 or pairs & accepted):
            accepted |= pairs
        try:
            with comm.called_by(made[places[used[comm.rank]]]):
                getattr(comm, operation)(*[] if operation == 'barrier' else [1])
            error = None
        except chainermn.CollectiveMismatchError as caught:
            error = str(caught)
        assert (error is not None) == is_wrong, error
        if error is not None:
            assert 'were created on different lines' in error
            assert all(f'{name} created at program.py:{line + 1}' in error for line in of_ranks)
