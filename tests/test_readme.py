"""The promises at the top of README.md: two commands of one line, and a script that runs."""

import pathlib
import re

import pytest

README = pathlib.Path(__file__).parents[1].joinpath('README.md').read_text(encoding='utf-8')


def blocks(language):
    return re.findall(rf'^```{language}\n(.*?)^```$', README, re.MULTILINE | re.DOTALL)


def test_the_two_commands_are_one_line_each():
    train, test = blocks('sh')[:2]
    assert train.count('\n') == test.count('\n') == 1
    assert train == f'{test.rstrip()} -e mnist\n'


@pytest.mark.slow
@pytest.mark.mpi_skip  # tox -e docs runs it on 4 ranks
def test_the_script_runs_before_and_after_the_changes(capsys):
    diff = blocks('diff')[0]
    for sign, who in ('-', ''), ('+', r'rank \d of \d: '):
        script = ''.join(line[1:] for line in diff.splitlines(True) if line[0] in (' ', sign, '\n'))
        exec(script, {})
        match = re.fullmatch(rf'{who}accuracy (\d\.\d{{3}})\n', capsys.readouterr().out)
        assert float(match[1]) >= 0.8
