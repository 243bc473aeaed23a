"""The same program on the old ChainerMN and on ours: equal, except for the bugs that ours fixes.

The laws compare trainings with one process.
The old package is in the same environment;
``CHAINERMN_OVERLAY=0`` imports it, with Chainer patched.
"""
import ast
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from each_case import each_case
from time_limits import seconds

pytestmark = pytest.mark.mpi_skip

PROGRAM = pathlib.Path(__file__).with_name('program.py')


def scenarios(decorator):
    """The names of the functions in program.py with a decorator, without running it."""
    return [node.name for node in ast.parse(PROGRAM.read_text()).body
            if isinstance(node, ast.FunctionDef) and node.decorator_list
            and ast.unparse(node.decorator_list[0]) == decorator]


def run(ranks, folder, names, *, overlay, limit=50):
    """What each rank observed, or 'hangs', or 'fails'."""
    folder.mkdir()
    command = ['mpiexec', '-n', str(ranks), sys.executable, str(PROGRAM), str(folder), *names]
    env = {**os.environ, 'CHAINERMN_OVERLAY': overlay}
    with subprocess.Popen(command, cwd=folder, env=env, text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT) as process:
        try:
            output, _ = process.communicate(timeout=seconds(limit))
        except subprocess.TimeoutExpired:
            process.terminate()
            process.communicate()
            return 'hangs'
    if process.returncode != 0:
        return f'fails: {output}'
    observed = [json.loads((folder / f'{rank}.json').read_text()) for rank in range(ranks)]
    assert {seen.pop('version')[0] for seen in observed} == {'78'[overlay == '1']}
    return observed


def assert_close(old, new, where):
    """Equal structure; floats equal to the rounding of a few float32 steps."""
    if isinstance(old, dict):
        assert old.keys() == new.keys(), where
        for key in old:
            assert_close(old[key], new[key], f'{where}/{key}')
    elif isinstance(old, list) and not all(isinstance(x, (int, float)) for x in old):
        assert len(old) == len(new), where
        for i, pair in enumerate(zip(old, new, strict=True)):
            assert_close(*pair, f'{where}/{i}')
    elif isinstance(old, (float, list)):
        np.testing.assert_allclose(new, old, rtol=2e-5, atol=2e-6, err_msg=where)
    else:
        assert old == new, where


@pytest.mark.slow
@pytest.mark.limit(240)
@pytest.mark.sample(1)
@pytest.mark.parametrize('ranks', [3, 2])
def test_results_agree(ranks, tmp_path):
    names = scenarios('same')
    assert len(names) >= 8
    old = run(ranks, tmp_path / 'old', names, overlay='0', limit=110)
    new = run(ranks, tmp_path / 'new', names, overlay='1', limit=110)
    assert isinstance(old, list), old
    assert isinstance(new, list), new
    for rank in range(ranks):
        for name in names:
            assert_close(old[rank][name], new[rank][name], f'{name}, rank {rank}')


#: What the old one does on each of two ranks, and what ours does.
FIXED = {
    'every_dtype': (['TypeError'] * 2, ['uint8'] * 2),
    'evaluator_weighs_by_examples': (
        # the mean of 0, 1 and of 4, 9, 16, 25; then the mean of these; against the mean of all six
        [{'main/mean': (0.5 + 13.5) / 2}] * 2, [{'main/mean': 55 / 6}] * 2),
    'broadcast_of_none': ('hangs', ['None'] * 2),
    'split_keeps_configuration': ([False] * 2, [True] * 2),
    'configuration_belongs_to_one_object': ([True] * 2, [False] * 2),
    'checkpoints_after_an_error': ([False] * 2, [True] * 2),
    'a_dot_in_the_name_of_a_run': ([False] * 2, [True] * 2),
    'scatter_takes_a_raw_mpi_communicator': (['AttributeError'] * 2, [3] * 2),
    'older_names': ([{'all_to_all': 'AttributeError', 'hierarchical': 'ValueError'}] * 2,
                    [{'all_to_all': 2, 'hierarchical': 'RuntimeError'}] * 2),
}


def test_every_fixed_item_is_asserted():
    assert set(FIXED) == set(scenarios('fixed'))


@pytest.fixture
def observed(tmp_path):
    """What the old one and ours do: all scenarios in one job, but for those that hang."""
    hanging = [name for name, (old, _) in FIXED.items() if old == 'hangs']
    old = run(2, tmp_path / 'old', [name for name in FIXED if name not in hanging], overlay='0')
    new = run(2, tmp_path / 'new', list(FIXED), overlay='1')
    assert isinstance(old, list), old
    assert isinstance(new, list), new
    return ({name: [seen[name] for seen in old] for name in old[0]}
            | {name: run(2, tmp_path / name, [name], overlay='0', limit=8) for name in hanging},
            {name: [seen[name] for seen in new] for name in new[0]})


@pytest.mark.slow
@each_case('name', FIXED)
def test_fixed_on_purpose(name, observed):
    for expected, seen in zip(FIXED[name], observed, strict=True):
        assert_close(expected, seen[name], name)
