"""python -m chainermn: lists the commands, and runs them."""

import os
import subprocess
import sys

import pytest

import chainermn
from chainermn.__main__ import main

pytestmark = pytest.mark.mpi_skip

COMMANDS = ['check', 'checkpoints', 'demo', 'dump', 'run', 'timeline']


def test_without_arguments_it_lists_the_commands(capsys):
    assert main([]) == 0
    alone = capsys.readouterr().out
    with pytest.raises(SystemExit) as end:
        main(['--help'])
    assert end.value.code == 0
    assert capsys.readouterr().out == alone
    for command in COMMANDS:
        assert f'\n    {command}' in alone


def test_version(capsys):
    with pytest.raises(SystemExit) as end:
        main(['--version'])
    assert end.value.code == 0
    assert capsys.readouterr().out == f'chainermn {chainermn.__version__}\n'


@pytest.mark.parametrize('command', COMMANDS)
def test_help_of_each_command(command, capsys):
    with pytest.raises(SystemExit) as end:
        main([command, '--help'])
    assert end.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith(f'usage: python -m chainermn {command} ')
    assert max(map(len, out.splitlines())) <= 100


def test_unknown_command(usage_error):
    assert "invalid choice: 'walk' (choose from" in usage_error('walk')


@pytest.mark.parametrize('args', [['check'], ['checkpoints', 'x'], ['demo'], ['dump', '1'],
                                  ['timeline', 'x']])
def test_wrong_option_shows_the_usage_of_the_command(args, usage_error):
    err = usage_error(*args, '--wrong')
    assert err.startswith(f'usage: python -m chainermn {args[0]} ')
    assert err.endswith(f'python -m chainermn {args[0]}: error: unrecognized arguments: --wrong\n')


@pytest.mark.parametrize('args, hint', [
    (['run', '-n', '2', '--max-restart', '2'], '--max-restart. Did you mean --max-restarts?'),
    (['run', '-n', '2', '--hostfile=x', 'x'], '--hostfile=x. Did you mean --hosts-file?'),
    (['compare', 'a', '--jsn'], '--jsn. Did you mean --json?')])
def test_a_misspelled_option(args, hint, usage_error):
    assert f'unrecognized arguments: {hint}\n' in usage_error(*args)


def test_wrong_option_without_a_command(usage_error):
    assert usage_error('--wrong').startswith('usage: python -m chainermn [-h] [--version]')


def test_console_script(capsys, monkeypatch):
    """The help of the script shows the script's name; tests/install runs the installed script."""
    monkeypatch.setattr(sys, 'argv', ['/bin/chainermn', 'check', '--help'])
    with pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().out.startswith('usage: chainermn check ')


@pytest.mark.parametrize('args, statuses', [
    (['checkpoints', '.'], [141]), (['run', '--help'], [0, 141])])  # argparse may hide the error
def test_a_closed_pipe(args, statuses, tmp_path):
    """With ``| head -0``, for example, there is neither a traceback nor an error at exit."""
    source, sink = os.pipe()
    os.close(source)
    try:
        done = subprocess.run([sys.executable, '-m', 'chainermn', *args], stdout=sink, text=True,
                              stderr=subprocess.PIPE, cwd=tmp_path, check=False)
    finally:
        os.close(sink)
    assert done.returncode in statuses and not done.stderr
