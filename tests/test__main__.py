"""python -m chainermn: says which commands there are, and starts them."""

import subprocess
import sys

import pytest
from mpi4py import MPI
from time_limits import seconds

from chainermn.__main__ import main

pytestmark = pytest.mark.skipif(MPI.COMM_WORLD.size > 1, reason='speaks on one process')

COMMANDS = ['check', 'checkpoints', 'run', 'timeline']


def test_alone_it_shows_the_commands(capsys):
    assert main([]) == 0
    alone = capsys.readouterr().out
    with pytest.raises(SystemExit) as end:
        main(['--help'])
    assert end.value.code == 0
    assert capsys.readouterr().out == alone
    for command in COMMANDS:
        assert f'\n    {command}' in alone


@pytest.mark.parametrize('command', COMMANDS)
def test_each_command_explains_itself(command, capsys):
    with pytest.raises(SystemExit) as end:
        main([command, '--help'])
    assert end.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith(f'usage: python -m chainermn {command} ')
    assert max(map(len, out.splitlines())) <= 100


def test_an_unknown_command_is_refused():
    done = subprocess.run([sys.executable, '-m', 'chainermn', 'walk'], text=True,
                          capture_output=True, timeout=seconds(50))
    assert done.returncode == 2
    assert "invalid choice: 'walk' (choose from" in done.stderr
