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


def test_the_table():
    case, result = fault_matrix.Case, fault_matrix.Result
    text = fault_matrix.table({
        case('SIGKILL', 'before', 'flat', 2): result('', 1., ''),
        case('SIGKILL', 'bcast', 'naive', 3): result('hangs', 60., ''),
        case('SIGKILL', 'bcast_obj', 'naive', 3): result('', 2., '')})
    assert '| SIGKILL |  |  | 1/1, 1.0 s |  |' in text
    assert '|  | 1/2, 60.0 s |  |  |' in text
    assert '3 jobs on 2, 3 ranks: 2 ended correctly, 1 hung; the longest took 60.0 s.' in text
    assert '- SIGKILL / bcast / naive / 3: hangs' in text


def test_columns_of_a_table():
    """Only those with results; once more, they replace the earlier ones."""
    case, result = fault_matrix.Case, fault_matrix.Result
    text = fault_matrix.table({case('SIGKILL', 'before', 'flat', 2): result('', 1., '')})
    old = '\n'.join(' | '.join(line.split(' | ')[:5]) + ' |' if n != 1 else '|---' * 5 + '|'
                    for n, line in enumerate(text.partition('\n\n')[0].splitlines()))
    old += '\n\n1 job.\n\nOn a machine.'
    for seconds in (2., 3.):
        new = fault_matrix.table({case('SIGKILL', 'in a pipeline', 'flat', 2): result(
            '', seconds, '')})
        old = fault_matrix.with_columns(f'\n{old}\n', new, 'Here.')
    lines = old.splitlines()
    assert lines[0].endswith(' | in a message | in a pipeline |')
    assert lines[1] == '|---' * 6 + '|'
    assert '| SIGKILL |  |  | 1/1, 1.0 s |  | 1/1, 3.0 s |' in lines
    assert old.endswith('\n\n1 job.\n\nOn a machine.\n\nIn a pipeline: 1 jobs on 2 ranks: '
                        '1 ended correctly, 0 hung; the longest took 3.0 s. Here.')
