"""Some programs of correct_programs.py; ``tox -e full`` runs more."""


import pytest
from reliability import correct_programs

pytestmark = [pytest.mark.mpi_skip,
              pytest.mark.limit(240)]


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize('job', [
    correct_programs.Job(1, ranks, 0, 4, longest=3) for ranks in (2, 3, 4)] + [
    pytest.param(correct_programs.Job(2, ranks, first, 10), marks=pytest.mark.full)
    for ranks in (2, 3, 4) for first in (0, 10, 20)], ids=str)
def test_nothing_is_reported(job):
    problem, output = correct_programs.run(job)
    assert not problem, f'{problem}\n{output}'


@pytest.mark.slow
@pytest.mark.parametrize('name', [
    pytest.param(name, marks=() if name in ('gather_obj', 'answer') else pytest.mark.full)
    for name in correct_programs.OPERATIONS])
def test_ranks_may_end_seconds_apart(name):
    problem, output = correct_programs.run(correct_programs.Job(1, 3, 0, 0, last=name))
    assert not problem, f'{problem}\n{output}'
