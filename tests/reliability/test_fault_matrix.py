"""Every way and every place of the fault matrix once; ``tox -e full`` runs all cases."""

import itertools

import pytest
from reliability import fault_matrix

pytestmark = [pytest.mark.mpi_skip,
              pytest.mark.limit(120)]


def diagonal():
    """Cases that cover every way and every place."""
    program, case = fault_matrix.program, fault_matrix.Case
    places = [(place, 'flat') for place in (*program.FIRST, *program.PLACES)] + list(
        zip(program.OPERATIONS, itertools.cycle(fault_matrix.COMMUNICATORS), strict=False))
    ways = itertools.cycle(way for way in program.WAYS if way not in program.HANGS)
    found = [case(way, *place, ranks) for way, place, ranks in zip(
        ways, places, itertools.cycle([2, 3]), strict=False)]
    return found + [case(way, 'allreduce', 'flat', 3) for way in program.HANGS]


@pytest.mark.parametrize('case', [
    pytest.param(case, id=' / '.join(map(str, case)), marks=(
        pytest.mark.full if case.place in fault_matrix.program.OPERATIONS and n % 5 > 0 else
        pytest.mark.slow if n % 4 > 0 else ()))
    for n, case in enumerate(diagonal())])
def test_job_ends_with_the_right_message(case):
    result = fault_matrix.run(case)
    late = result.problem.endswith(' s')  # a busy machine may be
    assert not result.problem or late, f'{result.problem}\n{result.output}'


def test_all_ways_and_places_are_covered():
    program = fault_matrix.program
    assert {case.way for case in diagonal()} == set(program.WAYS)
    assert {case.place for case in diagonal()} == {
        *program.FIRST, *program.PLACES, *program.OPERATIONS}
    places = len(program.FIRST) + len(program.PLACES) + 3 * len(program.OPERATIONS)
    assert len(fault_matrix.cases((2, 3, 4))) == 3 * (
        len(program.WAYS) * places - len(fault_matrix.NO_FAULTS))

