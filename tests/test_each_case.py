"""each_case runs all cases; if a case fails on any rank, the test fails on all and lists it."""

import inspect

import pytest
from each_case import each_case
from mpi4py import MPI
from shared_fixtures import raises_on_all

SIZE, RANK = MPI.COMM_WORLD.size, MPI.COMM_WORLD.rank


def failure(decorator, test, request=None, **fixtures):
    with raises_on_all(pytest.fail.Exception) as caught:
        decorator(test)(request=request, **fixtures)
    return str(caught.value)


def test_all_cases_run():
    ran = []

    def test(x, y, fixture):
        ran.append((x, y, fixture))

    decorated = each_case('x, y', ((n, 2 * n) for n in range(3)))(test)
    assert list(inspect.signature(decorated).parameters) == ['request', 'fixture']
    for _ in range(2):
        decorated(request=None, fixture='z')
    assert ran == 2 * [(0, 0, 'z'), (1, 2, 'z'), (2, 4, 'z')]


def test_a_case_that_fails_on_one_rank():
    ran = []

    def test(n):
        ran.append(n)
        if n % 2 and RANK == SIZE - 1:
            raise KeyError(f'case {n}')

    text = failure(each_case('n', range(5)), test)
    assert text.startswith('2 of 5 cases failed\n')
    for n in (1, 3):
        assert f'n={n} on rank {SIZE - 1} of {SIZE}:\nTraceback' in text
        assert f"KeyError: 'case {n}'" in text
    assert ran == [*range(5)]


@pytest.mark.parametrize('outcome, says', [
    (pytest.fail, 'Failed: because'), (pytest.skip, 'a case cannot be skipped')])
def test_other_outcomes(outcome, says):
    assert says in failure(each_case('n', [0]), lambda n: outcome('because'))
