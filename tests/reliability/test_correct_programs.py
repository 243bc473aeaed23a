"""Some programs of correct_programs.py; ``tox -e full`` runs more."""

import importlib.util
import pathlib

import pytest

pytestmark = [pytest.mark.mpi_skip,
              pytest.mark.limit(240)]

_spec = importlib.util.spec_from_file_location(
    'correct_programs', pathlib.Path(__file__).with_name('correct_programs.py'))
correct_programs = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(correct_programs)


@pytest.mark.sample(2)
@pytest.mark.parametrize('job', [
    correct_programs.Job(1, ranks, 0, 4, longest=3) for ranks in (2, 3, 4)] + [
    pytest.param(correct_programs.Job(2, ranks, first, 10), marks=pytest.mark.full)
    for ranks in (2, 3, 4) for first in (0, 10, 20)], ids=str)
def test_nothing_is_reported(job):
    problem, output = correct_programs.run(job)
    assert not problem, f'{problem}\n{output}'
