"""Every script of the examples shows its options, and has a README in its folder."""

import pathlib
import runpy
import sys

import pytest

pytestmark = pytest.mark.mpi_skip

EXAMPLES = pathlib.Path(__file__).parents[2] / 'examples'
SCRIPTS = [path for path in sorted(EXAMPLES.glob('*/*.py')) if '__main__' in path.read_text()]


@pytest.mark.parametrize('script', SCRIPTS, ids=lambda path: path.name)
def test_shows_its_options(script, monkeypatch, capsys):
    monkeypatch.syspath_prepend(script.parent)
    monkeypatch.setattr(sys, 'argv', [str(script), '--help'])
    modules = set(sys.modules)
    try:
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(script), run_name='__main__')
    finally:
        for other in script.parent.glob('*.py'):  # another example may have one of that name
            if other.stem not in modules:
                sys.modules.pop(other.stem, None)
    assert ended.value.code == 0
    assert f'usage: {script.name} ' in capsys.readouterr().out
    assert script.name in (script.parent / 'README.md').read_text()
