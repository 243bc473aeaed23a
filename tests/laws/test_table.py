"""docs/developers.md lists all laws."""

import pytest
from laws import table

pytestmark = pytest.mark.mpi_skip


def test_page_lists_all_laws():
    page = table.PAGE.read_text()
    assert page == table.written(page), 'run `python tests/laws/table.py`'


def test_laws_have_names_of_their_own():
    names = [name for _, name, _ in table.laws()]
    assert len(names) == len(set(names)) >= 40
