"""The facade: its names, and the modules that importing it loads."""

import importlib.metadata
import pathlib
import re
import subprocess
import sys

import pytest
from time_limits import seconds

import chainermn

NAMES = {
    'CommunicatorBase', 'create_communicator',
    'DataSizeError', 'scatter_dataset', 'scatter_index',
    'create_multi_node_checkpointer', 'create_multi_node_evaluator',
    'create_multi_node_optimizer',
    'MultiNodeChainList', 'Pipeline', 'RankFilter', 'join', 'launch',
}
MODULES = {
    'communicators', 'datasets', 'extensions', 'functions', 'global_except_hook', 'iterators',
    'kvstore', 'links', 'optimizers',
}

ROOT = pathlib.Path(__file__).parents[1]

#: Modules that most scripts do not need.
RARE = {
    'asyncio', 'chainer_compat.pytorch.conversion', 'chainermn._collectives.rpc',
    'chainermn._gradients.mean_queue', 'chainermn._process.metrics_server', 'chainermn._shards',
    'chainermn.extensions.checkpoint', 'chainermn.functions', 'chainermn.iterators',
    'chainermn.kvstore', 'chainermn.links', 'chainermn.optimizers._join',
    'chainermn.optimizers._overlapped', 'chainermn.optimizers._sharded_states.sharded_update'}


def test_names():
    assert set(dir(chainermn)) >= NAMES | MODULES
    assert set(chainermn.__all__) >= NAMES | MODULES
    for name in chainermn.__all__:
        assert hasattr(chainermn, name)


@pytest.mark.parametrize('name, hint', [
    ('dataset', ': use chainermn.datasets'),
    ('get_epoch_trigger', ": use the trigger (n_epochs, 'epoch')"),
    ('multi_node_evaluator', ': use chainermn.create_multi_node_evaluator'),
    ('multi_node_optimizer', ': use chainermn.create_multi_node_optimizer'),
    ('no_such_name', '')])
def test_names_before_1_0(name, hint):
    with pytest.raises(AttributeError) as caught:
        getattr(chainermn, name)
    assert str(caught.value) == f"module 'chainermn' has no attribute {name!r}{hint}"


@pytest.mark.mpi_skip
def test_import_needs_neither_mpi4py_nor_cupy():
    code = f'''
import sys
import filelock  # Chainer needs it; some versions import asyncio
before = {{*sys.modules}}
sys.modules['mpi4py'] = sys.modules['cupy'] = None
import chainermn
assert 'mpi4py.MPI' not in sys.modules
assert not {RARE!r} & (sys.modules.keys() - before)
assert not hasattr(chainermn, 'testing') and not hasattr(chainermn, 'nccl')
'''
    done = subprocess.run([sys.executable, '-W', 'error', '-c', code], text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          timeout=seconds(30))
    assert (done.returncode, done.stdout) == (0, '')


@pytest.mark.mpi_skip
def test_version():
    """Only chainermn/_version.py defines it; pip, the site and the pages show the same version."""
    number, is_unreleased, _ = chainermn.__version__.partition('.dev')
    texts = {name: ROOT.joinpath(name).read_text(encoding='utf-8') for name in (
        'CHANGELOG.md', 'CITATION.cff', 'README.md', 'docs/conf.py', 'docs/all_pages.md',
        'pyproject.toml', 'setup.py')}
    assert importlib.metadata.version('chainermn') == chainermn.__version__, (
        'install the package again')
    assert 'attr = "chainermn._version.__version__"' in texts['pyproject.toml']
    assert "'chainermn' / '_version.py'" in texts['docs/conf.py']
    heading = re.search('^## (.*)$', texts.pop('CHANGELOG.md'), re.MULTILINE)[1]
    date = 'unreleased' if is_unreleased else r'\d{4}-\d\d-\d\d'
    assert re.fullmatch(rf'{re.escape(number)} \({date}\)', heading)
    assert [name for name, text in texts.items() if number in text] == []
